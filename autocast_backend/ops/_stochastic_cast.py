"""``smart_autocast::stochastic_cast`` for the compiler, autograd and vmap, and without a kernel.

What it computes is the comment at its schema, in ``csrc/ops/stochastic_cast.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import register_autograd_kernel
from .reference import (
    check_castable,
    check_floating,
    check_memory,
    check_same_device,
    empty_batch,
    fail,
    refuse_derivatives,
)
from .stochastic import GRIDS, philox, round_to_grid

_OP = "stochastic_cast"


def check(tensors: list[Tensor], dtype: torch.dtype, offset: int) -> None:
    if dtype not in GRIDS:
        raise fail(
            _OP,
            "argument 'dtype' must be torch.bfloat16, torch.float16, torch.float8_e4m3fn or "
            f"torch.float8_e5m2, got {dtype}",
        )
    if isinstance(offset, int) and offset < 0:  # a symbol is a number in the kernel
        raise fail(_OP, f"argument 'offset' must not be negative, got {offset}")
    for i, tensor in enumerate(tensors):
        check_castable(_OP, "tensors", tensor)
        check_floating(_OP, "tensors", i, tensor)
        check_same_device(_OP, tensors, i, tensor)


def _counters(tensor: Tensor) -> int:
    """How many counters a tensor takes: four words each."""
    return (tensor.numel() + 3) // 4


def stochastic_cast(
    tensors: list[Tensor], dtype: torch.dtype, seed: int, offset: int
) -> list[Tensor]:
    check(tensors, dtype, offset)
    check_memory(*tensors)
    results = []
    for tensor, first in zip(tensors, first_counters(tensors, offset), strict=True):
        # Its elements in the order in which they lie in the result.
        numbers = tensor.to(torch.float32, copy=True)
        run = numbers.as_strided((numbers.numel(),), (1,))
        counters = torch.arange(_counters(tensor), device=tensor.device) + first
        words = philox(counters, seed).flatten()[: numbers.numel()]
        run.copy_(round_to_grid(run, words, GRIDS[dtype]))
        results.append(numbers.to(dtype))
    return results


def first_counters(tensors: list[Tensor], offset: int) -> Iterator[int]:
    """The counter that each tensor begins with, as an int64."""
    for tensor in tensors:
        yield offset
        offset = _wrapped(offset + _counters(tensor))


def _wrapped(number: int) -> int:
    """Modulo 2^64, as an int64."""
    return (number + 2**63) % 2**64 - 2**63


def _fake(tensors: list[Tensor], dtype: torch.dtype, seed: int, offset: int) -> list[Tensor]:
    check(tensors, dtype, offset)
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def autograd(
    below: Callable[..., list[Tensor]],
    tensors: list[Tensor],
    dtype: torch.dtype,
    seed: int,
    offset: int,
) -> list[Tensor]:
    """What autograd calls; `below` is the op without autograd."""
    refuse_derivatives(_OP, tensors)
    return below(tensors, dtype, seed, offset)


def _vmap(
    info: Any,
    in_dims: tuple[list[int | None], None, None, None],
    tensors: list[Tensor],
    dtype: torch.dtype,
    seed: int,
    offset: int,
) -> tuple[list[Tensor], list[int]]:
    """One call for each example, all with the same random words."""
    if info.batch_size == 0:
        return empty_batch(tensors, in_dims[0], dtype), [0] * len(tensors)
    op = torch.ops.smart_autocast.stochastic_cast.default
    calls = [
        op(
            [
                tensor if dim is None else tensor.select(dim, i)
                for tensor, dim in zip(tensors, in_dims[0], strict=True)
            ],
            dtype,
            seed,
            offset,
        )
        for i in range(info.batch_size)
    ]
    return [torch.stack(list(results)) for results in zip(*calls, strict=True)], [0] * len(tensors)


def register(library: torch.library.Library) -> None:
    """Registers all of it; the op must be defined already."""
    library.impl(_OP, stochastic_cast, "CompositeExplicitAutograd")
    torch.library.register_fake(f"smart_autocast::{_OP}", _fake)
    register_autograd_kernel(_OP, autograd)
    torch.library.register_vmap(f"smart_autocast::{_OP}", _vmap)
