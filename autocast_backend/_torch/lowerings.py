"""Kernels of Inductor's that compute something else than ATen's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .flags import inductor_right

Lowering = Callable[..., Any]


@functools.cache
def register() -> None:
    """Put others in their place."""
    from torch._inductor import lowering

    aten = torch.ops.aten
    for pooling in ("avg_pool2d_backward", "avg_pool3d_backward"):
        of_aten = getattr(lowering, f"fallback_{pooling}")
        _put(getattr(aten, pooling).default, functools.partial(_average_pooling, of_aten))
    for name in ("amax", "amin", "argmax", "argmin", "max", "min"):
        _put(getattr(aten, name).default, _reduction_of_bytes)
    for name in ("max", "min"):
        _put(getattr(aten, name).dim, _reduction_of_bytes)


def _put(op: torch._ops.OpOverload, kernel: Callable[..., Any]) -> None:
    """Put a lowering, called with Inductor's own first, in its place."""
    from torch._inductor import lowering

    original = lowering.lowerings[op]

    @functools.wraps(original)
    def lower(*args: Any, **kwargs: Any) -> Any:
        if not inductor_right.on:
            return original(*args, **kwargs)
        return kernel(original, *args, **kwargs)

    lowering.lowerings[op] = lower


def _average_pooling(of_aten: Lowering, original: Lowering, *args: Any) -> Any:
    """ATen's gradient where a last window may stand out (PyTorch #198119): it is divided by less
    than the size of a window."""
    ceil_mode, count_include_pad = args[5:7]
    return (of_aten if ceil_mode and count_include_pad else original)(*args)


def _reduction_of_bytes(original: Lowering, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Reductions of int8 and uint8 in int32: the kernels of the CPU take zeros, which fill up what
    is not loaded of a vector, for elements (PyTorch #191499)."""
    from torch._inductor import lowering

    if (dtype := x.get_dtype()) not in (torch.int8, torch.uint8) or x.get_device().type != "cpu":
        return original(x, *args, **kwargs)
    results = original(lowering.to_dtype(x, torch.int32), *args, **kwargs)
    return pytree.tree_map(
        lambda r: lowering.to_dtype(r, dtype) if r.get_dtype() == torch.int32 else r, results
    )
