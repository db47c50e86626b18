"""Tables of the tensors that one launch casts, in the memory of the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._torch.tensors import write_numbers

TABLES_KEPT = 64
"""How many tables stay on the device for calls with the same tensors: 40 bytes of each tensor."""


@dataclass(frozen=True)
class Row:
    """One tensor."""

    count: int
    """Its elements, at least one."""
    to: int
    """The address it goes to."""
    source: int
    """The address it comes from."""
    number: int = 0
    """For `stochastic_cast`, its first counter."""


def layout(rows: Sequence[Row], tile: int) -> tuple[tuple[int, ...], int]:
    """The table as the kernels read it (`kernels.find_tile`), and how many tiles there are in all.

    Args:
        rows: the tensors.
        tile: elements in a tile; the last one of a tensor may have fewer.
    """
    numbers: list[int] = []
    tiles = 0
    for row in rows:
        numbers += (tiles, row.count, row.to, row.source, row.number)
        tiles += -(-row.count // tile)
    return tuple(numbers), tiles


def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A table that holds `numbers`, int64, for kernels on the current stream.

    Where nothing is captured it is copied from page-locked memory, and kept for the next call with
    the same numbers. A CUDA graph would copy again from that memory whenever it is replayed, and
    use a table that may be gone: there the numbers travel as arguments of kernels, which are part
    of the graph, and write the table, which is in the graph's memory, before each use.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    if not torch.cuda.is_current_stream_capturing():
        return _kept(numbers, device, torch.cuda.current_stream(device))
    table = torch.empty(len(numbers), dtype=torch.int64, device=device)
    write_numbers(table, numbers)
    return table


@functools.lru_cache(TABLES_KEPT)
def _kept(numbers: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream) -> Tensor:
    # One for each stream: only there is the copy done before the kernels that read it.
    def copied() -> Tensor:
        with torch.cuda.stream(stream):
            table = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True)
            return table.to(device, non_blocking=True)

    # In a thread of its own. While Inductor warms a CUDA graph up, all that this one allocates is
    # in the graph's pool, and must be gone after it (`cudagraph_trees.check_memory_pool`).
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copied).result()
