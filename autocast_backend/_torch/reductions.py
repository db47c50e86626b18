"""Sums that ATen adds up in another order than Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from .flags import rounds
from .tables import left_to_aten, named, put_decomposition, put_kernel, put_lowering

_REDUCTIONS = (
    "mean.default",
    "mean.dim",
    "prod.default",
    "prod.dim_int",
    "sum.default",
    "sum.dim_IntList",
)
_WITH_KERNELS = (
    "_weight_norm_interface.default",
    "addmv.default",
    "dot.default",
    "grid_sampler_2d.default",
    "logsumexp.default",
    "multi_margin_loss.default",
    "multilabel_margin_loss_forward.default",
    "mv.default",
    "nansum.default",
    "smooth_l1_loss_backward.default",
    "trace.default",
)

_IN_CACHES = 2**18
"""Elements that are stored soon enough."""


@functools.cache
def register() -> None:
    """Where Inductor rounds as eager mode does, have ATen add up for the CPU."""
    from torch._inductor import lowering

    for name in _REDUCTIONS:
        op = named(name)
        of_aten = lowering.fallback_handler(op, add_to_fallback_set=False)
        put_lowering(op, functools.partial(_sum, op, of_aten))
    for name in _WITH_KERNELS:
        put_kernel(named(name), left_to_aten)
    norm = named("linalg_vector_norm.default")
    put_decomposition(norm, left_to_aten)
    lowering.make_fallback(norm, warn=False, override_decomp=True)
    put_lowering(norm, _norm_of_vectors)
    bmm = named("bmm.default")
    of_aten = lowering.fallback_handler(bmm, add_to_fallback_set=False)
    put_lowering(bmm, functools.partial(_product_with_vectors, of_aten))
    put_decomposition(bmm, left_to_aten)


def _sum(
    op: OpOverload,
    of_aten: Callable[..., Any],
    original: Callable[..., Any],
    x: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    is_called = node.target is op and _is_called(node)
    if not (is_called and _is_left_to_aten(x)) or _outgrows_what_it_is_made_of(x):
        return original(x, *args, **kwargs)
    (x, *args), kwargs = lowering.constrain_to_fx_strides(node, x, *args, **kwargs)
    return of_aten(x, *args, **kwargs)


def _product_with_vectors(
    of_aten: Callable[..., Any], original: Callable[..., Any], x: Any, y: Any, *args: Any
) -> Any:
    """Inductor multiplies and adds up, and rounds products to bfloat16 before."""
    is_vector = x.get_size()[1] == 1 or y.get_size()[2] == 1
    if not (is_vector and _is_left_to_aten(x)):
        return original(x, y, *args)
    return of_aten(x, y, *args)


def _norm_of_vectors(
    original: Callable[..., Any],
    x: Any,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> Any:
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    in_float32 = x.get_dtype() == torch.float32 and kwargs.get("dtype") is None
    if order == 2 and in_float32 and _outgrows_what_it_is_made_of(x):
        return lowering.sqrt(lowering.sum_(lowering.square(x), dim, keepdim))
    (x,), _ = lowering.constrain_to_fx_strides(V.graph.current_node, x)
    return original(x, order, dim, keepdim, **kwargs)


def _outgrows_what_it_is_made_of(x: Any) -> bool:
    """Whether a tensor, as that of all differences of two, is much memory that Inductor's sum need
    not have."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if ir.is_storage_and_layout(x):
        return False
    hint = V.graph.sizevars.optimization_hint
    size = hint(x.get_numel(), fallback=0)
    read = sum(hint(V.graph.get_numel(name), fallback=0) for name in x.get_read_names())
    return bool(size > max(read, _IN_CACHES))


def _is_called(node: torch.fx.Node) -> bool:
    """Whether ATen has a kernel of sums for it: what is a sum in other words only, such as a
    softmax, has a kernel of its own there."""
    op = node.meta.get("original_aten")
    name = op._schema.name.removeprefix("aten::") if isinstance(op, OpOverload) else ""
    is_loss = name.endswith("loss") or name.startswith("binary_cross_entropy")
    return is_loss or name in ("sum", "mean", "prod")


def _is_left_to_aten(x: Any) -> bool:
    return rounds() and x.get_device().type == "cpu" and x.get_dtype().is_floating_point
