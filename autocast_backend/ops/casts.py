"""The functional casts as Python functions: argument checks, then the op."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import _native
from .._torch.dispatch import (
    any_requires_grad,
    is_traced_by_jit,
    is_transformed,
    may_skip_autograd,
    without_autograd,
)
from . import _multi_cast, _unscale_cast, reference

_tier = _native.load()
_ops = torch.ops.smart_autocast
# No subclass, which may hold other tensors.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_PLAIN = frozenset(_PLAIN_TYPES)
_NOT_PLAIN, _FROZEN, _TRAINED = range(3)


def _look_in_python(tensors: object, types: tuple[type, ...]) -> int:
    """What `look_at_tensors` of the native library finds (`csrc/look_at_tensors.h`)."""
    if type(tensors) not in (list, tuple) or not set(types).issuperset(map(type, tensors)):  # type: ignore[call-overload]
        return _NOT_PLAIN
    return _TRAINED if any_requires_grad(tensors) else _FROZEN


_look_at_tensors: Callable[[object, tuple[type, ...]], int] = (
    importlib.import_module("autocast_backend._C").look_at_tensors
    if _tier.name == "native"
    else _look_in_python
)
# What `tensor.to(dtype)` is too, with less to find out about its arguments.
METHODS = {
    torch.float64: Tensor.double,
    torch.float32: Tensor.float,
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
}
_FEW = 6
# Elements of one tensor from which on a kernel of ours gains more than its call costs.
_MUCH = 2**20


def _much_alone_on_cpu(capability: str | None, vendor: str | None) -> int:
    """The same for the CPU. Without AVX-512 our loops are as fast as PyTorch's, and on a Xeon the
    call costs 40 us more than PyTorch's where a loop has emptied the core's cache: there a kernel
    gains beyond the caches, on the Xeon by huge pages (`csrc/ops/cpu/runs.h`), and for some dtypes.
    """
    if capability != "AVX512":
        return 4 * _MUCH
    return _MUCH if vendor == "amd" else 7 * _MUCH


_MUCH_ALONE_ON_CPU = _much_alone_on_cpu(_tier.cpu_capability, _tier.cpu_vendor)
# PyTorch's kernel on a GPU reaches what memory gives for these, and half of it for many others.
_FAST_BY_PYTORCH_ON_CUDA = {(torch.float32, torch.float16), (torch.float32, torch.bfloat16)}
_SLOW_BY_PYTORCH = {
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float16, torch.float64),
}


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
        RuntimeError: another dtype, of ``tensor`` or asked for; a tensor that is not dense, or
            whose memory was freed.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"argument 'tensor' must be a torch.Tensor, got {type(tensor).__name__}; "
            "make one with torch.as_tensor"
        )
    _check_dtype(dtype)
    reference.check_dtype_with_stats(dtype)  # no kernel sees dtypes unknown to the stable ABI
    op = _ops.cast_with_stats.default
    if type(tensor) in _PLAIN and not tensor.requires_grad and may_skip_autograd():
        with without_autograd():
            result, numbers = op(tensor, dtype)
    else:
        result, numbers = op(tensor, dtype)
    return result, CastStats(*numbers.unbind())


class UnscaledGrads(NamedTuple):
    """What :func:`unscale_cast` makes of gradients."""

    tensors: list[Tensor]
    """The unscaled gradients."""
    found_inf: Tensor
    """float32, of no dimensions: 1 if a gradient holds an infinity or a NaN, else 0. It can be a
    fused optimizer's ``found_inf``, as ``torch.amp.GradScaler``'s can."""


def unscale_cast(
    grads: Sequence[Tensor],
    scale: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    out: Sequence[Tensor] | None = None,
) -> UnscaledGrads:
    """Divides gradients by a loss scale, casts them, and looks for infinities and NaNs, at once.

    The bits are those of ``torch.amp.GradScaler.unscale_`` after ``grad.to(dtype)``: the product
    with ``scale.double().reciprocal().float()``. Nothing waits for the device.

    Args:
        grads: a list or tuple of floating tensors on one device, of any dtypes, shapes and strides.
        scale: the loss scale, a float32 tensor of one element on that device.
        dtype: ``torch.float32``, ``torch.float64``, ``torch.float16`` or ``torch.bfloat16``.
        out: where to write the results: as many tensors, of ``dtype``, with the shapes of
            ``grads``, on their device. ``out[i]`` may be ``grads[i]``; else each has memory of its
            own. Where gradients are large, memory that is used again saves most of the time. Where
            one is not contiguous, Dynamo leaves the call to Python: a graph break.

    Returns:
        :class:`UnscaledGrads`: new tensors, or those of ``out``, and whether a number was not
        finite after the cast. Without gradients of their own.

    Raises:
        TypeError: ``grads`` or ``out`` is no list or tuple of tensors, ``scale`` no tensor, or
            ``dtype`` no ``torch.dtype``.
        RuntimeError: another dtype; ``scale`` of another dtype or more elements; tensors on other
            devices than ``scale``; one that is not floating or dense, or whose memory was freed;
            one that requires grad while gradients are on, or has a tangent of forward-mode AD;
            ``out`` does not fit, or shares memory with ``scale``, others of ``grads`` or in itself,
            from a tensor's first byte to its last: columns of one tensor do.
    """
    _check_tensors("grads", grads)
    if not isinstance(scale, Tensor):
        raise TypeError(
            f"argument 'scale' must be a torch.Tensor, got {type(scale).__name__}; make one with "
            "torch.tensor(scale, device=grads[0].device)"
        )
    _check_dtype(dtype)
    _unscale_cast.check_dtype(dtype)  # no kernel sees dtypes unknown to the stable ABI
    if out is None:
        return UnscaledGrads(*_ops.unscale_cast.default(grads, scale, dtype))
    _check_tensors("out", out)
    if is_traced_by_jit():
        write = functools.partial(_unscale_cast.autograd_out, _unscale_cast.unscale_cast_out)
        return UnscaledGrads(list(out), write(grads, scale, dtype, out=out))
    return UnscaledGrads(list(out), _ops.unscale_cast.out(grads, scale, dtype, out=out))


def multi_cast(
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    out: Sequence[Tensor] | None = None,
    rounding: Literal["nearest-even", "stochastic"] = "nearest-even",
    seed: int | None = None,
    offset: int = 0,
) -> list[Tensor]:
    """Casts many tensors in one pass: as ``[t.to(dtype, copy=True) for t in tensors]``, but faster.

    Args:
        tensors: a list or tuple of dense tensors of real numbers, all on one device, of any dtypes,
            shapes and strides.
        dtype: the floating dtype to cast to.
        out: where to write the results: as many tensors, of ``dtype``, with the shapes of
            ``tensors``, on their device; no gradients flow through it. Fastest with the strides of
            ``tensors``: ``[torch.empty_like(t, dtype=dtype) for t in tensors]``. Where one is not
            contiguous, Dynamo leaves the call to Python: a graph break.
        rounding: ``"nearest-even"``, bit by bit as ``Tensor.to`` rounds; or ``"stochastic"``: to
            one of the two neighbours in ``dtype``, so that the mean is the number itself. The
            latter takes floating tensors and ``torch.bfloat16``, ``torch.float16``,
            ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, no ``out`` and no gradients.
        seed: of the random numbers, Philox4x32-10; for stochastic rounding, which needs one. The
            result is a function of the arguments, the same on every device.
        offset: how many blocks of four random numbers to leave out: a call takes
            ``sum(-(-t.numel() // 4) for t in tensors)``, for the next one to add.

    Returns:
        A tensor of ``dtype`` for each of ``tensors``, in order; a new one, also where the dtype is
        right already, or that of ``out``. Gradients return in each tensor's own dtype, and only
        tensors that require grad give results that do.

    Raises:
        TypeError: ``tensors`` or ``out`` is no list or tuple of tensors, or ``dtype`` no
            ``torch.dtype``, or ``seed`` (also where it is missing) or ``offset`` no int.
        ValueError: ``dtype`` is not floating, or ``torch.float4_e2m1fn_x2``; another ``rounding``;
            ``seed``, ``offset`` or ``out`` do not go with it, or are beyond 64 bits.
        RuntimeError: a tensor is sparse, MKLDNN, quantized, complex, float4 or of a dtype without
            numbers (``uint4``, ``bits8``), or its memory was freed, as FSDP frees gathered weights
            (``Tensor.to``, which casts tensors that require grad, and one or a few others, may
            crash then); tensors are on different devices; ``out`` does not fit, or shares memory
            with ``tensors`` or in itself, from a tensor's first byte to its last; with ``out`` or
            stochastic rounding, a tensor requires grad while gradients are on, or has a tangent of
            forward-mode AD; with stochastic rounding, another ``dtype``, a tensor that is not
            floating, or a negative ``offset``.
    """
    if out is None and seed is None and isinstance(tensors, (list, tuple)) and len(tensors) == 1:
        # One tensor shares the cost of a call with none. Where a kernel of ours gains less than
        # that, or cannot be used, it is PyTorch's; but an op of ours while the call is traced. A
        # large one pushes out of the caches what the next call needs: no step more than it must.
        tensor = tensors[0]
        if (
            type(tensor) in _PLAIN
            and tensor.dtype in METHODS
            and type(dtype) is torch.dtype
            and dtype in METHODS
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and rounding == "nearest-even"
            and type(offset) is int
            and offset == 0
            and not is_compiling()
        ):
            count = tensor.numel()
            if (
                count < _MUCH
                or (tensor.requires_grad and torch.is_grad_enabled())
                or (
                    count < _MUCH_ALONE_ON_CPU
                    and tensor.is_cpu
                    and (tensor.dtype, dtype) not in _SLOW_BY_PYTORCH
                )
                or (tensor.is_cuda and (tensor.dtype, dtype) in _FAST_BY_PYTORCH_ON_CUDA)
            ):
                return [tensor.clone() if tensor.dtype is dtype else METHODS[dtype](tensor)]
            if may_skip_autograd():
                return _below_autograd(tensors, dtype)
    elif (  # The same of a few, and of those that require grad, which are cast one by one in any
        # case; a loop over one would be a fifth of its cast.
        isinstance(tensors, (list, tuple))
        and tensors
        and out is None
        and seed is None
        and type(dtype) is torch.dtype
        and dtype in METHODS
        and rounding == "nearest-even"
        and type(offset) is int
        and offset == 0
        and not is_compiling()
        and _are_few_or_trained(tensors)
    ):
        method = METHODS[dtype]
        return [t.clone() if t.dtype is dtype else method(t) for t in tensors]
    compiling = is_compiling()
    found = _NOT_PLAIN if compiling else _look_at_tensors(tensors, _PLAIN_TYPES)
    if found == _NOT_PLAIN:
        _check_tensors("tensors", tensors)
    _check_dtype(dtype)
    if not dtype.is_floating_point or dtype is torch.float4_e2m1fn_x2:  # two numbers in one
        raise ValueError(
            "argument 'dtype' must be a floating dtype such as torch.bfloat16, one that "
            f"Tensor.to casts to, got {dtype}"
        )
    if rounding != "nearest-even":
        return _stochastic_cast(tensors, dtype, out, rounding, seed, offset)
    if seed is not None or type(offset) is not int or offset != 0:
        raise ValueError(
            "arguments 'seed' and 'offset' are for rounding='stochastic', got "
            f"rounding='nearest-even' with seed={seed!r}, offset={offset!r}"
        )
    if out is None:
        if found == _NOT_PLAIN or is_transformed():
            return _ops.multi_cast.default(tensors, dtype)
        if found == _TRAINED:
            return _multi_cast.autograd(_below_autograd, tensors, dtype)
        return _below_autograd(tensors, dtype)
    found_out = _NOT_PLAIN if compiling else _look_at_tensors(out, _PLAIN_TYPES)
    if found_out == _NOT_PLAIN:
        _check_tensors("out", out)
    if is_traced_by_jit():
        _multi_cast.autograd_out(reference.multi_cast_out, tensors, dtype, out=out)
    elif _NOT_PLAIN in (found, found_out) or is_transformed():
        _ops.multi_cast.out(tensors, dtype, out=out)
    elif _TRAINED in (found, found_out):
        _multi_cast.autograd_out(_below_autograd_out, tensors, dtype, out=out)
    else:
        _multi_cast.write(_below_autograd_out, tensors, dtype, out=out)
    return list(out)


def _are_few_or_trained(tensors: Sequence[Tensor]) -> bool:
    """Whether one call for these, of one device, takes longer than one for each: for a few on the
    CPU (`benchmarks launch` has where that ends), and where they require grad, as the code of a
    list is cold after that of a model. On a GPU each call is a kernel of its own."""
    few, grad = len(tensors) <= _FEW, torch.is_grad_enabled()
    index = tensors[0].get_device() if isinstance(tensors[0], Tensor) else None  # -1: the CPU
    for tensor in tensors:
        if not (
            type(tensor) in _PLAIN
            and (
                (grad and tensor.requires_grad)
                or (few and tensor.is_cpu and tensor.numel() < _MUCH)
            )
            and (tensor.is_cpu or tensor.is_cuda)
            and tensor.get_device() == index
            and tensor.dtype in METHODS
            and tensor.layout is torch.strided
            and not tensor.is_nested
        ):
            return False
    return True


def _stochastic_cast(
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    out: Sequence[Tensor] | None,
    rounding: object,
    seed: object,
    offset: object,
) -> list[Tensor]:
    if rounding != "stochastic":
        raise ValueError(
            f"argument 'rounding' must be 'nearest-even' or 'stochastic', got {rounding!r}"
        )
    if out is not None:
        raise ValueError("argument 'out' is for rounding='nearest-even'; stochastic takes none")
    for name, value in (("seed", seed), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(
                f"argument '{name}' must be an int for rounding='stochastic', such as 0, got "
                f"{type(value).__name__}; the same seed and offset give the same bits"
            )
        if isinstance(value, int) and not (is_compiling() or -(2**63) <= value < 2**63):
            raise ValueError(
                f"argument '{name}' must fit into 64 bits with a sign, got {value}; take it modulo "
                "2**63"
            )
    return _ops.stochastic_cast.default(tensors, dtype, seed, offset)


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


def _check_tensors(argument: str, value: object) -> None:
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"argument '{argument}' must be a list or tuple of tensors, got "
            f"{type(value).__name__}; pass list({argument}), or [tensor] for one"
        )
    if _PLAIN.issuperset(map(type, value)):
        return
    for index, tensor in enumerate(value):
        if not isinstance(tensor, Tensor):
            remedy = "make one with torch.as_tensor"
            if tensor is None:
                remedy = "leave it out" + (", and its tensor" if argument == "out" else "")
            raise TypeError(
                f"argument '{argument}[{index}]' must be a torch.Tensor, got "
                f"{type(tensor).__name__}; {remedy}"
            )
