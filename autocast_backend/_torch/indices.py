"""Tensors of indices, which Inductor computes with as expressions.

    torch.arange(8).bool()                   all true in a vector of which the first one is
    torch.arange(600).to(torch.uint8).int()  i, not i % 256
    torch.arange(600).bfloat16().float()     i, not i rounded
    torch.full((2, 2), 0.1).bfloat16()       0.1, not 0.1 rounded

An expression has no end and is exact. So it may stand for a tensor only where the dtype of that one
holds all that it may be.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .division import rounded
from .flags import inductor_right

_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
"""Of the significand: integers up to two to the power of that are exact."""


@functools.cache
def register() -> None:
    """Have expressions end where the dtype does."""
    _compute_what_no_dtype_holds()
    _count_in_64_bits()


def _compute_what_no_dtype_holds() -> None:
    from torch._inductor.index_propagation import IndexPropagation, IndexPropVar

    Propagation: Any = IndexPropagation
    original = Propagation._default

    def propagate(self: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(self, name, args, kwargs)
        computed = isinstance(result, IndexPropVar) and result.is_symbolic and name != "constant"
        if not inductor_right.on or not computed or _holds(self, result.value):
            return result
        if name != "index_expr":
            return self.fallback(name, args, kwargs)
        wide = self.wrap(self._inner.index_expr(result.value.expr, torch.int64))
        return self.fallback("to_dtype", (wide, result.value.dtype), {})

    Propagation._default = propagate


def _holds(propagation: Any, value: Any) -> bool:
    """Whether its dtype holds all that an expression may be."""
    from torch.utils._sympy.value_ranges import bound_sympy

    dtype = value.dtype
    if dtype == torch.int64 or dtype.is_complex:
        return True
    if value.is_constant():  # of integers and bools it ends where they do
        return not dtype.is_floating_point or rounded(float(value.expr), dtype) == value.expr
    if dtype == torch.bool:
        least, most = 0, 1
    elif dtype.is_floating_point:
        most = 2 ** _DIGITS.get(dtype, 0)
        least = -most
    else:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    bounds = bound_sympy(value.expr, dict(propagation.var_to_range))
    return bool(bounds.lower >= least and bounds.upper <= most)


def _count_in_64_bits() -> None:
    """What is counted with steps that 32 bits hold (PyTorch #175966): their products may not be."""
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.codegen.cpp_utils import cexpr_index

    Kernel: Any = CppVecKernel
    original = Kernel.arange

    def arange(self: Any, index: Any, stride: Any) -> Any:
        return original(self, index, cexpr_index(stride) if inductor_right.on else stride)

    Kernel.arange = arange
