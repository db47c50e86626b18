"""Functions of numbers of which Inductor's kernels for the CPU lose what ATen's have.

expm1(1e-9)             1e-9; 0 as exp(1e-9) - 1 (fixed in torch 2.15); so elu, selu, celu
atanh(1e-9)             1e-9; 0 as log((1 + 1e-9) / (1 - 1e-9)) / 2
erf(1e-9)               1.1e-9; 0 by a formula that is good enough for gelu
acosh(1e20)             46.7; infinite, because of a square
round(x, decimals=2)    round(x * 100) / 100; round(x * 100) * 0.01, in the dtype of x
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from .flags import inductor_right
from .tables import named, put_decomposition, put_lowering


@functools.cache
def register() -> None:
    """Put functions that do not in the place of Inductor's."""
    from torch._inductor import lowering
    from torch._inductor.codegen import cpp

    for name in ("expm1", "atanh"):
        _put(cpp.CppVecOverrides, name)
    for name in ("erf.default", "acosh.default"):
        op = named(name)
        of_aten = lowering.fallback_handler(op, add_to_fallback_set=False)
        put_lowering(op, functools.partial(_left_to_aten, op, of_aten))
    put_decomposition(named("round.decimals"), _rounded)


def _put(Overrides: Any, name: str) -> None:
    original = getattr(Overrides, name)

    @functools.wraps(original)  # of one number, that of this name of the class above is called
    def function(x: Any) -> Any:
        return f"{x}.{name}()" if inductor_right.on else original(x)

    setattr(Overrides, name, staticmethod(function))


def _left_to_aten(
    op: OpOverload, of_aten: Callable[..., Any], original: Callable[..., Any], x: Any
) -> Any:
    """Where a program calls it. (In gelu, which is written with it, the other `erf` will do.)"""
    from torch._inductor.virtualized import V

    is_called = str(V.graph.current_node.meta.get("original_aten")) == str(op)
    on_cpu = x.get_device().type == "cpu" and x.get_dtype().is_floating_point
    return (of_aten if is_called and on_cpu else original)(x)


def _rounded(original: Callable[..., Any], x: torch.Tensor, *, decimals: int) -> Any:
    """In float32 if x is float16, of which `x * 1000` may be infinite, or bfloat16."""
    if x.device.type != "cpu" or not x.dtype.is_floating_point:
        return original(x, decimals=decimals)
    y, scale = x.to(torch.promote_types(x.dtype, torch.float32)), 10.0 ** abs(decimals)
    y = (y / scale).round() * scale if decimals < 0 else (y * scale).round() / scale
    return y.to(x.dtype)
