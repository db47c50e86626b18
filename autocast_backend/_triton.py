"""Whether Triton can run here, found out without importing it, or why not.

It needs its package and, as it builds a launcher for every kernel, a C compiler and Python's
headers; and a GPU that it compiles for, or its interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

INTERPRETER_VARIABLE = "TRITON_INTERPRET"


def interpreted() -> bool:
    """Whether kernels that are defined now run in Triton's interpreter, as Triton decides it."""
    return os.environ.get(INTERPRETER_VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def problem_with_cuda() -> str | None:
    """Why the Triton tier cannot be the one of CUDA devices, or None.

    Whether there is such a device is not asked: whoever has tensors on it has one, and asking would
    keep CUDA from the processes that are forked from this one.
    """
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    if interpreted():
        return f"{INTERPRETER_VARIABLE} is set, and the interpreter is for tensors on the CPU"
    return _problem_with_package() or _problem_with_launchers()


def problem_where_forced() -> str | None:
    """Why it can be the tier of no device at all, or None."""
    problem = _problem_with_package()
    if problem is not None or interpreted():
        return problem
    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        return (
            "Triton has neither a GPU that it compiles for nor its interpreter: torch "
            f"{torch.__version__}, built for CUDA {torch.version.cuda}, sees no CUDA device; set "
            f"{INTERPRETER_VARIABLE}=1 to interpret the kernels, slowly, on the CPU"
        )
    return _problem_with_launchers()


def _problem_with_package() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "there is no triton package; install it: pip install triton"
    return None


def _problem_with_launchers() -> str | None:
    compilers = os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")
    if not any(compilers):
        return "Triton needs a C compiler and finds none; install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"Triton needs Python's headers and does not find {header}; install them"
    return None
