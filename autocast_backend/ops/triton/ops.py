"""The ops as the dispatcher calls them: checks, memory for results, launches.

The dtypes of `launches.DTYPES` have kernels, for dense tensors; what else there is, ATen copies.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _stochastic_cast, _unscale_cast, reference
from ..stochastic import GRIDS
from . import launches
from .tables import Row


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
    return (
        {tensor.dtype, dtype} <= launches.DTYPES.keys()
        and launches.compiles_for(tensor.device)
        and is_dense(tensor)
    )


class _Rows(dict[torch.dtype, list[Row]]):
    """What is to be cast, by the dtype it comes from."""

    def add(self, result: Tensor, tensor: Tensor, number: int = 0) -> None:
        if tensor.numel() > 0:
            row = Row(tensor.numel(), result.data_ptr(), tensor.data_ptr(), number)
            self.setdefault(tensor.dtype, []).append(row)


def cast_with_stats(self: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reference.check_cast_with_stats(self, dtype)
    if not launches.compiles_for(self.device):
        return reference.cast_with_stats(self, dtype)
    reference.check_memory(self)
    # What is not dense is copied first, to the strides that the result has.
    dense = self if is_dense(self) else self.clone()
    result = torch.empty_like(dense, dtype=dtype)
    stats = torch.zeros(4, dtype=torch.float64, device=self.device)
    launches.cast_with_stats(result, dense, stats)
    return result, stats


def multi_cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    reference.check_multi_cast(tensors, dtype)
    reference.check_memory(*tensors)
    rows = _Rows()
    results = []
    for tensor in tensors:
        if _has_kernel(tensor, dtype):
            result = torch.empty_like(tensor, dtype=dtype)
            rows.add(result, tensor)
        else:
            result = tensor.to(dtype, copy=True)
        results.append(result)
    _multi_cast(rows, dtype, tensors)
    return results


def multi_cast_out(tensors: list[Tensor], dtype: torch.dtype, *, out: list[Tensor]) -> None:
    reference.check_multi_cast_out(tensors, dtype, out)
    reference.check_no_overlap("multi_cast", {"tensors": tensors}, out)
    rows = _Rows()
    for tensor, result in zip(tensors, out, strict=True):
        if tensor.stride() == result.stride() and _has_kernel(tensor, dtype):
            rows.add(result, tensor)
        else:
            result.copy_(tensor)
    _multi_cast(rows, dtype, tensors)


@functools.cache
def _beyond_float8_e4m3fn() -> int:
    """What this torch makes of numbers beyond it: NaN, or the largest number."""
    return int(torch.tensor(1e9, device="cpu").to(torch.float8_e4m3fn).view(torch.uint8))


def _multi_cast(rows: _Rows, dtype: torch.dtype, tensors: list[Tensor]) -> None:
    for source, some in rows.items():
        launches.over_table(
            "kernels",
            "multi_cast_kernel",
            some,
            to=dtype,
            source=source,
            device=tensors[0].device,
            BEYOND=_beyond_float8_e4m3fn(),
        )


def unscale_cast(grads: list[Tensor], scale: Tensor, dtype: torch.dtype) -> _unscale_cast.Unscaled:
    _unscale_cast.check(grads, scale, dtype)
    if not launches.compiles_for(scale.device):
        return _unscale_cast.unscale_cast(grads, scale, dtype)
    reference.check_memory(*grads, scale)
    rows = _Rows()
    results = []
    for grad in grads:
        if _has_kernel(grad, dtype):
            result = torch.empty_like(grad, dtype=dtype)
            rows.add(result, grad)
        else:
            result = grad.to(dtype, copy=True)
            rows.add(result, result)
        results.append(result)
    return results, _unscale(rows, scale, dtype)


def unscale_cast_out(
    grads: list[Tensor], scale: Tensor, dtype: torch.dtype, *, out: list[Tensor]
) -> Tensor:
    _unscale_cast.check_out(grads, scale, dtype, out)
    if not launches.compiles_for(scale.device):
        return _unscale_cast.unscale_cast_out(grads, scale, dtype, out=out)
    rows = _Rows()
    copies = []  # of what the kernel cannot write
    for grad, result in zip(grads, out, strict=True):
        if grad.stride() == result.stride() and _has_kernel(grad, dtype):
            rows.add(result, grad)
        elif is_dense(result):
            result.copy_(grad)
            rows.add(result, result)
        else:
            dense = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)
            rows.add(dense.copy_(grad), dense)
            copies.append((result, dense))
    found = _unscale(rows, scale, dtype)
    for result, dense in copies:
        result.copy_(dense)
    return found


def _unscale(rows: _Rows, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`found_inf`."""
    inverse = _unscale_cast.inverse_of(scale)
    found = scale.new_zeros(())
    for source, some in rows.items():
        launches.over_table(
            "unscale_kernel",
            "unscale_cast_kernel",
            some,
            inverse,
            found,
            to=dtype,
            source=source,
            device=scale.device,
        )
    return found


def stochastic_cast(
    tensors: list[Tensor], dtype: torch.dtype, seed: int, offset: int
) -> list[Tensor]:
    _stochastic_cast.check(tensors, dtype, offset)
    if not tensors or not launches.compiles_for(tensors[0].device):
        return _stochastic_cast.stochastic_cast(tensors, dtype, seed, offset)
    reference.check_memory(*tensors)
    # What is new among these has to live until the kernels are launched.
    sources = [
        tensor if _has_kernel(tensor, dtype) else tensor.to(torch.float32, copy=True)
        for tensor in tensors
    ]
    results = [torch.empty_like(source, dtype=dtype) for source in sources]
    rows = _Rows()
    counters = _stochastic_cast.first_counters(tensors, offset)
    for result, source, counter in zip(results, sources, counters, strict=True):
        rows.add(result, source, counter)
    grid = GRIDS[dtype]
    for source_dtype, some in rows.items():
        launches.over_table(
            "stochastic_kernel",
            "stochastic_cast_kernel",
            some,
            seed,
            to=dtype,
            source=source_dtype,
            device=tensors[0].device,
            FRACTION=grid.fraction,
            BOTTOM=grid.bottom,
            BEYOND=_beyond_float8_e4m3fn(),
        )
    return results
