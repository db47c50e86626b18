"""What Inductor rounds to bfloat16 and float16 once where eager mode does twice, or the reverse.

With `emulate_precision_casts` it rounds the result of each op inside of its kernels. What is here
are the ops that it makes of others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .flags import inductor_right

_ROUNDED = (torch.bfloat16, torch.float16)


@functools.cache
def register() -> None:
    """Have it round, where it is told to, what eager mode rounds."""
    _keep_roundings()
    _keep_products_apart_from_sums()
    _keep_casts()


def _rounds() -> bool:
    from torch._inductor import config

    return inductor_right.on and config.emulate_precision_casts


def _keep_products_apart_from_sums() -> None:
    """`a @ b + c` is rounded twice; as `addmm`, once."""
    from torch._inductor.fx_passes import post_grad

    for entry in post_grad.pass_patterns[2].patterns["call_function", torch.ops.aten.add.Tensor]:
        if entry.extra_check is post_grad.is_valid_addmm_fusion:
            entry.extra_check = functools.partial(_rounds_once, entry.extra_check)


def _rounds_once(check: Callable[[Any], bool], match: Any) -> bool:
    low = match.output_node().meta["val"].dtype in _ROUNDED
    return check(match) and not (low and _rounds())


def _keep_casts() -> None:
    """Before torch 2.13 `x.bfloat16().float()` of a float32 is x."""
    from torch._inductor.fx_passes import joint_graph

    convert = torch.ops.prims.convert_element_type.default
    for entry in joint_graph.patterns.patterns["call_function", convert]:
        entry.extra_check = functools.partial(_says_nothing, entry.extra_check)


def _says_nothing(check: Callable[[Any], bool], match: Any) -> bool:
    """Whether a cast changes no number."""
    wider = match.kwargs["arg"].meta["val"].dtype not in _ROUNDED
    return check(match) and not (wider and match.kwargs["dtype1"] in _ROUNDED and _rounds())


def _keep_roundings() -> None:
    """Before torch 2.13 the CPU's kernels take a float32 that was rounded, and is converted back,
    for the one before, though that is what they are told not to do."""
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    def put(Overrides: Any) -> None:
        original = Overrides.to_dtype

        def to_dtype(
            x: Any, dtype: Any, src_dtype: Any = None, use_compute_types: Any = True
        ) -> Any:
            if not inductor_right.on or (use_compute_types and not _rounds()):
                return original(x, dtype, src_dtype, use_compute_types)
            V.kernel.cache_dtype_convert = lambda *_: None
            try:
                return original(x, dtype, src_dtype, use_compute_types)
            finally:
                del V.kernel.cache_dtype_convert

        Overrides.to_dtype = staticmethod(to_dtype)

    put(cpp.CppOverrides)
    put(cpp.CppVecOverrides)
