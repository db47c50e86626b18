"""The CPU kernels under AddressSanitizer and UBSan: their tests, on a build of a copy."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shlex.split(os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "")
SANITIZE = (
    "-O0 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
)
# AddressSanitizer knows of torch's memory only if it was loaded before torch.
TESTS = [
    "test_multi_cast.py",
    "test_multi_cast_values.py",
    "test_cast_with_stats.py",
    "test_unscale_cast.py",
    "test_unscale_cast_out.py",
    "test_stochastic_cast.py",
]
# Processes of their own, what compiles, and what is only more of the same values.
NOT = "not thread and not fork and not compile and not opcheck and not narrower and not every_"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler"),
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree"),
]


def runtime_libraries() -> str:
    """The compiler's AddressSanitizer, and the C++ library whose exceptions it wants to see: both
    must be loaded before Python."""
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*COMPILER, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"the compiler has no {name}")
        paths.append(path)
    return " ".join(paths)


def test_cpu_kernels(tmp_path: Path) -> None:
    libraries = runtime_libraries()
    for folder in ("autocast_backend", "csrc", "tests"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    # A build type without flags of its own: optimizing takes longer than the tests do.
    build_type = {"CXXFLAGS": SANITIZE, "CMAKE_BUILD_TYPE": "Sanitized"}
    environment = {**os.environ, **build_type, "FORCE_CUDA": "0"}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    built = subprocess.run(build, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (module,) = (tmp_path / "autocast_backend").glob("_C.*.so")
    assert b"__asan_init" in module.read_bytes()

    environment = {
        **os.environ,
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONPATH": str(tmp_path),
        "SMART_AUTOCAST_KERNELS": "native",
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--capture=sys"]  # a report is written to the file descriptor, and ends the process
    command += ["-m", "not slow", "-k", NOT, *(f"tests/ops/{name}" for name in TESTS)]
    for capability in ({}, {"ATEN_CPU_CAPABILITY": "default"}):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment | capability, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        assert " passed" in done.stdout
