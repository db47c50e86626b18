"""Functions of numbers, near 0 and far from it: Inductor's vectors lose what ATen's have.

expm1(1e-9)      1e-9; 0 as exp(1e-9) - 1 (fixed in torch 2.15), and elu, selu, celu of -1e-9
atanh(1e-9)      1e-9; 0 as log((1 + 1e-9) / (1 - 1e-9)) / 2
erf(1e-9)        1.1e-9; 0 by a formula that is good enough for gelu
acosh(1e20)      46.7; inf, because of a square
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from .flags import inductor_right
from .tables import named, put_lowering


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


def _put(Overrides: Any, name: str) -> None:
    original = getattr(Overrides, name)

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
