"""Ops of ATen that AOTAutograd writes as others above autograd, where eager mode runs them whole.

    upsample_bilinear2d.vec       what is called
        upsample_bilinear2d       in eager mode; its backward is upsample_bilinear2d_backward
        arange, index, mul, ...   with AOTAutograd; their backward adds up what the indices name

The parts round elsewhere. Who runs op by op is better off with the op. Inductor makes one kernel of
them; where it rounds as eager mode does, it is given some whole (`roundings.py`, `reductions.py`).

    y, mask = native_dropout(x, 0.1, True)         AOTAutograd, for dropout; y = (x * mask) * 1.11
    y = x * (mask / 0.9)                           eager mode, on the CPU; mask in the dtype of x
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .flags import Flag, rounds

INTERPOLATION = (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)
_COPYING = ("upsample_nearest2d", *INTERPOLATION[:3])
"""Of these, the CPU's kernels copy along dimensions whose size does not change."""

_WITH_OTHER_GRADIENTS = ("multi_margin_loss", "softshrink", "hardshrink")
"""Whose parts have other gradients: of a margin of 0, or of NaN."""

_asked = Flag()
_right = Flag()


@contextlib.contextmanager
def ops_right() -> Iterator[None]:
    """Have AOTAutograd trace some ops right, in what this thread does meanwhile: dropout that drops
    nothing returns what it was given, not a copy; the multi-label margin loss reads targets up to
    the first -1; and interpolation copies along dimensions whose size does not change."""
    _register()
    with _right.raised():
        yield


@contextlib.contextmanager
def ops_kept_whole() -> Iterator[None]:
    """Have AOTAutograd trace these ops as they are, in what this thread does meanwhile, where it
    knows their sizes."""
    _register()
    with _asked.raised():
        yield


@functools.cache
def _register() -> None:
    """Ask the thread, wherever PyTorch has a decomposition above autograd. (A decomposition that
    went and came with each compilation would be missed by other threads.)"""
    aten = torch.ops.aten
    for name in _COPYING:
        linear = name in INTERPOLATION
        _put(getattr(aten, name).vec, functools.partial(_copying, linear))
    for name in INTERPOLATION:
        op = getattr(aten, name)
        _put(op.vec, functools.partial(_rounded_whole, functools.partial(_by_sizes, op.default)))
        _put(op.default, functools.partial(_rounded_whole, _by_autograd(op.default)))
    losses = aten.multilabel_margin_loss_forward.default
    _put(losses, _multilabel_margin_loss)
    _put(losses, functools.partial(_rounded_whole, _by_autograd(losses)))
    _put(aten.multi_margin_loss.default, _margins_as_relu)
    for name in _WITH_OTHER_GRADIENTS:
        op = getattr(aten, name).default
        _put(op, functools.partial(_right_whole, _by_autograd(op)))
    _put(aten.dropout.default, _dropout)


def _put(op: OpOverload, kernel: Callable[..., Any]) -> None:
    """Put a kernel, called with the decomposition first, in the place of each decomposition."""
    for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
        if (apart := op.py_kernels.get(key)) is not None:
            op.py_kernels[key] = functools.partial(kernel, apart)
    op._dispatch_cache.clear()


def _by_autograd(op: OpOverload) -> Callable[..., Any]:
    """ATen's own kernel for autograd."""
    return functools.partial(op._op_dk, DispatchKey.Autograd)


def _chosen(whole: Callable[..., Any], apart: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    known = not _has_symbols((args[0].shape, args[1:], kwargs))
    return (whole if _asked.on and known else apart)(*args, **kwargs)


def _right_whole(
    whole: Callable[..., Any], apart: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Also where Inductor takes the op apart, below autograd."""
    with _asked.raised() if _right.on else contextlib.nullcontext():
        return _chosen(whole, apart, *args, **kwargs)


def _margins_as_relu(apart: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Where it is taken apart: the gradient of `clamp_min(0)` of 0 is 1, and ATen's of a loss 0."""
    with _ClampedByRelu() if _right.on else contextlib.nullcontext():
        return apart(*args, **kwargs)


class _ClampedByRelu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.clamp_min:
            return args[0].relu()
        return func(*args, **(kwargs or {}))


def _rounded_whole(
    whole: Callable[..., Any], apart: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Also where Inductor rounds as eager mode does: these are ATen's then."""
    rounded = rounds() and x.device.type == "cpu"
    with _asked.raised() if rounded else contextlib.nullcontext():
        return _chosen(whole, apart, x, *args, **kwargs)


def _has_symbols(values: Any) -> bool:
    """Whether there are sizes that are not known: ATen's backward ops do not take such."""
    return any(isinstance(v, torch.SymInt | torch.SymFloat) for v in pytree.tree_leaves(values))


def _multilabel_margin_loss(
    of_torch: Callable[..., Any], x: torch.Tensor, target: torch.Tensor, reduction: int
) -> Any:
    """The loss `sum(clamp(1 - x[t] + x[c], min=0)) / C` over the C classes c that are no target,
    and the targets t before the first -1. PyTorch's adds x[0] up for each place after that."""
    if not _right.on:
        return of_torch(x, target, reduction)
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = torch.arange(rows.shape[1], device=x.device)
    end = torch.where(targets == -1, classes, len(classes)).amin(1, keepdim=True)
    counts = classes < end
    of_targets = rows.gather(1, torch.where(counts, targets, 0))
    is_target = (torch.where(counts, targets, -1)[:, :, None] == classes).any(1)
    margins = (1 - of_targets[:, :, None] + rows[:, None]).relu() / len(classes)
    counts = counts[:, :, None] & ~is_target[:, None]
    losses = torch.where(counts, margins, 0).sum((1, 2))
    if reduction:
        losses = losses.mean() if reduction == 1 else losses.sum()
    elif x.dim() < 2:
        losses = losses[0]
    return losses, is_target.to(x.dtype).reshape(target.shape)


def _dropout(fused: Callable[..., Any], x: torch.Tensor, p: float, train: bool) -> Any:
    if _right.on and not (train and p):
        return x
    plain = train and isinstance(p, float) and 0 < p < 1
    if not (_asked.on and plain and x.device.type == "cpu"):
        return fused(x, p, train)
    mask = torch.native_dropout(x, p, True)[1]  # in the strides of x, as eager mode draws it
    return x * (mask.to(x.dtype) / (1 - p))


def _copying(
    linear: bool, apart: Callable[..., Any], x: torch.Tensor, sizes: Any, *args: Any
) -> Any:
    """Forget the scales along such dimensions (PyTorch #198201): scaled by 1.25, three elements
    stay as they are."""
    from torch._decomp.decompositions import _upsample_linear, _upsample_nearest

    *align_corners, scales = args
    if not (_right.on and scales and x.device.type == "cpu"):
        return apart(x, sizes, *args)
    sizes = _sizes(x, sizes, scales)
    scales = [None if size == x.shape[2 + i] else scales[i] for i, size in enumerate(sizes)]
    interpolate: Any = _upsample_linear if linear else _upsample_nearest
    return interpolate(x, sizes, *align_corners, scales)


def _by_sizes(
    op: OpOverload, x: torch.Tensor, sizes: Any, align_corners: bool, scales: Any = None
) -> Any:
    """Call the overload with sizes, as ATen's composite kernel does."""
    given = scales or [None] * (x.dim() - 2)
    return op(x, _sizes(x, sizes, scales), align_corners, *given)


def _sizes(x: torch.Tensor, sizes: Any, scales: Any) -> Any:
    from torch._decomp.decompositions import upsample_compute_output_size

    return upsample_compute_output_size(x.size(), sizes, scales)
