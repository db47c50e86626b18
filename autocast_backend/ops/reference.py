"""The reference tier: every op in plain PyTorch.

It is what runs where no native library does, and what the native kernels are tested against: same
schemas, same results, same errors. Kernels follow the comments in ``csrc/ops/<op>.cpp``. Ops that
need it on every tier, for devices without a kernel, have theirs in ``_<op>.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import any_requires_grad, any_tangent
from .._torch.ops import arguments_of
from .schemas import SCHEMAS

_SPARSE = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


_WITHOUT_NUMBERS = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    )
)
"""Dtypes that only hold bits, for subclasses to give them a meaning."""


def fail(op: str, message: str) -> RuntimeError:
    return RuntimeError(f"smart_autocast::{op}: {message}")


def refuse_derivatives(op: str, *arguments: Any) -> None:
    """For an op that has none: that nothing requires grad while gradients are on, and nothing has a
    tangent."""
    if torch.is_grad_enabled() and any_requires_grad(*arguments):
        raise fail(
            op,
            "it has no gradient, but a tensor requires grad; call it under torch.no_grad(), or "
            "pass tensor.detach()",
        )
    if any_tangent(*arguments):
        raise fail(
            op,
            "it has no derivative, but a tensor has a tangent; pass "
            "torch.autograd.forward_ad.unpack_dual(tensor).primal",
        )


def check_supported(op: str, argument: str, tensor: Tensor | None) -> None:
    expected = f"argument '{argument}' must be a dense tensor of real numbers, got"
    if tensor is None:  # which PyTorch hands to any op that takes a tensor
        raise fail(op, f"{expected} None")
    if tensor.layout in _SPARSE:
        raise fail(op, f"{expected} a sparse tensor; pass tensor.to_dense(), or cast its values")
    if tensor.is_quantized:
        raise fail(op, f"{expected} a quantized tensor; call tensor.dequantize() first")
    if tensor.is_complex():
        raise fail(op, f"{expected} a complex tensor; cast torch.view_as_real(tensor) instead")


def check_castable(op: str, argument: str, tensor: Tensor) -> None:
    """For a tensor that will be cast: that PyTorch casts it."""
    check_supported(op, argument, tensor)
    expected = f"argument '{argument}' must be a dense tensor of real numbers, got"
    if tensor.is_mkldnn:
        raise fail(op, f"{expected} an MKLDNN tensor; pass tensor.to_dense()")
    if tensor.dtype == torch.float4_e2m1fn_x2:
        raise fail(op, f"{expected} a float4 tensor, which PyTorch does not cast; unpack it first")
    if tensor.dtype in _WITHOUT_NUMBERS:
        raise fail(op, f"{expected} a {tensor.dtype} tensor, which PyTorch does not cast")


def address_of(tensor: Tensor) -> int:
    """Where the elements of a tensor that has some are; `RuntimeError` where they are gone."""
    address = tensor.data_ptr()
    if address == tensor.storage_offset() * tensor.element_size():  # of a null pointer
        raise RuntimeError(
            f"smart_autocast: a tensor has {tensor.numel()} elements and no memory: it was freed, "
            "as FSDP frees the weights that it has gathered; call this while the tensor has its "
            "memory"
        )
    return address


def empty_batch(
    tensors: Sequence[Tensor], dims: Sequence[int | None], dtype: torch.dtype
) -> list[Tensor]:
    """What vmap over no examples gives for each tensor, batched in the first dimension."""
    return [
        tensor.new_empty((0, *(n for d, n in enumerate(tensor.shape) if d != dim)), dtype=dtype)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def check_memory(*tensors: Tensor) -> None:
    """For what ATen is to read: on the CPU it reads memory that is not there."""
    for tensor in tensors:
        if tensor.numel() > 0 and tensor.device.type in ("cpu", "cuda"):
            address_of(tensor)


def _parse_device_type(op: str, name: str | None) -> str | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.index is not None:
        raise fail(
            op,
            "argument 'device_type' must be a device type without an index, such as 'cpu' or "
            f"'cuda', got '{name}'",
        )
    return device.type


def _is_autocast_dtype(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float64


def _is_eligible(tensor: Tensor, device_type: str | None) -> bool:
    return _is_autocast_dtype(tensor.dtype) and device_type in (None, tensor.device.type)


def _smart_cast(op: str, tensor: Tensor, dtype: torch.dtype, device_type: str | None) -> Tensor:
    check_supported(op, "self", tensor)
    device_type = _parse_device_type(op, device_type)
    if not _is_eligible(tensor, device_type) or tensor.dtype == dtype:
        return tensor
    check_castable(op, "self", tensor)
    return tensor.to(dtype)


def autocast_to_fp16(self: Tensor, *, device_type: str | None = None) -> Tensor:
    return _smart_cast("autocast_to_fp16", self, torch.float16, device_type)


def autocast_to_bf16(self: Tensor, *, device_type: str | None = None) -> Tensor:
    return _smart_cast("autocast_to_bf16", self, torch.bfloat16, device_type)


def autocast_to_reduced_precision(
    self: Tensor, dtype: torch.dtype, *, device_type: str | None = None
) -> Tensor:
    if not _is_autocast_dtype(dtype) or dtype == torch.float32:
        raise fail(
            "autocast_to_reduced_precision",
            "argument 'dtype' must be a floating dtype narrower than float32, such as "
            f"torch.float16 or torch.bfloat16, got {dtype}",
        )
    return _smart_cast("autocast_to_reduced_precision", self, dtype, device_type)


def autocast_to_full_precision(self: Tensor, *, device_type: str | None = None) -> Tensor:
    return _smart_cast("autocast_to_full_precision", self, torch.float32, device_type)


def promote(tensors: list[Tensor], *, device_type: str | None = None) -> list[Tensor]:
    device_type = _parse_device_type("promote", device_type)
    for tensor in tensors:
        check_supported("promote", "tensors", tensor)
    dtypes = {tensor.dtype for tensor in tensors if _is_eligible(tensor, device_type)}
    if len(dtypes) < 2:
        return list(tensors)
    narrow = [_is_eligible(t, device_type) and t.dtype != torch.float32 for t in tensors]
    for tensor in itertools.compress(tensors, narrow):
        check_castable("promote", "tensors", tensor)
    return [t.float() if cast else t for t, cast in zip(tensors, narrow, strict=True)]


def full_precision_dtype(
    self: Tensor, dtype: torch.dtype | None = None, *, device_type: str | None = None
) -> torch.dtype | None:
    if dtype is not None:
        return dtype
    check_supported("full_precision_dtype", "self", self)
    device_type = _parse_device_type("full_precision_dtype", device_type)
    return torch.float32 if _is_eligible(self, device_type) else None


def cast(self: Tensor, dtype: torch.dtype) -> Tensor:
    return self.to(dtype, copy=True)


def cast_each(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    check_multi_cast(tensors, dtype)
    return [tensor.to(dtype, copy=True) for tensor in tensors]


def check_multi_cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise fail(
            "multi_cast",
            f"argument 'dtype' must be a floating dtype, such as torch.bfloat16, got {dtype}",
        )
    for tensor in tensors:
        check_castable("multi_cast", "tensors", tensor)
    check_one_device(tensors)


def check_one_device(tensors: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        check_same_device("multi_cast", tensors, i, tensor)


def check_same_device(op: str, tensors: Sequence[Tensor], i: int, tensor: Tensor) -> None:
    """`tensor`: that at place `i`."""
    first = tensors[0].device
    if tensor.device != first:
        raise fail(
            op,
            f"argument 'tensors' must hold tensors on one device, got tensors[0] on {first} and "
            f"tensors[{i}] on {tensor.device}; call it once for each device",
        )


def check_floating(op: str, argument: str, i: int, tensor: Tensor) -> None:
    """`tensor`: that at place `i` in the list."""
    if not tensor.is_floating_point():
        raise fail(
            op,
            f"argument '{argument}' must hold floating tensors, got {tensor.dtype} for "
            f"{argument}[{i}]; leave it out, or call .float() on it first",
        )


def check_out(
    op: str, argument: str, tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor]
) -> None:
    """All that can be said without looking at memory, as for fake tensors."""
    if len(out) != len(tensors):
        raise fail(
            op,
            f"argument 'out' must hold as many tensors as '{argument}', {len(tensors)}, got "
            f"{len(out)}",
        )
    for i, (tensor, result) in enumerate(zip(tensors, out, strict=True)):
        check_castable(op, "out", result)
        name = f"argument 'out[{i}]' must"
        if result.dtype != dtype:
            raise fail(op, f"{name} have the dtype asked for, {dtype}, got {result.dtype}")
        if result.shape != tensor.shape:
            raise fail(
                op,
                f"{name} have the shape of '{argument}[{i}]', {tuple(tensor.shape)}, got "
                f"{tuple(result.shape)}; make it with torch.empty_like(tensor, dtype=dtype)",
            )
        if result.device != tensor.device:
            raise fail(
                op,
                f"{name} be on the device of '{argument}', {tensor.device}, got {result.device}; "
                "make it with torch.empty_like(tensor, dtype=dtype)",
            )
        if _may_overlap_itself(result):
            raise fail(
                op,
                f"{name} have memory of its own for every element, got the strides "
                f"{result.stride()} for the shape {tuple(result.shape)}; make it with "
                "torch.empty_like(tensor, dtype=dtype)",
            )


def _may_overlap_itself(tensor: Tensor) -> bool:
    """Whether strides do not tell that each element has a place of its own. Of sizes that are
    symbols, only that a dimension is expanded is seen."""
    dimensions = list(zip(tensor.stride(), tensor.shape, strict=True))
    if not all(isinstance(number, int) for dimension in dimensions for number in dimension):
        return any(
            isinstance(stride, int) and stride == 0 and isinstance(size, int) and size > 1
            for stride, size in dimensions
        )
    if 0 in tensor.shape:
        return False
    reach = 0  # of the dimensions so far
    for stride, size in sorted(dimension for dimension in dimensions if dimension[1] > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = address_of(tensor)
    return begin, begin + (last + 1) * tensor.element_size()


def check_no_overlap(
    op: str, read: Mapping[str, Sequence[Tensor] | Tensor], out: Sequence[Tensor]
) -> None:
    """`read`: the tensors, or the one, of each argument that is."""
    named = [
        (argument, argument if isinstance(tensors, Tensor) else f"{argument}[{i}]", tensor)
        for argument, tensors in {**read, "out": out}.items()
        for i, tensor in enumerate([tensors] if isinstance(tensors, Tensor) else tensors)
        if tensor.numel() > 0
    ]
    first, *_ = read
    reader = writer = (0, "", "")  # where the one ends that reaches furthest so far
    for begin, end, argument, name in sorted((*_byte_range(t), a, n) for a, n, t in named):
        written = argument == "out"
        if begin < writer[0]:
            other, one, two = (first if written else argument), writer[2], name
        elif written and begin < reader[0]:
            other, one, two = reader[1], name, reader[2]
        else:
            if written:
                writer = max(writer, (end, argument, name))
            else:
                reader = max(reader, (end, argument, name))
            continue
        raise fail(
            op,
            f"argument 'out' must not overlap with '{other}' or in itself, first byte to last, got "
            f"{one} and {two} in the same memory; pass tensors made with "
            "torch.empty_like(tensor, dtype=dtype)",
        )


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Of two tensors of one shape: whether each element of one is that of the other."""
    same = a.data_ptr() == b.data_ptr() and a.dtype == b.dtype
    return same and all(
        n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def check_multi_cast_out(
    tensors: Sequence[Tensor], dtype: torch.dtype, out: Sequence[Tensor]
) -> None:
    """All but overlaps."""
    check_multi_cast(tensors, dtype)
    check_out("multi_cast", "tensors", tensors, dtype, out)


def multi_cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    check_multi_cast(tensors, dtype)
    check_memory(*tensors)
    return [tensor.to(dtype, copy=True) for tensor in tensors]


def multi_cast_out(tensors: Sequence[Tensor], dtype: torch.dtype, *, out: Sequence[Tensor]) -> None:
    check_multi_cast_out(tensors, dtype, out)
    check_no_overlap("multi_cast", {"tensors": tensors}, out)
    for tensor, result in zip(tensors, out, strict=True):
        result.copy_(tensor)


def check_dtype_with_stats(dtype: torch.dtype) -> None:
    if dtype not in (torch.float16, torch.bfloat16):
        raise fail(
            "cast_with_stats",
            f"argument 'dtype' must be torch.float16 or torch.bfloat16, got {dtype}",
        )


def check_cast_with_stats(tensor: Tensor, dtype: torch.dtype) -> None:
    check_dtype_with_stats(dtype)
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise fail(
            "cast_with_stats",
            "argument 'tensor' must be float64, float32, float16 or bfloat16, got "
            f"{tensor.dtype}; convert it with .to(torch.float32)",
        )
    check_castable("cast_with_stats", "tensor", tensor)


def cast_with_stats(self: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    check_cast_with_stats(self, dtype)
    check_memory(self)
    result = self.to(dtype, copy=True)
    magnitude, nan = self.abs(), self.isnan()
    amax = magnitude.masked_fill(nan, 0).max() if self.numel() > 0 else magnitude.sum()
    counts = (
        (self.isfinite() & result.isinf()).sum(),
        (magnitude.gt(0) & result.eq(0)).sum(),
        nan.sum(),
    )
    return result, torch.stack([number.double() for number in (amax, *counts)])


# FuncTorchBatchedDecomposition is vmap's key: without it vmap refuses every schema with an alias.
_COMPOSITE = ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition")
_KERNELS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "autocast_to_fp16": (autocast_to_fp16, _COMPOSITE),
    "autocast_to_bf16": (autocast_to_bf16, _COMPOSITE),
    "autocast_to_reduced_precision": (autocast_to_reduced_precision, _COMPOSITE),
    "autocast_to_full_precision": (autocast_to_full_precision, _COMPOSITE),
    "promote": (promote, _COMPOSITE),
    "full_precision_dtype": (full_precision_dtype, _COMPOSITE),
    "cast": (cast, _COMPOSITE),
    "cast_each": (cast_each, _COMPOSITE),
    "multi_cast": (multi_cast, ("CompositeExplicitAutograd",)),
    "multi_cast.out": (multi_cast_out, ("CompositeExplicitAutograd",)),
}


def register() -> torch.library.Library:
    """Defines all ops of ``smart_autocast``; they live as long as the returned library."""
    library = torch.library.Library("smart_autocast", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    for name, (kernel, dispatch_keys) in _KERNELS.items():
        for key in dispatch_keys:
            library.impl(name, kernel, key)
    return library


_DENSE_ALONE = (
    "cast_with_stats",
    "multi_cast",
    "multi_cast.out",
    "stochastic_cast",
    "unscale_cast",
    "unscale_cast.out",
)


def refuse_nested(library: torch.library.Library) -> None:
    """Say what is wrong with nested tensors, which are no memory that a kernel of ours knows, on
    every tier. The smart casts take them, as autocast does."""
    for name in (*_DENSE_ALONE, "cast_each"):
        for key in ("AutogradNestedTensor", "NestedTensorCPU", "NestedTensorCUDA"):
            library.impl(name, functools.partial(_refuse_nested, name), key)


def _refuse_nested(name: str, *args: Any, **kwargs: Any) -> None:
    called = "multi_cast" if name == "cast_each" else name.partition(".")[0]
    op, _, overload = name.partition(".")
    overloads = getattr(torch.ops.smart_autocast, op)
    arguments = arguments_of(getattr(overloads, overload or "default"))
    given = dict(zip((argument.name for argument in arguments), args, strict=False))
    for argument, value in {**given, **kwargs}.items():
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, Tensor) and tensor.is_nested:
                raise fail(
                    called,
                    f"argument '{argument}' must be a dense tensor of real numbers, got a nested "
                    "tensor; pass tensor.values(), or cast it by tensor.to(dtype)",
                )
