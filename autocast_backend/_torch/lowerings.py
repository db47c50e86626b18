"""Kernels of Inductor's that compute something else than ATen's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from .division import LOW_PRECISION, rounded
from .flags import inductor_right
from .tables import named, promoted_dtype, put_decomposition, put_lowering

Lowering = Callable[..., Any]

_OF_NUMBERS = ("full.default", "pow.Scalar")


@functools.cache
def register() -> None:
    """Put others in their place."""
    from torch._inductor import lowering

    aten = torch.ops.aten
    for pooling in ("avg_pool2d_backward", "avg_pool3d_backward"):
        of_aten = getattr(lowering, f"fallback_{pooling}")
        put_lowering(getattr(aten, pooling).default, functools.partial(_average_pooling, of_aten))
    for name in ("amax", "amin", "argmax", "argmin", "max", "min"):
        put_lowering(getattr(aten, name).default, _reduction_of_bytes)
    for name in ("max", "min"):
        put_lowering(getattr(aten, name).dim, _reduction_of_bytes)
    put_lowering(aten.any.default, _any)
    put_lowering(aten.any.dim, _any)
    put_lowering(aten.any.dims, _any)
    put_lowering(aten.ldexp.Tensor, _ldexp)
    put_lowering(aten.bmm.default, _products)
    put_lowering(aten.add.Tensor, _sum_of_bools)
    for name in ("add", "sub", "fmod"):
        put_lowering(getattr(aten, name).Tensor, _with_scalar)
        put_lowering(getattr(aten, name).Scalar, _with_scalar)
    put_decomposition(aten.threshold_backward.default, _gradient_of_threshold)
    for name in _OF_NUMBERS:
        put_decomposition(named(name), functools.partial(_with_number, named(name)))
    _store_what_is_there()
    _store_each_by_itself()
    _order_strides_of_any_size()
    pad = aten.replication_pad2d_backward.default
    lowering.add_layout_constraint(pad, _contiguous)


def _contiguous(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
    """For a kernel that returns images in the layout of its input, and is predicted to return them
    contiguous."""
    from torch._inductor import lowering

    if not inductor_right.on:
        return args, kwargs
    return lowering.require_contiguous(node, *args, **kwargs)


def _average_pooling(of_aten: Lowering, original: Lowering, *args: Any) -> Any:
    """ATen's gradient where a last window may stand out (PyTorch #198119): it is divided by less
    than the size of a window."""
    ceil_mode, count_include_pad = args[5:7]
    return (of_aten if ceil_mode and count_include_pad else original)(*args)


def _reduction_of_bytes(original: Lowering, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Reductions of int8, uint8 and bool in int32: the kernels of the CPU take zeros, which fill up
    what is not loaded of a vector, for elements (PyTorch #191499), and true for NaN (#184893)."""
    from torch._inductor import lowering

    dtype = x.get_dtype()
    if dtype not in (torch.int8, torch.uint8, torch.bool) or x.get_device().type != "cpu":
        return original(x, *args, **kwargs)
    results = original(lowering.to_dtype(x, torch.int32), *args, **kwargs)
    return pytree.tree_map(
        lambda r: lowering.to_dtype(r, dtype) if r.get_dtype() == torch.int32 else r, results
    )


