"""``smart_autocast::cast_with_stats`` for the compiler, autograd and vmap, and without a kernel.

The schema is in ``csrc/ops/cast_with_stats.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import is_transformed, register_autograd_kernel
from . import reference

Result = tuple[Tensor, Tensor]

_NAME = "smart_autocast::cast_with_stats"


def _fake(self: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reference.check_cast_with_stats(self, dtype)
    return torch.empty_like(self, dtype=dtype), self.new_empty(4, dtype=torch.float64)


class _CastWithStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Result], self: Tensor, dtype: torch.dtype) -> Result:
        ctx.dtype = self.dtype
        result, stats = below(self, dtype)
        ctx.mark_non_differentiable(stats)
        return result, stats

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[None, Tensor, None]:
        return None, grad.to(ctx.dtype), None


def _autograd(below: Callable[..., Result], self: Tensor, dtype: torch.dtype) -> Result:
    if self is None:  # which PyTorch hands to any op that takes a tensor
        reference.check_castable("cast_with_stats", "tensor", self)
    if is_transformed():  # a Function would need rules of its own
        return self.to(dtype, copy=True), below(self, dtype)[1]
    if torch.is_grad_enabled() and self.requires_grad:
        result: Result = _CastWithStats.apply(below, self, dtype)  # type: ignore[no-untyped-call]
        return result
    return below(self, dtype)


def _vmap(
    info: Any, in_dims: tuple[int, None], self: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    if info.batch_size == 0:
        (result,) = reference.empty_batch([self], [in_dims[0]], dtype)
        return (result, self.new_empty(0, 4, dtype=torch.float64)), (0, 0)
    op = torch.ops.smart_autocast.cast_with_stats.default
    results = [op(one, dtype) for one in self.unbind(in_dims[0])]
    return (
        torch.stack([result for result, _ in results]),
        torch.stack([stats for _, stats in results]),
    ), (0, 0)


def register(library: torch.library.Library) -> None:
    """Registers all of it; the op must be defined already."""
    library.impl("cast_with_stats", reference.cast_with_stats, "CompositeExplicitAutograd")
    torch.library.register_fake(_NAME, _fake)
    register_autograd_kernel("cast_with_stats", _autograd)
    torch.library.register_vmap(_NAME, _vmap)
