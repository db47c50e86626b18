"""Composites written out: those in which autocast acts on a value that is made inside.

No cast of the arguments does what eager does there, so the call is replaced by the calls that it
makes itself, with the casts among them. Nothing here is believed: an expansion is tried where the
casts that eager was seen to make do not help, and is proved like any other recipe. Arguments it
does not know make it fail, and the call stays under autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .. import ops as _ops  # noqa: F401  (defines torch.ops.smart_autocast)

Made = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""The last call of an expansion, which takes the place of the composite: (target, args, kwargs)."""

_SMART = torch.ops.smart_autocast
_ATEN = torch.ops.aten  # what an exported program may hold, too
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # ATen/core/Reduction.h


class Caller:
    """Makes the calls of an expansion.

    Args:
        call: makes one call: (target, args, kwargs) -> a value.
        rank: how many dimensions the first argument has.
    """

    def __init__(self, call: Callable[..., Any], rank: int) -> None:
        self._call = call
        self.rank = rank

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call(target, args, kwargs)

    def full_precision(self, x: Any) -> Any:
        """`x` in float32, as autocast casts."""
        return x if x is None else self(_SMART.autocast_to_full_precision.default, x)

    def full_precision_dtype(self, x: Any) -> Any:
        """The dtype that autocast asks for, of a result of `x`."""
        return self(_SMART.full_precision_dtype.default, x, None)


def _cross_entropy(
    call: Caller,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Made:
    """`log_softmax` in the dtype of its input, for it is asked for that, then `nll_loss` in float32
    (ATen/native/LossNLL.cpp)."""
    if label_smoothing or size_average is not None or reduce is not None:
        raise ValueError("label smoothing and legacy arguments are not expanded")
    logs = call(_ATEN.log_softmax.int, input, 1 if call.rank > 1 else 0)
    reduced = _REDUCTIONS[reduction]
    arguments = (call.full_precision(logs), target, call.full_precision(weight), reduced)
    return _ATEN.nll_loss_nd.default, (*arguments, ignore_index), {}


def _norm(
    call: Caller,
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: None = None,
    dtype: None = None,
) -> Made:
    """`linalg_vector_norm`, which is asked for float32 (torch/functional.py)."""
    if (isinstance(p, str) and p != "fro") or out is not None or dtype is not None:
        raise ValueError("other norms, out= and dtype= are not expanded")
    order = 2 if p in ("fro", None) else p
    arguments = (input, order, [dim] if isinstance(dim, int) else dim, keepdim)
    dtype = call.full_precision_dtype(input)
    return _ATEN.linalg_vector_norm.default, arguments, {"dtype": dtype}


def _normalize(
    call: Caller, input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None
) -> Made:
    """The input by its norm (torch/nn/functional.py)."""
    if out is not None:
        raise ValueError("out= is not expanded")
    target, args, kwargs = _norm(call, input, p, dim, keepdim=True)
    norm = call(torch.clamp_min, call(target, *args, **kwargs), eps)
    return operator.truediv, (input, call(torch.Tensor.expand_as, norm, input)), {}


EXPANSIONS: dict[str, Callable[..., Made]] = {
    "cross_entropy_loss": _cross_entropy,
    "norm": _norm,
    "normalize": _normalize,
}
"""What a call node stands for (`policies.op_name`) -> the calls it makes."""
