"""Gradients of what a graph returns, as its compiled backward takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .patches import replaced


@contextlib.contextmanager
def tangents_of_overlaps_right() -> Iterator[None]:
    """Have a backward take the gradient of an output that overlaps itself, such as
    `x.unfold(1, 4, 2)`, in memory without overlaps. Each is copied to the strides of its output, so
    that elements of this one would write over each other. PyTorch, from 2.12 on, looks for expanded
    ones alone (#184519)."""
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    original = MemoryFormatMeta.from_tensor

    def from_tensor(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        meta = original(t, *args, **kwargs)
        if meta is None or meta.stride is None or not _may_overlap(meta.size, meta.stride):
            return meta
        return MemoryFormatMeta(memory_format=torch._prims_common.suggest_memory_format(t))

    with replaced(MemoryFormatMeta, "from_tensor", staticmethod(from_tensor)):
        yield


def _may_overlap(sizes: Any, strides: Any) -> bool:
    """Whether a dimension steps over less than what those with smaller steps take up."""
    taken = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= taken:
            return True
        taken += stride * (size - 1)
    return False
