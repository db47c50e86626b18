"""A whole installation from a copy, with the CPU kernels under AddressSanitizer and UBSan: what is
in it, and the kernels' tests."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_build import copy_of_sources, info, install, program

ROOT = Path(__file__).parents[2]
COMPILER = shlex.split(os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "")
SANITIZE = (
    "-O0 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
)
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


def runtime_libraries() -> str | None:
    """The compiler's AddressSanitizer, which knows of torch's memory only if it was loaded before,
    and the C++ library whose exceptions it wants to see. None where there is none."""
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        command = [*COMPILER, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            return None
        paths.append(path)
    return " ".join(paths)


def test_an_installation_and_its_cpu_kernels(tmp_path: Path) -> None:
    libraries = runtime_libraries()
    # Sanitized, the file with pybind11 in it would take two fifths of the time to compile.
    compiler = program(
        tmp_path / "c++",
        f"""
        case "$*" in *" -c "*/module.cpp) set -- "$@" -fno-sanitize=all;; esac
        exec {shlex.join(COMPILER)} "$@"
        """,
    )
    target = tmp_path / "site"
    install(
        copy_of_sources(tmp_path / "sources"),
        target,
        CXX=compiler,
        CXXFLAGS=SANITIZE if libraries else "",
        CMAKE_BUILD_TYPE="Sanitized",  # one without flags of its own: -O3 takes long to compile
        FORCE_CUDA="0",
    )
    (module,) = (target / "autocast_backend").glob("_C.*.so")
    assert not list(target.rglob("*.cpp"))
    preloaded = {
        "LD_PRELOAD": libraries or "",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    text = info(target, **preloaded)
    assert f"native library  {module}" in text
    assert "cuda_architectures none" in text
    assert "CUDA library    none: not built" in text
    if not libraries:
        pytest.skip("the compiler has no AddressSanitizer")

    assert b"__asan_init" in module.read_bytes()
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = {
        **os.environ,
        **preloaded,
        "PYTHONPATH": str(target),
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
