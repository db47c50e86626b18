"""What ops return on fake tensors, where PyTorch predicts other strides or dtypes than the kernels
of the CPU give.

    a + b, in bfloat16                  a: strides (8, 0, 1), expanded; b: (24, 1, 3), transposed
    kernel                              b alone says in which order: (24, 1, 3)
    fake tensors                        both in float32, where a is dense: (24, 8, 1)

    batch_norm(x.transpose(1, 2))       x: (2, 3, 8), contiguous, in bfloat16; weights in float32
    kernel                              contiguous; mean and variance in float32
    fake tensors                        as its input: (24, 1, 8); in bfloat16

    x.view(1, 16, 16, 16)               x: (1, 16, 256), transposed, with strides (4096, 1, 16)
    kernel                              (16, 1, 256, 16), which is contiguous in no memory format
    fake tensors                        (4096, 1, 256, 16), which is channels_last

By what it was told, AOTAutograd writes a reshape as a view, or leaves `contiguous()` out. What then
runs op by op raises ("view size is not compatible"), or is not contiguous. Inductor checks what ops
return, and raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from .fake_tensors import is_known
from .flags import inductor_right, predicting, rounds

Shape = Sequence[int]
Strides = tuple[int, ...]
Operands = Sequence[torch.Tensor]
Rule = Callable[[Shape, Operands], Strides]
Dtypes = Callable[[list[Any], Operands], list[Any]]


@contextlib.contextmanager
def kernels_predicted() -> Iterator[None]:
    """Have fake tensors get the strides and dtypes that kernels of the CPU give, in what this
    thread does meanwhile."""
    register()
    with predicting.raised():
        yield


@functools.cache
def register() -> None:
    """Look at what ops on fake tensors return, after the cache that all threads and modes share.
    Where Inductor rounds as eager mode does, norms' statistics are predicted, too, and views, whose
    memory format says in which order norms add up."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    predict = FakeTensorMode.dispatch

    @functools.wraps(predict)
    def dispatch(
        self: Any, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        right = predicting.on or rounds()
        if not right or not isinstance(func, OpOverload):
            return predict(self, func, types, args, kwargs or {})
        op_by_op, dtypes = predicting.on, _dtypes().get(func)
        is_norm, is_view = (func in ops for ops in (_batch_norms(), _views()))
        if not (op_by_op or dtypes or is_norm or is_view or _is_elementwise(func)):
            return predict(self, func, types, args, kwargs or {})
        # Not for the ops that predict for this one: the cache keeps what they find.
        with predicting.lowered(), inductor_right.lowered():
            predicted = predict(self, func, types, args, kwargs or {})
            if is_view:
                view: Any = predicted
                return _put_view_right(self, view, args[0])
            return _put_right(self, func, op_by_op, dtypes, predicted, args)

    FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def _put_right(
    mode: Any, op: OpOverload, op_by_op: bool, dtypes: Dtypes | None, predicted: Any, args: Any
) -> Any:
    several = isinstance(predicted, tuple | list)
    result, *others = predicted if several else [predicted]
    operands = [a for a in args if isinstance(a, torch.Tensor)]
    if not all(isinstance(a, torch.Tensor) and _is_dense_on_cpu(a) for a in (result, *operands)):
        return predicted
    if op in _batch_norms():
        rule = _rule(op)
    elif all(map(_is_contiguous, operands)):
        rule = _contiguous if _is_one_loop(op, result, args) else None
    else:
        rule = _rule(op) if op_by_op else None
    if rule is None and dtypes is None:
        return predicted
    with mode:
        if rule is not None and result.dim() > 1:
            result = _with_strides(result, rule(result.shape, operands))
        if dtypes is not None:
            result, *others = dtypes([result, *others], operands)
    return (result, *others) if several else result


def _is_one_loop(op: OpOverload, result: torch.Tensor, args: Any) -> bool:
    """Whether an elementwise kernel takes operands for contiguous, as images of one pixel, or of
    one channel, are in all formats. (Numbers are tensors of another shape to it.)"""
    from torch.fx.experimental.symbolic_shapes import sym_eq

    if not (_is_elementwise(op) and any(isinstance(n, int) and n == 1 for n in result.shape)):
        return False
    given = zip(args, op._schema.arguments, strict=False)
    return all(
        isinstance(a, torch.Tensor) and is_known(sym_eq(a.shape, result.shape))
        for a, argument in given
        if "Tensor" in str(argument.type)
    )


def _put_view_right(mode: Any, view: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """With the strides that the kernel gives dimensions of one element."""
    from torch._subclasses.fake_impls import _compute_stride
    from torch.fx.experimental.symbolic_shapes import sym_eq

    if x.layout != torch.strided or _is_contiguous(x) or not x.dim() or not view.dim():
        return view
    with mode:
        strides = _compute_stride(x.shape, x.stride(), view.shape, size_oblivious=True)
        if strides is None or is_known(sym_eq(view.stride(), tuple(strides))):
            return view
        return x.as_strided(view.shape, strides)


def _with_strides(a: torch.Tensor, strides: Strides) -> torch.Tensor:
    from torch.fx.experimental.symbolic_shapes import sym_eq

    if is_known(sym_eq(a.stride(), strides)):
        return a
    return torch.empty_strided(a.shape, strides, dtype=a.dtype)


def _is_dense_on_cpu(a: torch.Tensor) -> bool:
    return a.layout == torch.strided and a.device.type == "cpu"


def _is_contiguous(a: torch.Tensor) -> bool:
    """Whether it is known to be, without assuming anything of symbolic sizes."""
    from torch._prims_common import is_contiguous_or_false

    return is_contiguous_or_false(a)


@functools.cache
def _rule(op: OpOverload) -> Rule | None:
    """How the strides of what an op returns first come from its sizes and its operands; None where
    they are predicted right, or not known."""
    if op in (rules := _rules()):
        return rules[op]
    tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]
    return _elementwise if _is_elementwise(op) and len(tensors) > 1 else None


@functools.cache
def _is_elementwise(op: OpOverload) -> bool:
    """Whether it is one loop of TensorIterator's: not if a number is an operand, or if it makes
    what it returns like its input itself."""
    with_number = "calar" in op._overloadname and op._schema.name not in (
        "aten::float_power",
        "aten::lerp",
        "aten::pow",
    )
    others = op._schema.is_mutable or with_number or op in _likes_of_their_input()
    return torch.Tag.pointwise in op.tags and not others


@functools.cache
def _likes_of_their_input() -> frozenset[OpOverload]:
    return frozenset(
        _ops(
            "_conj_physical clone conj_physical deg2rad frexp.Tensor hardtanh nan_to_num positive "
            "rad2deg relu6"
        )
    )


_BATCH_NORMS = (
    "_batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional "
    "_native_batch_norm_legit _native_batch_norm_legit.no_stats native_batch_norm "
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training"
)
_BATCH_NORMS_BACKWARD = "batch_norm_backward native_batch_norm_backward"


@functools.cache
def _rules() -> dict[OpOverload, Rule | None]:
    """Those of ops that are not tagged as elementwise, or are more, or less, than that."""
    groups: tuple[tuple[Rule | None, str], ...] = (
        (
            _contiguous,
            "_log_softmax_backward_data huber_loss_backward log_sigmoid_forward mse_loss_backward "
            "native_layer_norm_backward pow.Scalar smooth_l1_loss_backward",
        ),
        (_like(0), "binary_cross_entropy huber_loss log_sigmoid_backward"),
        (_like(1), "binary_cross_entropy_backward"),
        (_in_format_of(0), "channel_shuffle max_unpool2d"),
        (_in_format_of(1), "reflection_pad2d_backward replication_pad2d_backward"),
        (_batch_norm, _BATCH_NORMS),
        (_batch_norm_backward, _BATCH_NORMS_BACKWARD),
        (
            _elementwise,
            "elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward mish_backward "
            "mse_loss smooth_l1_loss softplus_backward",
        ),
        (_gradient_last, "leaky_relu_backward threshold_backward"),
        (
            None,
            "ldexp.Tensor masked_fill.Scalar masked_fill.Tensor native_dropout_backward where.self",
        ),
    )
    return {op: rule for rule, names in groups for op in _ops(names)}


@functools.cache
def _dtypes() -> dict[OpOverload, Dtypes]:
    """Results of norms in the dtypes that they have."""
    norms = _ops(f"native_group_norm native_layer_norm {_BATCH_NORMS}")
    gradients = _ops("native_group_norm_backward")
    return dict.fromkeys(norms, _statistics) | dict.fromkeys(gradients, _gradient_of_input)


def _statistics(results: list[Any], operands: Operands) -> list[Any]:
    """Mean and variance, second and third, in float32 if a parameter is."""
    if any(a.dtype == torch.float32 for a in operands[1:]):
        results[1:3] = [a.to(torch.float32) for a in results[1:3]]
    return results


def _gradient_of_input(results: list[Any], operands: Operands) -> list[Any]:
    """The first gradient in the dtype of the input, which is the second operand."""
    return [results[0].to(operands[1].dtype), *results[1:]]


@functools.cache
def _batch_norms() -> frozenset[OpOverload]:
    return frozenset(_ops(f"{_BATCH_NORMS} {_BATCH_NORMS_BACKWARD}"))


@functools.cache
def _views() -> frozenset[OpOverload]:
    return frozenset(_ops("view _unsafe_view"))


def _ops(names: str) -> Iterator[OpOverload]:
    for full_name in names.split():
        name, _, overload = full_name.partition(".")
        yield getattr(getattr(torch.ops.aten, name), overload or "default")


def _contiguous(shape: Shape, operands: Operands) -> Strides:
    return torch.empty(shape).stride()


def _like(index: int) -> Rule:
    """In the order of an operand."""
    return lambda shape, operands: torch.empty_like(operands[index].expand(shape)).stride()


def _batch_norm(shape: Shape, operands: Operands) -> Strides:
    """Contiguous if the input can be taken for that: of images of one pixel there are strides that
    are contiguous and channels_last, and others go by what they suggest."""
    rule = _contiguous if _is_contiguous(operands[0]) else _in_format_of(0)
    return rule(shape, operands)


def _batch_norm_backward(shape: Shape, operands: Operands) -> Strides:
    """The same, if what comes from above is in the format of the input."""
    from torch._prims_common import suggest_memory_format

    upstream, x = operands[:2]
    memory_format = suggest_memory_format(x)
    alike = memory_format == suggest_memory_format(upstream) and (
        _is_contiguous(upstream) or upstream.is_contiguous(memory_format=memory_format)
    )
    rule = _contiguous if alike and _is_contiguous(x) else _in_format_of(1)
    return rule(shape, operands)


def _in_format_of(index: int) -> Rule:
    """Contiguous, or in channels_last where an operand is."""

    def strides_of(shape: Shape, operands: Operands) -> Strides:
        from torch._prims_common import suggest_memory_format

        return torch.empty(shape, memory_format=suggest_memory_format(operands[index])).stride()

    return strides_of


def _elementwise(shape: Shape, operands: Operands) -> Strides:
    """By the operands one after the other. Of what has another dtype than it is computed in, the
    kernel is given a copy, with the same strides if there are no gaps."""
    from torch._prims_common import (
        ELEMENTWISE_TYPE_PROMOTION_KIND,
        compute_elementwise_output_strides,
        elementwise_dtypes,
        is_non_overlapping_and_dense_or_false,
    )

    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    _, dtype = elementwise_dtypes(*operands, type_promotion_kind=kind)
    given = [
        a if a.dtype == dtype or is_non_overlapping_and_dense_or_false(a) else torch.empty_like(a)
        for a in operands
        if a.dim()
    ]
    return compute_elementwise_output_strides(*(a.expand(shape) for a in given))


def _gradient_last(shape: Shape, operands: Operands) -> Strides:
    """Elementwise, by a kernel that has the gradient behind what was computed."""
    return _elementwise(shape, operands[::-1])
