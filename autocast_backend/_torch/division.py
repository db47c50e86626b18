"""Floor division and remainders of floats as ATen computes them, for Inductor.

    1.0 // 0.1                     9 in Python and in eager mode: 0.1 is a little more than a tenth
    floor(1.0 / 0.1)               10: the quotient is rounded (PyTorch #197895, Inductor)
    1.0 - floor(1.0 / 0.1) * 0.1   0, Inductor's remainder; 0.1 is that of eager mode

Kernels of ATen's divide what `fmod` leaves of a number, which is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .flags import rounds
from .modes import outside_of_modes
from .tables import named, put_decomposition

Operand = torch.Tensor | float

LOW_PRECISION = (torch.bfloat16, torch.float16)


@functools.cache
def register() -> None:
    """Put these into the table of what Inductor writes in other words."""
    for overload in ("Tensor", "Scalar", "Scalar_Tensor"):
        put_decomposition(named(f"remainder.{overload}"), _remainder)
    for overload in ("Tensor_mode", "Scalar_mode"):
        put_decomposition(named(f"div.{overload}"), _div)


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """A Python number as a tensor of floats has it, anything else as it is."""
    if not isinstance(value, int | float):
        return value
    with outside_of_modes():
        return torch.tensor(float(value), dtype=dtype, device="cpu").item()


def _remainder(original: Callable[..., Any], x: Operand, y: Operand) -> Any:
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point:
        return original(x, y)
    x, y = _in_float(_as(dtype, x), _as(dtype, y), dtype)
    rest, apart = _fmod(x, y)
    return torch.where(apart, rest + y, rest).to(dtype)


def _div(
    original: Callable[..., Any], x: Operand, y: Operand, *, rounding_mode: str | None = None
) -> Any:
    """(A divisor that is a number, or a tensor without dimensions, has all of its digits.)"""
    dtype = torch.result_type(x, y)
    if not (dtype.is_floating_point and rounding_mode):
        return original(x, y, rounding_mode=rounding_mode)
    # By tensors with dimensions, kernels round to low precision on the way.
    apart = isinstance(y, torch.Tensor) and y.dim() > 0
    x, y = _in_float(_as(dtype, x), y, dtype)
    if rounding_mode == "floor":
        return _floor_division(x, y, dtype if apart and rounds() else x.dtype).to(dtype)
    quotient = x / y
    return (quotient.to(dtype) if apart else quotient).trunc().to(dtype)


def _as(dtype: torch.dtype, x: Operand) -> Operand:
    """An operand with the digits that a tensor has of it."""
    return x.to(dtype) if isinstance(x, torch.Tensor) else rounded(x, dtype)


def _in_float(x: Operand, y: Operand, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Operands in the dtype that ATen computes in, the first one as a tensor."""
    if dtype in LOW_PRECISION:
        dtype = torch.float32
    if isinstance(y, torch.Tensor):
        y = y.to(dtype)
        if not isinstance(x, torch.Tensor):
            return torch.full((), x, dtype=dtype, device=y.device), y
    assert isinstance(x, torch.Tensor)
    if isinstance(y, torch.SymInt | torch.SymFloat):
        y = torch.scalar_tensor(y, dtype=dtype, device=x.device)
    return x.to(dtype), y


def _floor_division(x: torch.Tensor, y: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Computed in that of `x`, each number rounded to `dtype`."""

    def held(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).to(x.dtype)

    truly = held(x / y)
    rest, apart = _fmod(x, y)
    # Where the quotient is too large the CPU has no rest, and ATen does not ask for it.
    # (`&` would be taken for one of integers, as Inductor knows no bounds of `isinf`.)
    too_large = torch.logical_and(truly.isinf(), ~x.isinf())
    exact = torch.where(too_large, x, held(x - rest))
    quotient = held(exact / y)  # an integer, but for rounding
    quotient = torch.where(apart, held(quotient - 1), quotient)
    floor: Any = quotient.floor()
    floor = torch.where(quotient - floor > 0.5, held(floor + 1), floor)
    floor = torch.where(quotient == 0, torch.copysign(torch.zeros_like(truly), truly), floor)
    by_zero = y == 0
    if isinstance(by_zero, bool):
        return truly if by_zero else floor
    return torch.where(by_zero, truly, floor)


def _fmod(x: torch.Tensor, y: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """What a truncated quotient leaves, of the sign of x, and where its sign is not that of y."""
    rest = torch.fmod(x, y)
    return rest, (rest < 0) & (y > 0) | (rest > 0) & (y < 0)
