"""setup.py: what it makes of the environment, and (slow) a whole installation from a copy. One with
a compiler: tests/csrc/test_sanitizers.py."""

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source tree")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("smart_autocast_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("arch_list", "expected"),
    [
        ("", "80-real;90"),
        ("8.0;9.0+PTX", "80-real;90"),
        ("7.5 8.6", "75-real;86-real"),
        ("9.0a,10.0f+PTX;", "90a-real;100f"),
        ("12.0", "120-real"),
    ],
)
def test_cuda_architectures(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, arch_list: str, expected: str
) -> None:
    monkeypatch.setenv("CUDACXX", "/somewhere/nvcc")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    assert build.cuda_options() == [
        "-DSMART_AUTOCAST_CUDA=ON",
        "-DCMAKE_CUDA_COMPILER=/somewhere/nvcc",
        f"-DCMAKE_CUDA_ARCHITECTURES={expected}",
    ]


@pytest.mark.parametrize("arch_list", ["Hopper", "9", "9.0+ptx", "sm_90", "8.0;all"])
def test_unknown_cuda_architecture(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, arch_list: str
) -> None:
    monkeypatch.setenv("CUDACXX", "/somewhere/nvcc")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list)
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST must .*'8.0;9.0\+PTX', got"):
        build.cuda_options()


def test_force_cuda(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.cuda_options() == ["-DSMART_AUTOCAST_CUDA=OFF"]
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match=r"FORCE_CUDA=1, but there is no nvcc .* unset FORCE_CUDA"):
        build.cuda_options()
    monkeypatch.setattr(build, "find_nvcc", lambda: "/somewhere/nvcc")
    assert "-DSMART_AUTOCAST_CUDA=ON" in build.cuda_options()
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert build.cuda_options() == ["-DSMART_AUTOCAST_CUDA=OFF"]
    monkeypatch.setenv("FORCE_CUDA", "yes")
    with pytest.raises(SystemExit, match="FORCE_CUDA must be 0, 1 or unset, got 'yes'"):
        build.cuda_options()


def test_nvcc_of_cuda_home_comes_before_path(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = program(tmp_path / "bin" / "nvcc", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_nvcc() == nvcc


def test_compiler_that_does_not_work(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert build.find_compiler() is None
    assert build.native_requirements() == []  # nothing to build: nothing to download


def test_a_compiler_with_a_launcher_before_it(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = program(tmp_path / "ccache", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{launcher} c++ -O1")
    assert build.find_compiler() == [launcher, "c++", "-O1"]
    # And CMake takes it: its checks of a compiler compile and link.
    project = tmp_path / "project"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(probe LANGUAGES CXX)\n"
    )
    command = [build.find_tool("cmake"), "-G", "Ninja", "-S", str(project), "-B", str(tmp_path)]
    subprocess.run([*command, build.compiler_option()], check=True, capture_output=True)


def test_force_cuda_needs_a_compiler(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match="FORCE_CUDA=1 needs a C"):
        build.prepare_build()


def test_only_what_is_missing_is_required(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: ["/usr/bin/c++"])
    monkeypatch.setattr(build, "find_tool", lambda name: f"/usr/bin/{name}")
    assert build.native_requirements() == []  # torch is here: the tests run on it
    monkeypatch.setattr(build, "find_torch", lambda: None)
    monkeypatch.setattr(build, "find_tool", lambda name: None)
    assert build.native_requirements() == ["cmake", "ninja", "torch>=2.11"]


def test_tool_that_does_not_run_or_is_too_old(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    assert build.find_tool("cmake") is None
    cmake = program(tmp_path / "cmake", "echo No module named cmake >&2; exit 1")
    assert build.find_tool("cmake") is None
    program(tmp_path / "cmake", "echo cmake version 3.9.2")
    assert build.find_tool("cmake") is None
    program(tmp_path / "cmake", "echo cmake version 3.22.1")
    assert build.find_tool("cmake") == cmake


def fake_torch(folder: Path, version: str) -> Path:
    (folder / "torch/include/torch/csrc/stable").mkdir(parents=True)
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return folder / "torch"


def test_torch_is_found_behind_build_isolation(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In an isolated build sys.path lacks the environment's folder; getsitepackages() has it."""
    monkeypatch.setattr(build.sys, "path", [str(tmp_path / "overlay")])
    monkeypatch.setattr(build.site, "getsitepackages", lambda: [str(tmp_path / "site")])
    monkeypatch.setattr(build.site, "ENABLE_USER_SITE", False)
    assert build.find_torch() is None
    outer = fake_torch(tmp_path / "site", "2.10.1+cu130")
    assert build.find_torch() is None  # too old
    (outer / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    assert build.find_torch() == (outer, "2.11.0+cu130")
    inner = fake_torch(tmp_path / "overlay", "2.15.0a0+git12ab")
    assert build.find_torch() == (inner, "2.15.0a0+git12ab")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return copy_of_sources(tmp_path / "sources")


def copy_of_sources(copy: Path) -> Path:
    """A copy of what an sdist holds, so that nothing is built in this tree."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("autocast_backend", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


def install(sources: Path, target: Path, **environment: str) -> str:
    """Installs without a network; returns what the build printed."""
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--no-index", "--target", str(target), str(sources)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    return result.stdout + result.stderr


def info(target: Path, **environment: str) -> str:
    ours = {"PYTHONPATH": str(target), "SMART_AUTOCAST_KERNELS": ""}
    return subprocess.run(
        [sys.executable, "-m", "autocast_backend.cli", "info"],
        env={**os.environ, **ours, **environment},
        cwd=target,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_an_sdist_has_all_that_the_readme_and_the_tests_name(sources: Path, tmp_path: Path) -> None:
    for name in ("benchmarks", "docs", "examples", "tests"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "Makefile", *ROOT.glob("*.md")):
        shutil.copy(file, sources)
    there = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=sources, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert there - packed == set()


@pytest.mark.slow
def test_install_without_a_compiler(sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    printed = install(sources, target, CXX="/bin/false")
    assert printed.count("building WITHOUT native kernels") == 1
    text = info(target)
    assert "kernel tier     reference: there is no native library" in text
    assert not list(target.rglob("*.so"))


def test_build_beside_the_sources_without_a_compiler(sources: Path) -> None:
    """As `make SYSTEM=1` does it, and not pip."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, "CXX": "no-such-compiler", "FORCE_CUDA": ""}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)

    result = run()
    assert result.returncode == 0, result.stderr
    assert "building WITHOUT native kernels" in result.stderr
    environment["FORCE_CUDA"] = "1"
    result = run()
    assert result.returncode != 0
    assert "FORCE_CUDA=1 needs a C++ compiler with Python's headers" in result.stderr
