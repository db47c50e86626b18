"""Casts of weights as autograd records them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dynamo import never_traced
from ..ops.casts import METHODS
from .cast import Cast, Key


def cast_each(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The casts of weights that require grad, each with an autograd node of its own: what
    `multi_cast` makes of them, too, with code that is cold after a model's."""
    method = METHODS.get(dtype)
    return [w.to(dtype) for w in weights] if method is None else list(map(method, weights))


class _Traced(torch.autograd.Function):
    """A cast that was made already - without gradients, in an earlier context, or in the memory of
    another - as autograd would have recorded it. One node for each weight, as `multi_cast` makes
    them: one for all would hold every gradient back until the end of the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = weight.dtype
        return cast.detach()

    @staticmethod
    @never_traced
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return (None if grad is None else grad.to(ctx.dtype)), None


class Node:
    """A cast as autograd records it, where it is kept without gradients. Graphs remember where it
    is, not the tensor: that is let go as soon as the cast is wrong, and its memory with it.

    Attributes:
        of: the cast that it is.
        cast: it, with its way back to the weight.
    """

    __slots__ = ("cast", "of")

    def __init__(self, of: Cast | None, cast: Tensor) -> None:
        self.of = of
        self.cast = cast


def traced(weight: Tensor, cast: Cast, dtype: torch.dtype, nodes: dict[Key, Node]) -> Any:
    """What holds the cast with its way back to the weight, the one that all graphs of the scope
    share."""
    if cast.memory.cast.requires_grad:
        return cast.memory
    node = nodes.get((id(weight), dtype))
    if node is None or node.of is not cast:
        recorded: Tensor = _Traced.apply(weight, cast.memory.cast)  # type: ignore[no-untyped-call]
        node = nodes[id(weight), dtype] = Node(cast, recorded)
    return node


def traced_alone(weight: Tensor, cast: Cast, dtype: torch.dtype, nodes: dict[Key, Node]) -> Any:
    """What holds the cast with a way back that nobody else will get. It is kept without one."""
    node = traced(weight, cast, dtype, nodes)
    del nodes[id(weight), dtype]
    return node


def untraced(memory: Any) -> Any:
    """What holds a cast without a way back, for calls that autograd does not record."""
    return Node(None, memory.cast.detach()) if memory.cast.requires_grad else memory
