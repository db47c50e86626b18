"""The ops as the dispatcher calls them: checks, memory for results, launches.

The dtypes of DTYPES have kernels, for dense tensors; ATen copies the rest.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .. import reference
from . import launches

DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements, in some order of the dimensions, lie end to end in memory."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _has_kernel(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype in DTYPES and dtype in DTYPES and launches.compiles_for(tensor.device)


def cast(self: Tensor, dtype: torch.dtype) -> Tensor:
    if not (_has_kernel(self, dtype) and is_dense(self)):
        return reference.cast(self, dtype)
    result = torch.empty_like(self, dtype=dtype)
    launches.cast(result, self)
    return result


class _Work:
    """What is to be cast, in one launch for each dtype it comes from and each alignment."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: dict[tuple[torch.dtype, bool], list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, result: Tensor, tensor: Tensor) -> None:
        count = tensor.numel()
        if count > 0:
            to, source = result.data_ptr(), tensor.data_ptr()
            self.tensors[tensor.dtype, launches.is_aligned(to, source)].append((to, source, count))

    def run(self, device: torch.device) -> None:
        for (source, aligned), tensors in self.tensors.items():
            launches.multi_cast(tensors, self.dtype, source, aligned=aligned, device=device)


def multi_cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    reference.check_multi_cast(tensors, dtype)
    work = _Work(dtype)
    results = []
    for tensor in tensors:
        if _has_kernel(tensor, dtype) and is_dense(tensor):
            result = torch.empty_like(tensor, dtype=dtype)
            work.add(result, tensor)
        else:
            result = tensor.to(dtype, copy=True)
        results.append(result)
    if tensors:
        work.run(tensors[0].device)
    return results


def multi_cast_out(tensors: list[Tensor], dtype: torch.dtype, *, out: list[Tensor]) -> None:
    reference.check_multi_cast_out(tensors, dtype, out)
    reference.check_no_overlap(tensors, out)
    work = _Work(dtype)
    for tensor, result in zip(tensors, out, strict=True):
        same_order = tensor.stride() == result.stride()
        if same_order and _has_kernel(tensor, dtype) and is_dense(tensor):
            work.add(result, tensor)
        else:
            result.copy_(tensor)
    if tensors:
        work.run(tensors[0].device)


def cast_with_stats(self: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reference.check_cast_with_stats(self, dtype)
    if not _has_kernel(self, dtype):
        return reference.cast_with_stats(self, dtype)
    # What is not dense is copied first, to the strides that the result has.
    dense = self if is_dense(self) else self.clone()
    result = torch.empty_like(dense, dtype=dtype)
    stats = torch.zeros(4, dtype=torch.float64, device=self.device)
    launches.cast_with_stats(result, dense, stats)
    return result, stats
