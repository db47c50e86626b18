"""What Inductor rounds to bfloat16 and float16 elsewhere than eager mode does.

With `emulate_precision_casts` it rounds the result of each op inside of its kernels. What is here
are ops that it makes of others.

    glu(x) = a * sigmoid(b)      one kernel in eager mode, which computes in float32
    a @ b + c                    two in eager mode; `addmm` here, which rounds once
    softmax(x * scale)           exp((x - amax(x)) * scale), and so on: x * scale is not rounded
    log_softmax(x)               a kernel of the CPU's, which rounds in between
    index_add(x, 0, i, y)        one that rounds each sum of two
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from .division import LOW_PRECISION, rounded
from .flags import Flag, inductor_right, rounds
from .patches import replaced
from .tables import (
    named,
    promoted_dtype,
    put_decomposition,
    put_kernel,
    put_kernel_of_images,
    put_lowering,
)
from .whole_ops import INTERPOLATION

_OF_THE_CPU = (
    "_log_softmax.default",
    "_log_softmax_backward_data.default",
    "_softmax.default",
    "_softmax_backward_data.default",
    "addr.default",
    "binary_cross_entropy.default",
    "binary_cross_entropy_backward.default",
    "binary_cross_entropy_with_logits.default",
    "col2im.default",
    "embedding_dense_backward.default",
    "glu_backward.default",
    "huber_loss.default",
    "huber_loss_backward.default",
    "index_add.default",
    "linalg_cross.default",
    "logit.default",
    "logit_backward.default",
    "mse_loss.default",
    "mse_loss_backward.default",
    "nll_loss2d_backward.default",
    "nll_loss2d_forward.default",
    "nll_loss_backward.default",
    "nll_loss_forward.default",
    "smooth_l1_loss.default",
    "soft_margin_loss.default",
    "soft_margin_loss_backward.default",
    "softshrink.default",
    "special_entr.default",
    "special_xlog1py.default",
    "xlogy.Scalar_Other",
    "xlogy.Scalar_Self",
    "xlogy.Tensor",
)
"""Ops whose kernels for the CPU round in between."""

_SUMS_OF_THE_CPU = (
    "avg_pool2d_backward.default",
    "max_pool2d_with_indices_backward.default",
    "scatter_add.default",
)
"""Ops whose kernels for the CPU add up in other places, or round after each number."""

_OF_LISTS = ("add", "sub", "mul", "div", "pow", "lerp", "addcmul", "addcdiv")
_BATCH_NORMS = (
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional.default",
)
_MORE_BATCH_NORMS = (
    "native_batch_norm.default",
    "_native_batch_norm_legit.default",
    "_batch_norm_with_update.default",
    "_batch_norm_with_update_functional.default",
)


@functools.cache
def register() -> None:
    """Have it round, where it is told to, what eager mode rounds."""
    from torch._inductor import lowering

    aten = torch.ops.aten
    put_lowering(aten.glu.default, _in_float32)
    for op in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        put_lowering(op, _product)
    for op in (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar):
        put_lowering(op, _sum)
    put_lowering(aten.pow.Tensor_Scalar, _power)
    for op in (aten.addcmul.default, aten.addcdiv.default):
        if op in lowering.lowerings:  # addcdiv has none in torch 2.11
            put_lowering(op, _rounded_once)
    for op in (aten.logaddexp.default, aten.logaddexp2.default):
        put_decomposition(op, _of_one_dtype)
    put_decomposition(aten.lerp.Scalar, _interpolation)
    put_decomposition(aten.lerp.Tensor, _interpolation)
    put_kernel(aten.linspace.default, _linspace)
    put_decomposition(aten.sigmoid_backward.default, _gradient_of_sigmoid)
    of_the_cpu: dict[str, Callable[..., Any]] = dict.fromkeys(_OF_THE_CPU, _low_left_to_aten)
    for name in ("native_layer_norm.default", "native_layer_norm_backward.default"):
        of_the_cpu[name] = functools.partial(_layer_norm, named(name))
    for name, function in of_the_cpu.items():
        put_kernel(named(name), function)
    of_images = dict.fromkeys(_BATCH_NORMS, _batch_norm) | {
        "native_batch_norm_backward.default": _batch_norm_backward,
        "native_group_norm.default": _of_images,
        "native_group_norm_backward.default": _group_norm_backward,
    }
    for name in INTERPOLATION:
        of_images |= {f"{name}.default": _of_images, f"{name}_backward.default": _of_images}
    for name, function in of_images.items():
        put_kernel_of_images(named(name), functools.partial(function, named(name)))
    for name in _SUMS_OF_THE_CPU:
        of_aten = lowering.fallback_handler(named(name), add_to_fallback_set=False)
        put_lowering(named(name), functools.partial(_low_sums, of_aten))
        put_decomposition(named(name), _low_left_to_aten)
    for name in _MORE_BATCH_NORMS:
        put_decomposition(named(name), _norm)
    for name in _OF_LISTS:
        packet = getattr(aten, f"_foreach_{name}")
        for overload in packet.overloads():
            if not overload.endswith("out"):
                words = functools.partial(_one_by_one, getattr(aten, name))
                put_decomposition(getattr(packet, overload), words)
    _keep_roundings()
    _round_constants()
    _keep_products_apart_from_sums()
    _keep_scales_before_softmax()
    _keep_casts()


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION


def _layer_norm(op: torch._ops.OpOverload, original: Callable[..., Any], *args: Any) -> Any:
    """ATen copies what is not contiguous. Inductor's code makes it so in the first place."""
    if not rounds() or args[0].device.type != "cpu":
        return original(*args)
    contiguous = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]
    if all(a is b for a, b in zip(args, contiguous, strict=True)):
        return NotImplemented
    return op(*contiguous)


