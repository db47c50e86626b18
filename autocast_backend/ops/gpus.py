"""The tier of CUDA devices, looked at again when CUDA is initialised.

Which GPUs there are is not known before: asking would initialise CUDA, and so keep it from the
processes that are forked from this one. A tier is that of all GPUs of a process.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from .. import _gpus, _native
from .._native import DeviceTier, KernelTier, KernelTierError
from .._torch.cuda import when_initialized
from . import _stochastic_cast, _unscale_cast, reference, triton

REFERENCE_KERNELS = {
    "multi_cast": reference.multi_cast,
    "multi_cast.out": reference.multi_cast_out,
    "cast_with_stats": reference.cast_with_stats,
    "unscale_cast": _unscale_cast.unscale_cast,
    "unscale_cast.out": _unscale_cast.unscale_cast_out,
    "stochastic_cast": _stochastic_cast.stochastic_cast,
}
"""In place of the native ones."""


def watch(tier: KernelTier, library: torch.library.Library) -> None:
    """Have the tier of ``"cuda"`` in `tier.devices` replaced by the next one, with what `library`
    registers, if it turns out not to run on the GPUs.

    Raises:
        KernelTierError: the tier is forced, CUDA is initialised, and a GPU is not one of its own.
            If CUDA is initialised later, its initialisation fails with the same text.
    """
    if tier.devices["cuda"].name != "reference":
        forced = os.environ.get(_native.TIER_VARIABLE, "")
        when_initialized(functools.partial(_look, tier, library, forced))


def _look(tier: KernelTier, library: torch.library.Library, forced: str) -> None:
    gpus = _gpus.visible_gpus()
    found = tier.devices["cuda"]
    too_old = _too_old_for_triton(gpus)
    if found.name == "native":
        problem = _gpus.problem_with(tier.build_info["cuda_architectures"], gpus)
    else:
        problem = too_old
    if problem is None:
        return
    if forced:
        raise KernelTierError(f"{_native.TIER_VARIABLE}={forced}: {problem}")
    if found.name == "triton":  # Its kernels know, and go on to plain PyTorch.
        tier.devices["cuda"] = DeviceTier("reference", f"{found.reason}, but {problem}")
        return

    next_one = _native.without_native_cuda(problem)
    if next_one.name == "triton" and too_old is not None:
        next_one = DeviceTier("reference", f"{problem}; no Triton: {too_old}")
    kernels = triton.KERNELS if next_one.name == "triton" else REFERENCE_KERNELS
    with warnings.catch_warnings():  # PyTorch's: that kernels are replaced
        warnings.simplefilter("ignore")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CUDA")
    tier.devices["cuda"] = next_one
    warnings.warn(f"smart_autocast uses {next_one.name} kernels for CUDA: {problem}", stacklevel=2)


def _too_old_for_triton(gpus: list[_gpus.Gpu]) -> str | None:
    """Where Triton compiles for none of them, that; it serves those it compiles for."""
    oldest = triton.OLDEST_CAPABILITY
    if any(gpu.capability >= oldest for gpu in gpus):
        return None
    return (
        f"Triton's kernels need a GPU of capability {oldest[0]}.{oldest[1]} or newer, and there is "
        f"{', '.join(map(str, gpus)) or 'none'}"
    )
