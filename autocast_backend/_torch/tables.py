"""Inductor's tables: what it writes in other words (decompositions), and kernels (lowerings)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.utils import _pytree as pytree

from .flags import inductor_right, rounds

Function = Callable[..., Any]


def put_lowering(op: OpOverload, kernel: Function) -> None:
    """Put a lowering, called with Inductor's own first, in its place."""
    from torch._inductor import lowering

    lowering.lowerings[op] = _with_original(lowering.lowerings[op], kernel)


def put_decomposition(op: OpOverload, words: Function) -> None:
    """Put a decomposition, called with Inductor's own (or with one of none) first, in its place."""
    from torch._inductor import decomposition, lowering

    original = decomposition.decompositions.get(op, _in_no_other_words)
    decomposition.decompositions[op] = _with_original(original, words)
    if original is _in_no_other_words and op not in lowering.lowerings:
        _make_fallback(op, lambda _, *args, **kwargs: (args, kwargs))
    decomposition.fast_random_decomps.cache_clear()


def put_kernel(op: OpOverload, words: Function) -> None:
    """Put a decomposition in its place, and where that one gives NotImplemented, ATen's kernel."""
    from torch._inductor import lowering

    put_decomposition(op, words)
    # Of what is contiguous, results are as well. Otherwise their strides may be mispredicted.
    _make_fallback(op, lowering.require_contiguous)


def put_kernel_of_images(op: OpOverload, words: Function) -> None:
    """The same for a kernel whose sums depend on the layout of images: all get that of the first,
    which `words` forces to what it is in eager mode."""
    put_decomposition(op, words)
    _make_fallback(op, _as_the_first)


def _make_fallback(op: OpOverload, constraint: Function) -> None:
    """Leave an op to ATen, with a constraint on the layouts of its operands. Where Inductor is at
    work alone, that is its own."""
    from torch._inductor import lowering

    known = op in lowering.lowerings or op.name().split(".")[0] in lowering.FALLBACK_ALLOW_LIST
    before = lowering.maybe_layout_constraints(op) if known else _contiguous_in_backwards

    def constrained(node: torch.fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        one = constraint if inductor_right.on else before
        return one(node, *args, **kwargs) if one else (args, kwargs)

    lowering.make_fallback(op, constrained, warn=False, override_decomp=True)


def _contiguous_in_backwards(node: torch.fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Inductor's constraint for an op of ATen that it has no kernel for."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    if not V.graph.is_backward:
        return args, kwargs
    contiguous: tuple[Any, Any] = lowering.require_contiguous(node, *args, **kwargs)
    return contiguous


def _as_the_first(node: torch.fx.Node, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    from torch._inductor import ir, lowering

    of_first: Any = node.args[0]
    orders = {
        torch.channels_last: ir.NHWC_STRIDE_ORDER,
        torch.channels_last_3d: ir.NHWDC_STRIDE_ORDER,
    }
    order = orders.get(suggest_memory_format(of_first.meta["val"]))

    def laid_out(a: Any) -> Any:
        if order is None or len(a.get_size()) != len(order):
            return ir.ExternKernel.require_contiguous(a)
        return ir.ExternKernel.require_stride_order(a, order)

    # With the strides of dimensions of one element, too, by which kernels tell formats apart.
    first = lowering.constrain_to_fake_tensor(args[0], of_first.meta["val"])
    others, kwargs = pytree.tree_map_only(ir.IRNode, laid_out, (args[1:], kwargs))
    return (first, *others), kwargs


def left_to_aten(original: Function, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Words for `put_kernel`: ATen's of the CPU, where Inductor rounds as eager mode does."""
    if rounds() and x.device.type == "cpu" and x.dtype.is_floating_point:
        return NotImplemented
    return original(x, *args, **kwargs)


def named(name: str) -> OpOverload:
    """The op of ATen of that packet and overload: `sum.default`."""
    packet, overload = name.split(".")
    op: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return op


def promoted_dtype(operands: Iterable[Any]) -> torch.dtype:
    """That of the result of an elementwise op, in a lowering."""
    from torch._inductor import lowering
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

    return lowering.get_promoted_dtype(*operands, type_promotion_kind=KIND.DEFAULT)


def _in_no_other_words(*_: Any, **__: Any) -> Any:
    return NotImplemented


def _with_original(original: Function, function: Function) -> Function:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not inductor_right.on:
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    return called
