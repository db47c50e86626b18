"""What Inductor writes in other words that give other numbers, or dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .flags import inductor_right
from .tables import put_decomposition


@functools.cache
def register() -> None:
    """Have Inductor leave them as they are."""
    _keep_products_with_zero()
    _keep_sums_in_their_dtype()
    put_decomposition(torch.ops.aten.addmm.default, _keep_what_is_not_read)
    _keep_signs_of_indices()


def _keep_products_with_zero() -> None:
    """`x * 0` is NaN where x is, or where x is infinite (PyTorch #186281)."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    original = Folder._add_peephole_patterns

    def add_peephole_patterns(self: Any) -> None:
        original(self)
        if not inductor_right.on:
            return
        for node in [n for n in self.node_replacements if _may_be_nan(n)]:
            for of_nodes in (
                self.node_replacements,
                self.node_replacements_shapes,
                self.constant_data_ptrs,
            ):
                del of_nodes[node]

    Folder._add_peephole_patterns = add_peephole_patterns  # type: ignore[method-assign]


def _may_be_nan(product: fx.Node) -> bool:
    dtype = product.meta["val"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _keep_sums_in_their_dtype() -> None:
    """`ones.cumsum(0, dtype=d)` has dtype d, not that of the ones (PyTorch #189518)."""
    from torch._inductor.fx_passes import post_grad

    cumsum = torch.ops.aten.cumsum.default
    for entry in post_grad.pass_patterns[1].patterns["call_function", cumsum]:
        entry.extra_check = functools.partial(_has_no_dtype, entry.extra_check)


def _has_no_dtype(check: Callable[[Any], bool], match: Any) -> bool:
    asked = match.output_node().kwargs.get("dtype")
    return check(match) and not (inductor_right.on and asked is not None)


def _keep_what_is_not_read(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`addmm` with `beta=0` does not read what it would add to, which may be NaN."""
    return NotImplemented if kwargs.get("beta", 1) == 0 else original(*args, **kwargs)


def _keep_signs_of_indices() -> None:
    """`(a + m * d) // d % m` is `a // d % m`, as C computes it, where a is not negative. (PyTorch
    #187027, of changing sizes; fixed in torch 2.15.) SymPy keeps what this gives, for all threads:
    it is put right for other backends, too."""
    import sympy
    from sympy.core.cache import clear_cache
    from torch.utils._sympy.functions import ModularIndexing

    original = ModularIndexing.eval.__func__  # type: ignore[attr-defined]

    def evaluate(cls: Any, base: Any, divisor: Any, modulus: Any) -> Any:
        result = original(cls, base, divisor, modulus)
        is_sum = isinstance(base, sympy.Add) and not all(term.is_nonnegative for term in base.args)
        if result is None or not is_sum or modulus == 1 or sympy.gcd(base, divisor) != 1:
            return result
        whole = modulus * divisor
        left = [term for term in base.args if sympy.gcd(term, whole) != whole]
        return result if all(term.is_nonnegative for term in left) else None

    ModularIndexing.eval = classmethod(evaluate)  # type: ignore[assignment]
    clear_cache()
