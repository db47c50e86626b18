"""What Inductor compares, as it is in memory.

    largest = x.amax(1)              a kernel computes x, in float32, and stores the largest
    x == largest                     another one computes x again: not to the last bit, and in
                                     bfloat16 without rounding it; no element is the largest

The gradient of `amax`, of `max()` or of the largest norm is distributed so: it is zero or NaN then
(PyTorch #186799, #195214).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from .flags import inductor_right
from .reinplacing import readers

_aten = torch.ops.aten
_EQUALITY = (_aten.eq.Tensor, _aten.ne.Tensor)
_COMPARISONS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
)
_EXTREMES = (
    _aten.amax.default,
    _aten.amin.default,
    _aten.max.default,
    _aten.min.default,
    _aten.max.dim,
    _aten.min.dim,
)


@functools.cache
def register() -> None:
    """Have Inductor store what it compares with its own largest or least element."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import TensorBox

    original = GraphLowering.run_node

    def run_node(self: Any, n: fx.Node) -> Any:
        result = original(self, n)
        if inductor_right.on and isinstance(result, TensorBox) and _is_compared_with_extreme(n):
            result.realize()
        return result

    GraphLowering.run_node = run_node  # type: ignore[method-assign]


def round_what_is_compared(graph: fx.Graph) -> None:
    """Have comparisons take bfloat16 and float16 as such, not as the float32 they were computed in:
    this is the mark that Inductor's `emulate_precision_casts` gives to all ops."""
    for node in graph.nodes:
        if node.target in _COMPARISONS:
            node.meta["low_precision_pointwise_barrier"] = True


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call is one of an op that PyTorch tags as pointwise."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_compared_with_extreme(node: fx.Node) -> bool:
    """Whether a value is compared, here or, where it is returned, maybe elsewhere, and what is the
    largest or the least element of it, or of what single ops make of it, computed here."""
    if not any(user.op == "output" or user.target in _EQUALITY for user in readers(node)):
        return False
    pending, seen = list(readers(node)), {node}
    while pending:
        user = pending.pop()
        if user.target in _EXTREMES:
            return True
        if user not in seen and is_pointwise(user):
            seen.add(user)
            pending += readers(user)
    return False