def _any(original: Lowering, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Of uint8, `any` gives uint8."""
    from torch._inductor import lowering

    result = original(x, *args, **kwargs)
    return lowering.to_dtype(result, torch.uint8) if x.get_dtype() == torch.uint8 else result


def _products(original: Lowering, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Of integers, products of matrices that are written as sums have the dtype of the matrices, as
    in eager mode, not int64 (PyTorch #191308)."""
    from torch._inductor import lowering

    product = original(x, *args, **kwargs)
    return product if x.get_dtype().is_floating_point else lowering.to_dtype(product, x.get_dtype())


def _with_scalar(original: Lowering, *args: Any, **kwargs: Any) -> Any:
    """Of bfloat16 and float16, the CPU takes Python's numbers in that dtype (PyTorch #186818)."""
    tensors = [a for a in args if hasattr(a, "get_dtype")]
    dtype = promoted_dtype(tensors)
    if dtype in LOW_PRECISION and tensors[0].get_device().type == "cpu":
        args = tuple(rounded(a, dtype) for a in args)
        kwargs = {name: rounded(a, dtype) for name, a in kwargs.items()}
    return original(*args, **kwargs)


def _with_number(op: OpOverload, original: Lowering, *args: Any, **kwargs: Any) -> Any:
    """The same, of ops that are written in others' words, or are others' words."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    made_as = kwargs.get("dtype"), kwargs.get("device") or torch.get_default_device()
    dtype, device = (tensors[0].dtype, tensors[0].device) if tensors else made_as
    if dtype not in LOW_PRECISION or torch.device(device).type != "cpu":
        return original(*args, **kwargs)
    held = [rounded(a, dtype) for a in args]
    numbers = [(a, h) for a, h in zip(args, held, strict=True) if isinstance(a, int | float)]
    if all(a == h or math.isnan(a) for a, h in numbers):
        return original(*args, **kwargs)
    return op(*held, **kwargs)


def _gradient_of_threshold(
    original: Lowering, upstream: torch.Tensor, x: torch.Tensor, threshold: Any
) -> Any:
    """All digits of the threshold count on the CPU, as in the forward. (`relu`'s has but one.)"""
    on_cpu = x.device.type == "cpu"
    if on_cpu and x.dtype in LOW_PRECISION and rounded(threshold, x.dtype) != threshold:
        x = x.float()
    return original(upstream, x, threshold)


def _sum_of_bools(original: Lowering, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Of these, `alpha` is one, too. (As 2, the CPU's kernel stores int64 where bool belongs, and
    writes over other memory.)"""
    from torch._inductor import lowering

    if alpha != 1 and promoted_dtype((x, y)) == torch.bool:
        counts = bool(alpha)
        return original(x, lowering.mul(y, counts) if hasattr(y, "get_dtype") else y and counts)
    return original(x, y, alpha=alpha)


def _ldexp(original: Lowering, x: Any, exponent: Any) -> Any:
    """In the dtype of both (PyTorch #197091), where the exponent is no integer."""
    from torch._inductor import lowering
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND

    if x.get_dtype().is_floating_point and not exponent.get_dtype().is_floating_point:
        return original(x, exponent)
    dtype = lowering.get_promoted_dtype(x, exponent, type_promotion_kind=KIND.INT_TO_FLOAT)
    return original(lowering.to_dtype(x, dtype), lowering.to_dtype(exponent, dtype))


def _store_what_is_there() -> None:
    """Sums over inner loops that are stored in vectors: of the last one, which other elements
    follow, the elements that are there (PyTorch #181690, fixed in torch 2.13; #196681)."""
    from torch._inductor.codegen.cpp import CppKernelProxy

    Kernel: Any = CppKernelProxy
    original = Kernel.aggregate_reduction_buffers

    def aggregate_reduction_buffers(self: Any, sums_inside: bool, outer_loop: Any) -> None:
        if inductor_right.on and outer_loop is not None and not outer_loop.is_reduction:
            loops = self.loop_nest.loops
            inside = loops[loops.index(outer_loop) + 1 :]
            sums_inside = sums_inside or any(loop.is_reduction for loop in inside)
        original(self, sums_inside, outer_loop)

    Kernel.aggregate_reduction_buffers = aggregate_reduction_buffers


def _store_each_by_itself() -> None:
    """Two equal sums of bfloat16, such as gradients of two biases of which results are added, name
    what they store alike, and the C++ compiler refuses the second one."""
    from torch._inductor.codegen.cpp import CppVecKernel

    Kernel: Any = CppVecKernel
    original = Kernel.store_reduction

    def store_reduction(self: Any, name: str, index: Any, value: Any) -> None:
        if not inductor_right.on:
            return original(self, name, index, value)
        self.reduction_suffix.writeline("{")
        original(self, name, index, value)
        self.reduction_suffix.writeline("}")

    Kernel.store_reduction = store_reduction


def _order_strides_of_any_size() -> None:
    """Strides that are expressions of sizes that change. Before torch 2.15 some cannot be put in
    order, such as those of an instance norm's view of a convolution."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    original = ir.get_fill_order

    def get_fill_order(seq: Sequence[Any], shape_env: Any = None) -> Sequence[int]:
        if inductor_right.on and any(isinstance(s, sympy.Expr) for s in seq):
            seq = V.graph.sizevars.optimization_hints(seq, fallback=8192)
        return original(seq, shape_env)

    ir.get_fill_order = get_fill_order