def _low_left_to_aten(original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """(What a kernel returns for operands of several dtypes may be predicted with another one.)"""
    tensors = [a for a in (x, *args) if isinstance(a, torch.Tensor)]
    dtypes = {t.dtype for t in tensors if t.dtype.is_floating_point and t.dim()}
    if (
        rounds()
        and tensors[0].device.type == "cpu"
        and len(dtypes) == 1
        and dtypes < {*LOW_PRECISION}
    ):
        return NotImplemented
    return original(x, *args, **kwargs)


def _low_sums(of_aten: Callable[..., Any], original: Callable[..., Any], *args: Any) -> Any:
    low = args[0].get_dtype() in LOW_PRECISION and args[0].get_device().type == "cpu"
    return (of_aten if low and rounds() else original)(*args)


def _in_float32(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is one kernel in eager mode, which computes in float32. (Integers it is given in the
    dtype of the result, but for a last operand without dimensions.)"""
    from torch._inductor import lowering

    dtype = promoted_dtype(args)
    if dtype not in LOW_PRECISION or not rounds():
        return original(*args, **kwargs)
    operands = list(args)
    for i, a in enumerate(args):
        if hasattr(a, "get_dtype"):
            is_held = not a.get_dtype().is_floating_point and (a.get_size() or i == 0)
            held = lowering.to_dtype(a, dtype) if is_held else a
            operands[i] = lowering.to_dtype(held, torch.float32)
    return lowering.to_dtype(original(*operands, **kwargs), dtype)


def _rounded_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same, of operands in the dtype of the result."""
    from torch._inductor import lowering

    dtype = promoted_dtype(args)
    return _in_float32(original, *(lowering.to_dtype(a, dtype) for a in args), **kwargs)


def _of_one_dtype(original: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    dtype = torch.result_type(x, y)
    if dtype not in LOW_PRECISION or not rounds():
        return original(x, y)
    return original(x.to(dtype), y.to(dtype))


def _product(original: Callable[..., Any], x: Any, y: Any) -> Any:
    """Numbers are float32. Where every op rounds what it is given, they would be rounded, too. So
    are the CPU's second operands without dimensions."""
    are_tensors = hasattr(x, "get_dtype") and hasattr(y, "get_dtype")
    if are_tensors and (y.get_size() or y.get_device().type != "cpu"):
        return original(x, y)
    return _in_float32(original, x, y)


def _sum(original: Callable[..., Any], x: Any, y: Any, alpha: Any = 1) -> Any:
    """With `alpha`, one kernel that rounds once."""
    if not (hasattr(x, "get_dtype") and hasattr(y, "get_dtype")):
        return _in_float32(original, x, y, alpha=alpha)
    if alpha == 1:
        return original(x, y)
    return _rounded_once(original, x, y, alpha=alpha)


def _interpolation(original: Callable[..., Any], start: Any, end: Any, weight: Any) -> Any:
    if not rounds() or not _is_low(start):
        return original(start, end, weight)
    weight = weight.float() if isinstance(weight, torch.Tensor) else weight
    return original(start.float(), end.float(), weight).to(start.dtype)


def _linspace(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The CPU's steps are rounded to the dtype of the result (PyTorch's to float32, later)."""
    known = all(isinstance(a, int | float) for a in args)
    device = torch.device(kwargs.get("device") or torch.get_default_device())
    return NotImplemented if known and device.type == "cpu" else original(*args, **kwargs)


def _gradient_of_sigmoid(original: Callable[..., Any], upstream: Any, y: Any) -> Any:
    """The CPU rounds in between for float16, and not for bfloat16."""
    if not rounds() or upstream.device.type != "cpu" or upstream.dtype != torch.float16:
        return original(upstream, y)
    with _as_called():
        return upstream * (1 - y) * y


def _power(original: Callable[..., Any], x: Any, exponent: Any) -> Any:
    """The CPU takes the exponent in the dtype of x. For some it multiplies instead: in float32 for
    float16, and rounding each time for bfloat16."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import ops

    dtype = x.get_dtype()
    on_cpu = x.get_device().type == "cpu" and dtype.is_floating_point
    if not (rounds() and on_cpu and isinstance(exponent, int | float)):
        return original(x, exponent)
    if dtype == torch.bfloat16 and exponent == 3:
        return lowering.mul(lowering.mul(x, x), x)
    if exponent == -2 and dtype != torch.float16:
        return lowering.reciprocal(lowering.mul(x, x))
    if exponent == -0.5 and dtype != torch.float16:
        return _in_float32(lowering.rsqrt, x)
    exponent = rounded(exponent, dtype)
    is_product = exponent in (-1, 0, 1, 2, 3) or (dtype in LOW_PRECISION and exponent % 1 == 0)
    if is_product or (exponent == 0.5 and dtype != torch.float16):
        return _in_float32(original, x, exponent)
    return _in_float32(lowering.make_pointwise(ops.pow), x, exponent)


def _one_by_one(
    op: Callable[..., torch.Tensor], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """What the CPU does with lists. Inductor's kernels of lists are not those of their elements."""
    lists = [a for a in args if isinstance(a, list | tuple)]
    tensors = [t for a in lists for t in a if isinstance(t, torch.Tensor)]
    if tensors[0].device.type != "cpu" or not tensors[0].dtype.is_floating_point:
        return original(*args, **kwargs)
    count = len(lists[0])
    each = zip(*(a if isinstance(a, list | tuple) else [a] * count for a in args), strict=True)
    with _as_called():
        return [op(*own, **kwargs) if len(own) < 4 else op(*own[:3], value=own[3]) for own in each]


def _as_called() -> contextlib.AbstractContextManager[None]:
    """Ops in a decomposition are rounded where they are those of a program: of ops that others
    are written in, only the last one is."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return replaced(mode, "decomp_layers", 0) if mode else contextlib.nullcontext()


def _norm(original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """The statistics that the CPU's kernels save for the backward are float32 where weights or
    running statistics are. (For all of PyTorch's decompositions, in the dtype of x.)"""
    if not _is_mixed(x, (*args, *kwargs.values())) or x.device.type != "cpu" or not rounds():
        return original(x, *args, **kwargs)
    y, *others = original(x.float(), *args, **kwargs)
    return y.to(x.dtype), *others


def _batch_norm(op: torch._ops.OpOverload, original: Callable[..., Any], *args: Any) -> Any:
    """In training the CPU's kernel computes statistics. (Running ones are in their own dtype then,
    and float32 in predictions.)"""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=True))
    running = given.get("running_mean"), given.get("running_var")
    if given["training"] and not any(map(_is_low, running)) and _is_images(given["input"]):
        return _left_to_aten(op, given["input"], *args)
    return _norm(original, *args)


def _batch_norm_backward(
    op: torch._ops.OpOverload,
    original: Callable[..., Any],
    upstream: torch.Tensor,
    x: torch.Tensor,
    *args: Any,
) -> Any:
    *_, training, _, _ = args
    if (
        training
        and _is_images(x)
        and upstream.is_contiguous(memory_format=suggest_memory_format(x))
    ):
        return _left_to_aten(op, x, upstream, x, *args)
    return original(upstream, x, *args)


def _of_images(
    op: torch._ops.OpOverload, original: Callable[..., Any], x: torch.Tensor, *args: Any
) -> Any:
    """A kernel of the CPU's that takes images in their memory format, and copies others to it.
    (Group norms', from torch 2.15 on; before, `F.group_norm` did.)"""
    if x.device.type != "cpu" or not rounds():
        return original(x, *args)
    if not _is_images(x):
        return op(_in_its_format(x), *args)
    return _left_to_aten(op, x, x, *args)


def _group_norm_backward(
    op: torch._ops.OpOverload,
    original: Callable[..., Any],
    upstream: torch.Tensor,
    x: torch.Tensor,
    *args: Any,
) -> Any:
    """The CPU's kernel copies what comes from above to the layout of x."""
    if x.device.type != "cpu" or not rounds():
        return original(upstream, x, *args)
    if not _is_images(x):
        return op(upstream, _in_its_format(x), *args)
    return _left_to_aten(op, x, upstream, x, *args)


def _in_its_format(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=suggest_memory_format(x))


def _is_images(x: torch.Tensor) -> bool:
    """Whether a kernel of the CPU's takes x as it is, contiguous or in channels_last."""
    on_cpu = x.device.type == "cpu" and rounds()
    return on_cpu and x.is_contiguous(memory_format=suggest_memory_format(x))


_laid_out = Flag()
"""The call comes from `_left_to_aten`."""


def _left_to_aten(op: torch._ops.OpOverload, x: torch.Tensor, *args: Any) -> Any:
    """ATen's kernel with images laid out as x is in eager mode: Inductor may have them in another
    way, and the kernel's sums are in another order then. (The first argument says it, which of a
    backward is a gradient: x may come from the forward in the layout that it had there.)"""
    from torch._inductor.inductor_prims import force_stride_order

    if _laid_out.on or x.dim() < 4:
        return NotImplemented
    with _laid_out.raised():
        return op(force_stride_order(args[0], x.stride()), *args[1:])


def _is_mixed(x: torch.Tensor, others: Iterable[Any]) -> bool:
    tensors = [a for a in others if isinstance(a, torch.Tensor)]
    return _is_low(x) and any(a.dtype == torch.float32 for a in tensors)


def _round_constants() -> None:
    """A float32 without dimensions, such as `torch.tensor(0.1)`, is an operand in the dtype of the
    others. In kernels it is a constant, of which all digits are there."""
    from torch._inductor import lowering

    table: Any = lowering
    original = table.transform_args

    def transform_args(args: list[Any], kwargs: Any, broadcast: bool, kind: Any, *more: Any) -> Any:
        if kind and rounds():
            args = _with_rounded_constants(args, kind)
        return original(args, kwargs, broadcast, kind, *more)

    table.transform_args = transform_args


def _with_rounded_constants(args: list[Any], kind: Any) -> list[Any]:
    from torch._inductor import ir, lowering

    tensors: list[Any] = [a for a in args if isinstance(a, ir.TensorBox)]
    dtype = lowering.get_promoted_dtype(*tensors, type_promotion_kind=kind) if tensors else None
    if dtype not in LOW_PRECISION or tensors[0].get_device().type != "cpu":
        return args
    given: list[Any] = []
    for a in args:
        is_scalar = isinstance(a, ir.TensorBox) and not a.get_size()
        constant = lowering.get_constant_value(a) if is_scalar else None
        given.append(a if constant is None else rounded(constant.value, dtype))
    # Without it, the dtype of numbers and integers would be float32.
    numbers = [a for a in given if isinstance(a, int | float) or hasattr(a, "get_dtype")]
    stays = lowering.get_promoted_dtype(*numbers, type_promotion_kind=kind) == dtype
    return given if stays else args


def _keep_products_apart_from_sums() -> None:
    """`a @ b + c` is rounded twice; as `addmm`, once."""
    from torch._inductor.fx_passes import post_grad

    for entry in post_grad.pass_patterns[2].patterns["call_function", torch.ops.aten.add.Tensor]:
        if entry.extra_check is post_grad.is_valid_addmm_fusion:
            entry.extra_check = functools.partial(_rounds_once, entry.extra_check)


def _rounds_once(check: Callable[[Any], bool], match: Any) -> bool:
    low = match.output_node().meta["val"].dtype in LOW_PRECISION
    return check(match) and not (low and rounds())


def _keep_scales_before_softmax() -> None:
    """`(x * scale).softmax(-1)` of attention became `((x - x.amax(-1)) * scale).exp()`, and so on:
    `x * scale` was neither rounded nor what eager mode has in float32."""
    from torch._inductor.fx_passes import joint_graph

    for entry in joint_graph.pass_patterns[1].patterns["call_function", torch.ops.aten.sub.Tensor]:
        if entry.extra_check is joint_graph._other_is_broadcasted_in_dim:
            entry.extra_check = functools.partial(_does_not_round, entry.extra_check)


def _does_not_round(check: Callable[[Any], bool], match: Any) -> bool:
    return not rounds() and check(match)


def _keep_casts() -> None:
    """Before torch 2.13 `x.bfloat16().float()` of a float32 is x."""
    from torch._inductor.fx_passes import joint_graph

    convert = torch.ops.prims.convert_element_type.default
    for entry in joint_graph.patterns.patterns["call_function", convert]:
        entry.extra_check = functools.partial(_says_nothing, entry.extra_check)


def _says_nothing(check: Callable[[Any], bool], match: Any) -> bool:
    """Whether a cast changes no number."""
    wider = match.kwargs["arg"].meta["val"].dtype not in LOW_PRECISION
    return check(match) and not (wider and match.kwargs["dtype1"] in LOW_PRECISION and rounds())


def _keep_roundings() -> None:
    """Before torch 2.13 the CPU's kernels take a float32 that was rounded, and is converted back,
    for the one before, though that is what they are told not to do."""
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    def put(Overrides: Any) -> None:
        original = Overrides.to_dtype

        def to_dtype(
            x: Any, dtype: Any, src_dtype: Any = None, use_compute_types: Any = True
        ) -> Any:
            if not inductor_right.on or (use_compute_types and not rounds()):
                return original(x, dtype, src_dtype, use_compute_types)
            V.kernel.cache_dtype_convert = lambda *_: None
            try:
                return original(x, dtype, src_dtype, use_compute_types)
            finally:
                del V.kernel.cache_dtype_convert

        Overrides.to_dtype = staticmethod(to_dtype)

    put(cpp.CppOverrides)
    put(cpp.CppVecOverrides)
