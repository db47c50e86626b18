"""Which kernels run on which device: finds and loads the native libraries, or says exactly why
there are none.

Two libraries can lie beside this file, both built by CMakeLists.txt:

- ``_C.<python tag>.so``: all ops, and the Python module ``autocast_backend._C``;
- ``libsmart_autocast_cuda.so``: CUDA kernels, loaded only where torch itself has CUDA.

Where one of them is not there, a device that Triton compiles for gets the Triton tier
(``autocast_backend/ops/triton``), and every other one the reference tier
(``autocast_backend/ops/reference.py``): plain PyTorch. The results are the same.
``SMART_AUTOCAST_KERNELS=native|triton|reference`` forces a tier.

Whether a tier runs on the GPUs that are there is seen later, when CUDA is initialised
(``autocast_backend/ops/gpus.py``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import _triton

TIER_VARIABLE = "SMART_AUTOCAST_KERNELS"
CUDA_LIBRARY = "libsmart_autocast_cuda.so"
REBUILD = (
    "rebuild it with this Python and this torch: `pip install -e . --no-build-isolation --no-deps` "
    "in the source tree, or reinstall the package"
)


class KernelTierError(RuntimeError):
    """The kernels asked for are not there; the text says what was found, expected, and to do."""


@dataclass(frozen=True)
class DeviceTier:
    """The tier of one device type: ``"native"``, ``"triton"`` or ``"reference"``, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class KernelTier:
    """The tier in use and the facts behind the choice; ``smart-autocast info`` prints them."""

    name: str
    """``"native"`` where the native library is loaded, ``"triton"`` where that tier is forced, or
    ``"reference"``."""
    reason: str
    """Why this tier and not another."""
    devices: dict[str, DeviceTier]
    """The tier of ``"cpu"`` and of ``"cuda"`` tensors; all other devices have the reference one.
    When CUDA is initialised, one that does not run on the GPUs is replaced by the next."""
    library: Path | None = None
    """The native library that was loaded."""
    build_info: dict[str, str] = field(default_factory=dict)
    """What the native library was built with: torch, python, compiler, cuda_architectures."""
    cpu_capability: str | None = None
    """The instruction set that native CPU kernels use here: AVX512, AVX2 or DEFAULT."""
    cpu_vendor: str | None = None
    """Who made this CPU: amd, intel or other."""
    cuda_library: Path | None = None
    """The CUDA library that was loaded."""
    cuda_reason: str = "it comes with the native library"
    """Why the CUDA library was loaded, or not."""


@functools.cache
def load() -> KernelTier:
    """Loads the kernels, once per process.

    Returns:
        The tier in use. The native tier's ops are registered when this returns; those of the
        reference tier are not (``autocast_backend.ops`` does that).

    Raises:
        KernelTierError: ``SMART_AUTOCAST_KERNELS`` names an unknown tier or one that is not there.
            Without that variable a library that does not load is a warning, and the reference
            tier is used.
    """
    wanted = os.environ.get(TIER_VARIABLE, "")
    if wanted not in ("", "native", "triton", "reference"):
        raise KernelTierError(
            f"{TIER_VARIABLE} must be native, triton or reference, got {wanted!r}; "
            "unset it to take the best tier there is"
        )
    if wanted == "triton":
        return _forced_triton()
    forced = f"{TIER_VARIABLE}={wanted}"
    if wanted == "reference":
        tier = DeviceTier("reference", forced)
        return KernelTier(name=tier.name, reason=tier.reason, devices={"cpu": tier, "cuda": tier})

    folder = Path(__file__).parent
    library = folder / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    problem = _problem_with(library)
    if problem is None:
        cuda_library, cuda_reason = _load_cuda(folder / CUDA_LIBRARY, required=wanted == "native")
        module = importlib.import_module("autocast_backend._C")
        cpu = DeviceTier("native", forced if wanted else "the native library loads")
        if cuda_library is not None:
            cuda = DeviceTier("native", "the CUDA library loads")
        elif wanted == "native" and torch.version.cuda and torch.cuda.device_count():
            raise KernelTierError(
                f"{forced}: there is a GPU, and the CUDA library is {cuda_reason}; {REBUILD}, with "
                "nvcc and FORCE_CUDA=1"
            )
        elif wanted == "native":
            cuda = DeviceTier("reference", f"the CUDA library is {cuda_reason}; {forced}")
        else:
            cuda = without_native_cuda(f"the CUDA library is {cuda_reason}")
        return KernelTier(
            name=cpu.name,
            reason=cpu.reason,
            devices={"cpu": cpu, "cuda": cuda},
            library=library,
            build_info=module.build_info(),
            cpu_capability=module.cpu_capability(),
            cpu_vendor=module.cpu_vendor(),
            cuda_library=cuda_library,
            cuda_reason=cuda_reason,
        )
    if wanted == "native":
        raise KernelTierError(f"{forced}: {problem}; {REBUILD}")
    if any(folder.glob("_C.*.so")):  # A library that is broken, not one that was never built.
        warnings.warn(
            f"smart_autocast runs without native kernels: {problem}; {REBUILD}", stacklevel=2
        )
    cpu = DeviceTier("reference", f"{problem}; {REBUILD}")
    cuda = without_native_cuda("there is no native library that loads")
    return KernelTier(name=cpu.name, reason=cpu.reason, devices={"cpu": cpu, "cuda": cuda})


