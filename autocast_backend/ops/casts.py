"""The functional casts as Python functions: argument checks, then the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.dispatch import may_skip_autograd, without_autograd
from . import _multi_cast

_ops = torch.ops.smart_autocast
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class CastStats(NamedTuple):
    """What a cast did to the elements of a tensor; four float64 tensors without dimensions, on its
    device, so that reading them is up to the caller."""

    amax: Tensor
    """The largest magnitude before the cast, NaNs apart; 0 if there is none."""
    overflows: Tensor
    """How many finite elements became infinite."""
    underflows: Tensor
    """How many elements other than 0 became 0."""
    nans: Tensor
    """How many elements are NaN."""


def cast_with_stats(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, CastStats]:
    """Casts a tensor and, in the same pass over memory, counts what is lost.

    Args:
        tensor: float64, float32, float16 or bfloat16, of any shape and strides.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        ``tensor.to(dtype, copy=True)``, with its gradient, and the :class:`CastStats`, without.

    Raises:
        TypeError: ``tensor`` is no tensor, or ``dtype`` no ``torch.dtype``.
        RuntimeError: another dtype, of ``tensor`` or asked for.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"argument 'tensor' must be a torch.Tensor, got {type(tensor).__name__}; "
            "make one with torch.as_tensor"
        )
    _check_dtype(dtype)
    result, numbers = _ops.cast_with_stats.default(tensor, dtype)
    return result, CastStats(*numbers.unbind())


def multi_cast(
    tensors: Sequence[Tensor], dtype: torch.dtype, *, out: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Casts many tensors in one pass: as ``[t.to(dtype, copy=True) for t in tensors]``, but faster.

    Args:
        tensors: a list or tuple of dense tensors of real numbers, all on one device, of any dtypes,
            shapes and strides.
        dtype: the floating dtype to cast to.
        out: where to write the results: as many tensors, of ``dtype``, with the shapes of
            ``tensors``, on their device; no gradients flow through it. Fastest with the strides of
            ``tensors``: ``[torch.empty_like(t, dtype=dtype) for t in tensors]``.

    Returns:
        A tensor of ``dtype`` for each of ``tensors``, in order, rounded as ``Tensor.to`` rounds; a
        new one, also where the dtype is right already, or that of ``out``. Gradients return in each
        tensor's own dtype, and only tensors that require grad give results that do.

    Raises:
        TypeError: ``tensors`` or ``out`` is no list or tuple of tensors, or ``dtype`` no
            ``torch.dtype``.
        ValueError: ``dtype`` is not floating.
        RuntimeError: a tensor is sparse, quantized or complex; tensors are on different devices;
            ``out`` does not fit, shares memory with ``tensors`` or in itself, or a tensor requires
            grad while gradients are on.
    """
    plain = _check_tensors("tensors", tensors) and may_skip_autograd()
    _check_dtype(dtype)
    if not dtype.is_floating_point:
        raise ValueError(
            f"argument 'dtype' must be a floating dtype such as torch.bfloat16, got {dtype}"
        )
    if out is None:
        if not plain:
            return _ops.multi_cast.default(tensors, dtype)
        return _multi_cast.autograd(_below_autograd, tensors, dtype)
    if not (_check_tensors("out", out) and plain):
        _ops.multi_cast.out(tensors, dtype, out=out)
    else:
        _multi_cast.autograd_out(_below_autograd_out, tensors, dtype, out=out)
    return list(out)


def _below_autograd(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    with without_autograd():
        return _ops.multi_cast.default(tensors, dtype)


def _below_autograd_out(
    tensors: Sequence[Tensor], dtype: torch.dtype, *, out: Sequence[Tensor]
) -> None:
    with without_autograd():
        _ops.multi_cast.out(tensors, dtype, out=out)


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            "argument 'dtype' must be a torch.dtype such as torch.bfloat16, got "
            f"{type(dtype).__name__}"
        )


def _check_tensors(argument: str, value: object) -> bool:
    """Whether all of them are plain tensors or parameters: no subclass that may hold others."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"argument '{argument}' must be a list or tuple of tensors, got {type(value).__name__}"
        )
    if _PLAIN.issuperset(map(type, value)):
        return True
    for index, tensor in enumerate(value):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"argument '{argument}[{index}]' must be a torch.Tensor, got "
                f"{type(tensor).__name__}; make one with torch.as_tensor"
            )
    return False
