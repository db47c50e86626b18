"""``smart_autocast::cast_with_stats`` for the compiler, autograd and vmap, and without a kernel.

The schema is in ``csrc/ops/cast_with_stats.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference

_NAME = "smart_autocast::cast_with_stats"


def _fake(self: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reference.check_cast_with_stats(self, dtype)
    return torch.empty_like(self, dtype=dtype), self.new_empty(4, dtype=torch.float64)


def _setup_context(
    ctx: Any, inputs: tuple[Tensor, torch.dtype], output: tuple[Tensor, Tensor]
) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    return grad.to(ctx.dtype), None


def _vmap(
    info: Any, in_dims: tuple[int, None], self: Tensor, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
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
    torch.library.register_autograd(_NAME, _backward, setup_context=_setup_context)
    torch.library.register_vmap(_NAME, _vmap)
