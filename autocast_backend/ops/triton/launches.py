"""Launches of the kernels: their grids and variants, the device they run on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import tables

ALIGNMENT = 16  # bytes that a thread loads or stores at a time
TILE = 4096  # elements that a program casts: 16 for each of 256 threads
STATS_TILE = 2048  # fewer, as each has three counters
WARPS = 8
STATS_PROGRAMS_PER_PROCESSOR = 8
OLDEST_CAPABILITY = (8, 0)


def is_aligned(*addresses: int) -> bool:
    """Whether vectors can be loaded and stored there."""
    return not any(address % ALIGNMENT for address in addresses)


@functools.cache
def compiles_for(device: torch.device) -> bool:
    """Whether Triton compiles for a device: for CUDA of compute capability 8.0 or newer."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from . import kernels, stats_kernel

    return kernels, stats_kernel


@functools.cache
def _dtypes() -> dict[torch.dtype, Any]:
    import triton.language as tl

    return {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
    }


def _variant(to: torch.dtype, source: torch.dtype, *, aligned: bool) -> dict[str, Any]:
    dtypes = _dtypes()
    return {"TO": dtypes[to], "FROM": dtypes[source], "ALIGNED": aligned, "num_warps": WARPS}


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, and on its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def cast(result: Tensor, tensor: Tensor) -> None:
    """`tensor` into `result`: of one device, one shape and one order in memory, both dense."""
    to, source, count = result.data_ptr(), tensor.data_ptr(), tensor.numel()
    if count == 0:
        return
    variant = _variant(result.dtype, tensor.dtype, aligned=is_aligned(to, source))
    with _current(tensor.device):
        _kernels()[0].cast_kernel[(-(-count // TILE),)](to, source, count, TILE=TILE, **variant)


def multi_cast(
    tensors: Sequence[tuple[int, int, int]],
    to: torch.dtype,
    source: torch.dtype,
    *,
    aligned: bool,
    device: torch.device,
) -> None:
    """Many tensors of a dtype: for each the address it goes to, the one it comes from, and its
    elements, at least one. `aligned`: all of the addresses are."""
    numbers, tiles = tables.rows(tensors, TILE)
    with _current(device):
        table = tables.on_device(numbers, device)
        _kernels()[0].multi_cast_kernel[(tiles,)](
            table, len(tensors), TILE=TILE, **_variant(to, source, aligned=aligned)
        )


def cast_with_stats(result: Tensor, tensor: Tensor, stats: Tensor) -> None:
    """As `cast`; adds the numbers to `stats`, four zeros in float64."""
    to, source, count = result.data_ptr(), tensor.data_ptr(), tensor.numel()
    if count == 0:
        return
    programs = min(-(-count // STATS_TILE), _stats_programs(tensor.device))
    variant = _variant(result.dtype, tensor.dtype, aligned=is_aligned(to, source))
    with _current(tensor.device):
        _kernels()[1].cast_with_stats_kernel[(programs,)](
            to, source, count, programs * STATS_TILE, stats, TILE=STATS_TILE, **variant
        )


@functools.cache
def _stats_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * STATS_PROGRAMS_PER_PROCESSOR
