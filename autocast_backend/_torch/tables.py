"""Inductor's tables: what it writes in other words (decompositions), and kernels (lowerings)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from .flags import inductor_right

Function = Callable[..., Any]


def put_lowering(op: OpOverload, kernel: Function) -> None:
    """Put a lowering, called with Inductor's own first, in its place."""
    from torch._inductor import lowering

    lowering.lowerings[op] = _with_original(lowering.lowerings[op], kernel)


def put_decomposition(op: OpOverload, words: Function) -> None:
    """Put a decomposition, called with Inductor's own first, in its place."""
    from torch._inductor import decomposition

    decomposition.decompositions[op] = _with_original(decomposition.decompositions[op], words)
    decomposition.fast_random_decomps.cache_clear()


def _with_original(original: Function, function: Function) -> Function:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not inductor_right.on:
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    return called