def without_native_cuda(why: str) -> DeviceTier:
    """The tier of CUDA devices that no native library serves."""
    problem = _triton.problem_with_cuda()
    if problem is None:
        return DeviceTier("triton", f"{why}; Triton compiles for CUDA")
    return DeviceTier("reference", f"{why}; no Triton: {problem}")


def _forced_triton() -> KernelTier:
    forced = f"{TIER_VARIABLE}=triton"
    problem = _triton.problem_where_forced()
    if problem is not None:
        raise KernelTierError(
            f"{forced}: {problem}; or unset {TIER_VARIABLE} to take the best tier there is"
        )
    if _triton.interpreted():
        cpu = DeviceTier("triton", f"{forced}, {_triton.INTERPRETER_VARIABLE}=1: interpreted")
        cuda = DeviceTier("reference", "Triton's interpreter is for tensors on the CPU")
    else:
        cpu = DeviceTier("reference", "Triton compiles for no CPU")
        cuda = DeviceTier("triton", forced)
    return KernelTier(name="triton", reason=forced, devices={"cpu": cpu, "cuda": cuda})


def _problem_with(library: Path) -> str | None:
    """Loads the native library; returns what is wrong with it, or None."""
    if not library.is_file():
        others = ", ".join(sorted(path.name for path in library.parent.glob("_C.*.so")))
        if others:
            return (
                f"the native library is for another Python: found {others}, expected {library.name}"
            )
        return (
            f"there is no native library: expected {library}, which an installation without a "
            "working C++ compiler, or without Python's headers, leaves out"
        )
    try:
        importlib.import_module("autocast_backend._C")
    except ImportError as error:
        return (
            f"the native library does not load with torch {torch.__version__}: {error}; found "
            f"{library}, expected one built for torch 2.11 or newer that fits this torch"
        )
    return None


def _load_cuda(library: Path, *, required: bool) -> tuple[Path | None, str]:
    """Loads the CUDA library; returns it (None: not loaded) and the reason."""
    if not library.is_file():
        return None, "not built (no nvcc was found, or FORCE_CUDA=0)"
    if not torch.backends.cuda.is_built() or torch.version.cuda is None:
        return None, f"built, not loaded: torch {torch.__version__} has no CUDA"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        problem = f"the CUDA library does not load with torch {torch.__version__}: {error}"
        if required:
            raise KernelTierError(f"{TIER_VARIABLE}=native: {problem}; {REBUILD}") from error
        warnings.warn(
            f"smart_autocast uses PyTorch's CUDA kernels: {problem}; {REBUILD}", stacklevel=3
        )
        return None, problem
    return library, "loaded"
