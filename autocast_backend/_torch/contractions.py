"""Products that ATen's kernels for the CPU add to something before they are rounded, for Inductor.

    torch.add(x, y, alpha=a)             fma(y, a, x)
    torch.addcmul(x, y, z, value=a)      fma(a * y, z, x)
    torch.lerp(x, y, a)                  fma(y - x, a, x), from a = 0.5 on fma(y - x, a - 1, y)
    tanh(x)'s gradient                   g * fma(-tanh(x), tanh(x), 1)

In some it is written, the others are contracted by the compiler that ATen is built with, for
processors with AVX2 or AVX512. Inductor rounds products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from .division import rounded
from .flags import inductor_right
from .tables import named, promoted_dtype, put_decomposition, put_lowering

_FLOATS = (torch.float32, torch.float64)


@functools.cache
def register() -> None:
    """Put kernels that do as ATen's do in the place of Inductor's."""
    from torch._inductor import lowering

    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        _contract()
    for name, sign in (("add", 1), ("sub", -1)):
        for overload in ("Tensor", "Scalar"):
            put_lowering(named(f"{name}.{overload}"), functools.partial(_sum, sign))
    put_lowering(named("addcmul.default"), functools.partial(_scaled_sum, True))
    if named("addcdiv.default") in lowering.lowerings:  # it has none in torch 2.11
        put_lowering(named("addcdiv.default"), functools.partial(_scaled_sum, False))
    for overload in ("Scalar", "Tensor"):
        put_decomposition(named(f"lerp.{overload}"), _interpolation)
    for name, gradient in (
        ("mish_backward", _gradient_of_mish),
        ("sigmoid_backward", _gradient_of_sigmoid),
        ("silu_backward", _gradient_of_silu),
        ("tanh_backward", _gradient_of_tanh),
    ):
        op = named(f"{name}.default")
        put_decomposition(op, _kept)
        lowering.register_lowering(op, broadcast=True)(functools.partial(_elementwise, gradient))


def _contract() -> None:
    """Elsewhere `ops.fma` is a product and a sum."""
    from torch._inductor.codegen import cpp

    def put(Overrides: Any, function: str) -> None:
        original = Overrides.fma

        @functools.wraps(original)
        def fma(x: Any, y: Any, z: Any) -> Any:
            return f"{function}({x}, {y}, {z})" if inductor_right.on else original(x, y, z)

        Overrides.fma = staticmethod(fma)

    put(cpp.CppOverrides, "std::fma")
    put(cpp.CppVecOverrides, "at::vec::fmadd")


def _elementwise(function: Callable[..., Any], *operands: Any) -> Any:
    """What a function of numbers and a dtype gives, in the dtype of all operands."""
    from torch._inductor import lowering

    dtype = promoted_dtype(o for o in operands if hasattr(o, "get_dtype"))
    tensors = iter(
        lowering.broadcast_tensors(
            *(lowering.to_dtype(o, dtype) for o in operands if hasattr(o, "get_dtype"))
        )
    )
    operands = tuple(next(tensors) if hasattr(o, "get_dtype") else o for o in operands)
    return lowering.make_pointwise(functools.partial(function, dtype))(*operands)


def _fma(_: torch.dtype, x: Any, y: Any, z: Any) -> Any:
    from torch._inductor.virtualized import ops

    return ops.fma(x, y, z)


def _is_of_the_cpu(*operands: Any) -> bool:
    tensors = [o for o in operands if hasattr(o, "get_dtype")]
    on_cpu = all(t.get_device().type == "cpu" for t in tensors)
    return on_cpu and promoted_dtype(tensors) in _FLOATS


def _sum(sign: int, original: Callable[..., Any], x: Any, y: Any, alpha: Any = 1) -> Any:
    if alpha == 1 or not _is_of_the_cpu(x, y):
        return original(x, y, alpha=alpha)
    return _elementwise(_fma, y, sign * alpha, x)


def _scaled_sum(
    product: bool, original: Callable[..., Any], x: Any, y: Any, z: Any, *, value: Any = 1
) -> Any:
    """With a product or a quotient, of which the first operand is scaled."""
    if not _is_of_the_cpu(x, y, z):
        return original(x, y, z, value=value)
    scaled = _times(y, value)
    return _elementwise(_fma, scaled, z, x) if product else original(x, scaled, z)


def _times(y: Any, value: Any) -> Any:
    from torch._inductor import lowering

    return y if value == 1 else lowering.mul(y, value)


def _interpolation(
    original: Callable[..., Any], start: torch.Tensor, end: torch.Tensor, weight: Any
) -> Any:
    """From the nearer one. (Before torch 2.13 Inductor has other formulas, and the weight, a Python
    number, in float64 after that.)"""
    if start.device.type != "cpu" or start.dtype not in _FLOATS:
        return original(start, end, weight)
    memory_format = suggest_memory_format(start)
    if memory_format != torch.contiguous_format and end.dim() == start.dim():
        # That of the result.
        end = end.contiguous(memory_format=memory_format)
    if not isinstance(weight, torch.Tensor):
        weight = rounded(weight, start.dtype)
        if abs(weight) < 0.5:
            return torch.add(start, end - start, alpha=weight)
        return torch.add(end, end - start, alpha=weight - 1)
    is_near = weight.abs() < 0.5
    factor = torch.where(is_near, weight, weight - 1)
    return torch.addcmul(torch.where(is_near, start, end), factor, end - start)


def _kept(original: Callable[..., Any], upstream: torch.Tensor, y: torch.Tensor) -> Any:
    if upstream.device.type == "cpu" and upstream.dtype == y.dtype and y.dtype in _FLOATS:
        return NotImplemented
    return original(upstream, y)


def _gradient_of_sigmoid(dtype: torch.dtype, upstream: Any, y: Any) -> Any:
    from torch._inductor.virtualized import ops

    return ops.mul(ops.mul(upstream, ops.sub(ops.constant(1, dtype), y)), y)


def _gradient_of_tanh(dtype: torch.dtype, upstream: Any, y: Any) -> Any:
    from torch._inductor.virtualized import ops

    return ops.mul(upstream, ops.fma(ops.neg(y), y, ops.constant(1, dtype)))


def _gradient_of_silu(dtype: torch.dtype, upstream: Any, x: Any) -> Any:
    from torch._inductor.virtualized import ops

    one = ops.constant(1, dtype)
    sigmoid = ops.sigmoid(x)
    return ops.mul(ops.mul(upstream, sigmoid), ops.fma(x, ops.sub(one, sigmoid), one))


def _gradient_of_mish(dtype: torch.dtype, upstream: Any, x: Any) -> Any:
    from torch._inductor.virtualized import ops

    one = ops.constant(1, dtype)
    y = ops.tanh(ops.log1p(ops.exp(x)))
    slope = ops.fma(ops.mul(x, ops.sigmoid(x)), ops.fma(ops.neg(y), y, one), y)
    return ops.mul(upstream, slope)
