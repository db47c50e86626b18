"""``smart_autocast::unscale_cast`` for the compiler, autograd and vmap, and without a kernel.

What it computes is the comment at its schema, in ``csrc/ops/unscale_cast.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import register_autograd_kernel
from . import reference
from .reference import (
    check_castable,
    check_floating,
    empty_batch,
    fail,
    refuse_derivatives,
)

_OP = "unscale_cast"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Unscaled = tuple[list[Tensor], Tensor]


def check(grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype) -> None:
    check_dtype(dtype)
    if scale is None or scale.layout != torch.strided:
        check_castable(_OP, "scale", scale)
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise fail(
            _OP,
            "argument 'scale' must be a float32 tensor of one element, such as "
            f"torch.tensor(65536.0, device=grads[0].device), got {scale.numel()} of {scale.dtype}",
        )
    for i, grad in enumerate(grads):
        check_castable(_OP, "grads", grad)
        check_floating(_OP, "grads", i, grad)
        if grad.device != scale.device:
            raise fail(
                _OP,
                f"argument 'grads' must hold tensors on the device of 'scale', {scale.device}, got "
                f"grads[{i}] on {grad.device}; call it once for each device, with scale.to(device)",
            )


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise fail(
            _OP,
            "argument 'dtype' must be torch.float32, torch.float64, torch.float16 or "
            f"torch.bfloat16, got {dtype}",
        )


def check_out(
    grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, out: Sequence[Tensor]
) -> None:
    _check_out_but_overlaps(grads, scale, dtype, out)
    none = scale.new_empty(0)  # in the place of a gradient that is written where it is
    others = [
        none if reference.is_same_memory(g, o) else g for g, o in zip(grads, out, strict=True)
    ]
    reference.check_no_overlap(_OP, {"grads": others, "scale": scale}, out)


def _check_out_but_overlaps(
    grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, out: Sequence[Tensor]
) -> None:
    check(grads, scale, dtype)
    reference.check_out(_OP, "grads", grads, dtype, out)


def inverse_of(scale: Tensor) -> Tensor:
    """What gradients are multiplied with: float32, of no dimensions."""
    return scale.double().reciprocal().float().reshape(())


def unscale_cast(grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype) -> Unscaled:
    check(grads, scale, dtype)
    reference.check_memory(*grads, scale)
    inverse = inverse_of(scale)
    found = scale.new_zeros(())
    results = []
    for grad in grads:
        narrow = grad.to(dtype, copy=True)
        found = torch.maximum(found, narrow.isfinite().all().logical_not().float())
        wide = narrow if dtype == torch.float64 else narrow.float()
        results.append(wide.mul(inverse).to(dtype))
    return results, found


def unscale_cast_out(
    grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *, out: Sequence[Tensor]
) -> Tensor:
    check_out(grads, scale, dtype, out)
    results, found = unscale_cast(grads, scale, dtype)
    for result, tensor in zip(results, out, strict=True):
        tensor.copy_(result)
    return found


def _fake(grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype) -> Unscaled:
    check(grads, scale, dtype)
    return [torch.empty_like(grad, dtype=dtype) for grad in grads], scale.new_empty(())


def _fake_out(
    grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, *, out: Sequence[Tensor]
) -> Tensor:
    _check_out_but_overlaps(grads, scale, dtype, out)
    return scale.new_empty(())


def autograd(
    below: Callable[..., Unscaled], grads: Sequence[Tensor], scale: Tensor, dtype: torch.dtype
) -> Unscaled:
    """What autograd calls; `below` is the op without autograd."""
    refuse_derivatives(_OP, grads, scale)
    return below(grads, scale, dtype)


def autograd_out(
    below: Callable[..., Tensor],
    grads: Sequence[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
    *,
    out: Sequence[Tensor],
) -> Tensor:
    """The same for the form with `out`."""
    refuse_derivatives(_OP, grads, scale, out)
    found = below(grads, scale, dtype, out=out)
    torch.autograd.graph.increment_version(out)
    return found


def _vmap(
    info: Any,
    in_dims: tuple[list[int | None], int | None, None],
    grads: Sequence[Tensor],
    scale: Tensor,
    dtype: torch.dtype,
) -> tuple[Unscaled, tuple[list[int], int]]:
    """One call for each example: each has its own `found_inf`."""
    if info.batch_size == 0:
        found = scale.new_empty(0)
        return (empty_batch(grads, in_dims[0], dtype), found), ([0] * len(grads), 0)

    def one(tensor: Tensor, dim: int | None, index: int) -> Tensor:
        return tensor if dim is None else tensor.select(dim, index)

    op = torch.ops.smart_autocast.unscale_cast.default
    calls = [
        op(
            [one(grad, dim, i) for grad, dim in zip(grads, in_dims[0], strict=True)],
            one(scale, in_dims[1], i),
            dtype,
        )
        for i in range(info.batch_size)
    ]
    results = [
        torch.stack(list(of_one)) for of_one in zip(*(call[0] for call in calls), strict=True)
    ]
    return (results, torch.stack([call[1] for call in calls])), ([0] * len(results), 0)


def register(library: torch.library.Library) -> None:
    """Registers all of it; the op must be defined already."""
    library.impl(_OP, unscale_cast, "CompositeExplicitAutograd")
    library.impl(f"{_OP}.out", unscale_cast_out, "CompositeExplicitAutograd")
    torch.library.register_fake(f"smart_autocast::{_OP}", _fake)
    torch.library.register_fake(f"smart_autocast::{_OP}.out", _fake_out)
    register_autograd_kernel(_OP, autograd)
    register_autograd_kernel(f"{_OP}.out", autograd_out, mutates=True)
    torch.library.register_vmap(f"smart_autocast::{_OP}", _vmap)
