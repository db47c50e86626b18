"""The smart casts as Python functions: argument checks, then the op.

Every one follows autocast's own rule (``cached_cast`` in PyTorch's ``ATen/autocast_mode.h``): a
tensor is cast if and only if it is floating point, not float64, on the device type asked for, and
not of the target dtype yet. In every other case the argument itself is returned, not a copy.
Gradients return in the argument's dtype. All of them can be traced by ``torch.compile`` and work
under ``torch.func`` transforms, but for ``functionalize``, which takes no op that may return its
argument; sparse, quantized and complex tensors are a ``RuntimeError``, and so are MKLDNN and float4
ones where there is something to cast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ops = torch.ops.smart_autocast
SMART_CASTS = frozenset(
    {
        _ops.autocast_to_fp16.default,
        _ops.autocast_to_bf16.default,
        _ops.autocast_to_reduced_precision.default,
        _ops.autocast_to_full_precision.default,
        _ops.promote.default,
    }
)
"""The ops of these functions, as the nodes of a graph name them."""
# Saves asking PyTorch about the names that nearly all calls use.
_COMMON_DEVICE_TYPES = frozenset({"cpu", "cuda", "xpu", "mps", "meta"})


def autocast_to_fp16(tensor: Tensor, *, device_type: str | None = None) -> Tensor:
    """Casts to float16 as ``torch.autocast(dtype=torch.float16)`` would.

    Args:
        tensor: any shape and dtype; cast if floating point, not float64 and not float16.
        device_type: cast only tensors on this device type, such as ``"cuda"``; None: on any.

    Returns:
        A float16 tensor of the same shape, rounded to nearest even, or ``tensor`` itself.

    Raises:
        TypeError: ``tensor`` is no tensor, or ``device_type`` no string.
        ValueError: PyTorch knows no such ``device_type``.
        RuntimeError: ``tensor`` is sparse, quantized or complex.
    """
    _check_tensor("tensor", tensor)
    _check_device_type(device_type)
    return _ops.autocast_to_fp16.default(tensor, device_type=device_type)


def autocast_to_bf16(tensor: Tensor, *, device_type: str | None = None) -> Tensor:
    """Casts to bfloat16 as ``torch.autocast(dtype=torch.bfloat16)`` would.

    Args:
        tensor: any shape and dtype; cast if floating point, not float64 and not bfloat16.
        device_type: cast only tensors on this device type, such as ``"cuda"``; None: on any.

    Returns:
        A bfloat16 tensor of the same shape, rounded to nearest even, or ``tensor`` itself.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`autocast_to_fp16`.
    """
    _check_tensor("tensor", tensor)
    _check_device_type(device_type)
    return _ops.autocast_to_bf16.default(tensor, device_type=device_type)


def autocast_to_reduced_precision(
    tensor: Tensor, dtype: torch.dtype, *, device_type: str | None = None
) -> Tensor:
    """Casts to a low-precision dtype chosen at run time, as autocast's ``lower_precision_fp`` does.

    Args:
        tensor: any shape and dtype; cast if floating point, not float64 and not ``dtype``.
        dtype: a floating dtype narrower than float32: float16, bfloat16 or a float8.
        device_type: cast only tensors on this device type, such as ``"cuda"``; None: on any.

    Returns:
        A tensor of ``dtype`` and the same shape, rounded as ``tensor.to(dtype)`` rounds, or
        ``tensor`` itself.

    Raises:
        TypeError: ``dtype`` is no ``torch.dtype``; else as :func:`autocast_to_fp16`.
        ValueError: ``dtype`` is not a floating dtype narrower than float32, or float4, to which
            PyTorch casts nothing; else as :func:`autocast_to_fp16`.
        RuntimeError: ``tensor`` is sparse, quantized or complex.
    """
    _check_tensor("tensor", tensor)
    _check_device_type(device_type)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            "argument 'dtype' must be a torch.dtype such as torch.bfloat16, got "
            f"{type(dtype).__name__}"
        )
    if not dtype.is_floating_point or dtype.itemsize >= 4 or dtype is torch.float4_e2m1fn_x2:
        raise ValueError(
            "argument 'dtype' must be a floating dtype narrower than float32, such as "
            f"torch.float16 or torch.bfloat16, got {dtype}"
        )
    return _ops.autocast_to_reduced_precision.default(tensor, dtype, device_type=device_type)


def autocast_to_full_precision(tensor: Tensor, *, device_type: str | None = None) -> Tensor:
    """Casts to float32 as autocast's policy ``fp32`` does; float64 stays float64.

    Args:
        tensor: any shape and dtype; cast if floating point and narrower than float32.
        device_type: cast only tensors on this device type, such as ``"cuda"``; None: on any.

    Returns:
        A float32 tensor of the same shape (exact), or ``tensor`` itself.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`autocast_to_fp16`.
    """
    _check_tensor("tensor", tensor)
    _check_device_type(device_type)
    return _ops.autocast_to_full_precision.default(tensor, device_type=device_type)


def promote(tensors: Sequence[Tensor], *, device_type: str | None = None) -> list[Tensor]:
    """Brings tensors to one dtype as autocast's policy ``promote`` does for ``cat`` or ``addcmul``.

    Args:
        tensors: a list or tuple of tensors of any shapes and dtypes. float64 and non-floating
            tensors, and those on another device type, take no part.
        device_type: promote only tensors on this device type, such as ``"cuda"``; None: on any.

    Returns:
        As many tensors in the same order, those that take part in their common dtype if they
        have one, else in float32. float16 with bfloat16 gives float32, where eager autocast raises
        (pytorch/pytorch#191125). A tensor that needs no cast is returned itself.

    Raises:
        TypeError: ``tensors`` is no list or tuple of tensors, or ``device_type`` no string.
        ValueError: PyTorch knows no such ``device_type``.
        RuntimeError: a tensor is sparse, quantized or complex.
    """
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(
            f"argument 'tensors' must be a list or tuple of tensors, got {type(tensors).__name__}; "
            "pass list(tensors), or [tensor] for one"
        )
    for index, tensor in enumerate(tensors):
        _check_tensor(f"tensors[{index}]", tensor)
    _check_device_type(device_type)
    return _ops.promote.default(tensors, device_type=device_type)


def _check_tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"argument '{argument}' must be a torch.Tensor, got {type(value).__name__}; "
            "make one with torch.as_tensor"
        )


def _check_device_type(value: object) -> None:
    if value is None or (isinstance(value, str) and value in _COMMON_DEVICE_TYPES):
        return
    expected = "argument 'device_type' must be a device type such as 'cpu' or 'cuda', or None, got"
    if not isinstance(value, str):
        raise TypeError(f"{expected} {type(value).__name__}; pass tensor.device.type")
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{expected} {value!r}. {error}") from None  # PyTorch lists the names.
    if device.index is not None:
        raise ValueError(f"{expected} {value!r}; leave out the index: {device.type!r}")
