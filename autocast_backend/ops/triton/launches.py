"""Launches of the kernels: their grids and variants, the device they run on."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import tables
from .tables import Row

ALIGNMENT = 16  # bytes that a thread loads or stores at a time
TILE = 4096  # elements that a program casts: 16 for each of 256 threads
STATS_TILE = 2048  # fewer, as each of them has four numbers of its own
WARPS = 8
# A product is rounded before anything is added to it. (Triton 3.9 fuses the two where nothing is
# said, with a warning; later ones do not.)
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
STATS_PROGRAMS_PER_PROCESSOR = 8
OLDEST_CAPABILITY = (8, 0)
DTYPES = {  # that have kernels, and what Triton calls them
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
}


def is_aligned(*addresses: int) -> bool:
    """Whether vectors can be loaded and stored there."""
    return not any(address % ALIGNMENT for address in addresses)


@functools.cache
def compiles_for(device: torch.device) -> bool:
    """Whether Triton compiles for a device: for CUDA of compute capability 8.0 or newer."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def cast_with_stats(result: Tensor, tensor: Tensor, stats: Tensor) -> None:
    """`tensor` into `result`, of one device, one shape and one order in memory, both dense; adds
    the numbers to `stats`, four zeros in float64."""
    to, source, count = result.data_ptr(), tensor.data_ptr(), tensor.numel()
    if count == 0:
        return
    tiles = -(-count // STATS_TILE)
    programs = min(tiles, _stats_programs(tensor.device))
    variant = _variant(result.dtype, tensor.dtype, is_aligned(to, source), STATS_TILE)
    with _current(tensor.device):
        _kernel("stats_kernel", "cast_with_stats_kernel")[programs,](
            to, source, count, tiles, stats, **variant
        )


def over_table(
    module: str,
    name: str,
    rows: Sequence[Row],
    *arguments: object,
    to: torch.dtype,
    source: torch.dtype,
    device: torch.device,
    **constants: int,
) -> None:
    """A kernel over many dense tensors of one dtype, with what its other parameters are: one launch
    for those that are aligned, one for those that are not."""
    for aligned in (True, False):
        chosen = [row for row in rows if is_aligned(row.to, row.source) == aligned]
        if not chosen:
            continue
        numbers, tiles = tables.layout(chosen, TILE)
        variant = _variant(to, source, aligned, TILE)
        with _current(device):
            table = tables.on_device(numbers, device)
            _kernel(module, name)[tiles,](table, len(chosen), *arguments, **variant, **constants)


@functools.cache
def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f".{module}", __package__), name)


@functools.cache
def _variant(to: torch.dtype, source: torch.dtype, aligned: bool, tile: int) -> dict[str, Any]:
    import triton.language as tl

    return {
        "TO": getattr(tl, DTYPES[to]),
        "FROM": getattr(tl, DTYPES[source]),
        "ALIGNED": aligned,
        "TILE": tile,
        **OPTIONS,
    }


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Triton launches on the current device, and on its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _stats_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 3
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * STATS_PROGRAMS_PER_PROCESSOR
