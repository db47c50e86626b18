"""Translates the environment to CMake, which is the build (CMakeLists.txt), and drives it.

    FORCE_CUDA            1: build the CUDA library, an error without nvcc; 0: do not;
                          unset: build it where nvcc is found
    TORCH_CUDA_ARCH_LIST  its architectures, as in PyTorch's own builds (default: 8.0;9.0+PTX)
    MAX_JOBS              how many compilers run at once (default: Ninja's choice)
    CXX, CUDACXX          the compilers, if not the first on PATH; CUDA_HOME: where nvcc is

Without a working C++ compiler the package is built without native kernels, and says so.

This file is also the project's PEP 517 backend (pyproject.toml): setuptools' own, which in addition
asks for cmake, ninja and torch where they are missing, and only there. torch is looked for in the
environment that is installed into: pip's build isolation hides it from `import` but not from us,
and its headers and one library to link with are all that the build needs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, build_meta, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "autocast_backend"
OLDEST_TORCH = "2.11"
OLDEST_CMAKE = "3.22"  # cmake_minimum_required in CMakeLists.txt
CUDA_ARCHITECTURES = "8.0;9.0+PTX"


def release(version: str) -> tuple[int, ...]:
    """(2, 11) of "2.11.0+cu130". A build that imports `packaging` would need it installed first."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_torch() -> tuple[Path, str] | None:
    """The torch to build against, with its version: the one `import` finds, else the one in the
    environment of this interpreter; None where there is none that is new enough."""
    folders = [*sys.path, *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    for folder in folders:
        torch = Path(folder or ".") / "torch"
        if (torch / "version.py").is_file() and (torch / "include/torch/csrc/stable").is_dir():
            found = re.search(r"__version__ = '(.+?)'", (torch / "version.py").read_text())
            if found and release(found[1]) >= release(OLDEST_TORCH):
                return torch, found[1]
    return None


def find_tool(name: str) -> str | None:
    """A program that really runs: in an isolated build the scripts of the outer environment are
    still on PATH, but cannot import the package behind them."""
    for folder in (None, str(Path(sys.executable).parent)):
        program = shutil.which(name, path=folder)
        if program is None:
            continue
        result = subprocess.run([program, "--version"], capture_output=True, text=True)
        oldest = OLDEST_CMAKE if name == "cmake" else "0"
        if result.returncode == 0 and release(result.stdout) >= release(oldest):
            return program
    return None


@functools.cache
def find_compiler() -> list[str] | None:
    """A C++ compiler that finds its own headers and Python's, with the arguments it needs: CXX if
    set ("ccache g++" for one), else the first of the usual names that does; None for none."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        first, *arguments = shlex.split(name) or [""]
        program = shutil.which(first)
        if program is not None:
            compiler = [program, *arguments]
            include = sysconfig.get_path("include")
            command = [*compiler, "-fsyntax-only", "-x", "c++", f"-I{include}", "-"]
            code = "#include <Python.h>\n#include <string>\n"
            if subprocess.run(command, input=code, text=True, capture_output=True).returncode == 0:
                return compiler
    return None


def compiler_option() -> str:
    """The compiler in CMake's words, a list of a program and its arguments."""
    return f"-DCMAKE_CXX_COMPILER={';'.join(find_compiler() or [])}"


def find_nvcc() -> str | None:
    """nvcc, in the order in which PyTorch's own extension builds look for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (
        os.environ.get("CUDACXX")
        or (home and shutil.which(f"{home}/bin/nvcc"))
        or shutil.which("nvcc")
        or shutil.which("/usr/local/cuda/bin/nvcc")
    )


def cuda_options() -> list[str]:
    """FORCE_CUDA and TORCH_CUDA_ARCH_LIST in CMake's words: "8.0;9.0+PTX" is "80-real;90"."""
    force = os.environ.get("FORCE_CUDA", "")
    if force not in ("", "0", "1"):
        sys.exit(f"FORCE_CUDA must be 0, 1 or unset, got {force!r}")
    nvcc = find_nvcc()
    if force == "1" and nvcc is None:
        sys.exit(
            "FORCE_CUDA=1, but there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda; "
            "install the CUDA toolkit, name it in CUDACXX, or unset FORCE_CUDA"
        )
    if force == "0" or nvcc is None:
        return ["-DSMART_AUTOCAST_CUDA=OFF"]

    architectures = []
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES
    for arch in re.split(r"[;, ]+", wanted.strip("; ")):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", arch)
        if match is None:
            sys.exit(
                "TORCH_CUDA_ARCH_LIST must list compute capabilities, with '+PTX' or without, "
                f"such as {CUDA_ARCHITECTURES!r}, got {arch!r} in {wanted!r}"
            )
        architectures.append(match[1] + match[2] + ("" if match[3] else "-real"))
    return [
        "-DSMART_AUTOCAST_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(architectures)}",
    ]


def require_tools() -> tuple[str, str, Path, str]:
    """cmake, ninja, torch's folder and torch's version; ends the build where one is missing."""
    cmake, ninja, torch = find_tool("cmake"), find_tool("ninja"), find_torch()
    if cmake is None or ninja is None or torch is None:
        needs = {f"cmake>={OLDEST_CMAKE}": cmake, "ninja": ninja, f"torch>={OLDEST_TORCH}": torch}
        missing = [requirement for requirement, found in needs.items() if found is None]
        sys.exit(
            f"to build the native kernels, this environment lacks {', '.join(missing)}; "
            f"`pip install {shlex.join(missing)}`, or build without --no-build-isolation"
        )
    return cmake, ninja, *torch


class CMakeBuild(build_ext):
    """Builds with CMake and Ninja, and installs the libraries where setuptools wants them: into the
    wheel, or beside the sources for an editable install."""

    def run(self) -> None:
        if not self.extensions:  # Asked for by name: pip asks for none.
            prepare_build()
            return
        cmake, ninja, torch, torch_version = require_tools()
        configuration = [
            compiler_option(),
            f"-DPython_ROOT_DIR={sys.prefix}",
            f"-DSMART_AUTOCAST_TORCH_DIR={torch}",
            f"-DSMART_AUTOCAST_TORCH_VERSION={torch_version}",
            *cuda_options(),
        ]
        # One build folder per configuration: CMake cannot change compilers in an existing one, and
        # going back to an earlier configuration rebuilds nothing.
        key = hashlib.sha256("\0".join([sys.version, *configuration]).encode()).hexdigest()[:12]
        folder = str(ROOT / "build" / f"cmake-{key}")
        # These change without any need to rebuild: isolated builds bring a new ninja each time.
        paths = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
        configure = [cmake, "-S", str(ROOT), "-B", folder, "-G", "Ninja", *paths, *configuration]
        jobs = os.environ.get("MAX_JOBS")
        subprocess.check_call(configure)
        subprocess.check_call([cmake, "--build", folder, *(["-j", jobs] if jobs else [])])

        target = (ROOT if self.inplace else Path(self.build_lib).resolve()) / PACKAGE
        # What an earlier configuration left must go, and a library that some process has mapped
        # must not be written over.
        (target / "libsmart_autocast_cuda.so").unlink(missing_ok=True)
        (target / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").unlink(missing_ok=True)
        subprocess.check_call([cmake, "--install", folder, "--prefix", str(target)])


def native_requirements() -> list[str]:
    """What pip has to bring into an isolated build environment, beyond setuptools."""
    if find_compiler() is None:
        return []
    missing = [name for name in ("cmake", "ninja") if find_tool(name) is None]
    if find_torch() is None:
        missing.append(f"torch>={OLDEST_TORCH}")
    return missing


def prepare_build() -> None:
    if find_compiler() is None:
        if os.environ.get("FORCE_CUDA") == "1":
            sys.exit("FORCE_CUDA=1 needs a C++ compiler with Python's headers, found none")
        print(
            "smart_autocast: no C++ compiler that finds Python's headers (CXX, c++, g++, clang++): "
            "building WITHOUT native kernels; the package works in plain PyTorch",
            file=sys.stderr,
        )
    # setuptools packs whatever lies in build/lib*, also files that are no longer in the sources.
    for stale in (ROOT / "build").glob("lib*"):
        shutil.rmtree(stale)


# The PEP 517 hooks.


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + native_requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + native_requirements()


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    prepare_build()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    prepare_build()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_sdist = build_meta.build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable


if __name__ == "__main__":  # setuptools' backend runs this file for each step.
    # The extension has no sources here: it makes the wheel one of this platform.
    native = [Extension(f"{PACKAGE}._C", sources=[])] if find_compiler() else []
    setup(ext_modules=native, cmdclass={"build_ext": CMakeBuild})
