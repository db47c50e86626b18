"""``smart_autocast::multi_cast`` for the compiler and for autograd.

The op itself is in ``csrc/ops/multi_cast.cpp`` (or ``reference.py``).

With gradients on, tensors that require grad are cast by ``aten::to``, each on its own (the op
``cast_each``), and the rest in one pass. So every tensor has its own autograd node: a frozen
tensor's result requires no grad, an absent gradient stays None, and no gradient waits for those of
other tensors. One node for all of them, such as ``torch.library.register_autograd`` makes, would be
none of that, and slower. Where tensors do not tell whether they are differentiated, in transforms
of ``torch.func`` and forward-mode AD, ``aten::to`` casts all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import (
    any_requires_grad,
    any_tangent,
    is_transformed,
    register_autograd_kernel,
)
from . import reference

_NAME = "smart_autocast::multi_cast"


def _fake(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    reference.check_multi_cast(tensors, dtype)
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def _fake_out(tensors: list[Tensor], dtype: torch.dtype, *, out: list[Tensor]) -> None:
    reference.check_multi_cast_out(tensors, dtype, out)


def autograd(
    below: Callable[..., list[Tensor]], tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """What autograd calls; `below` is the op without autograd."""
    if not (torch.is_grad_enabled() and any_requires_grad(tensors)):
        return below(tensors, dtype)
    cast_each = torch.ops.smart_autocast.cast_each.default
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if len(trained) == len(tensors):
        return cast_each(trained, dtype)
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    if trained[0].device != frozen[0].device:  # of each of the two lists, the ops ask
        reference.check_one_device(tensors)
    with_grad, without = iter(cast_each(trained, dtype)), iter(below(frozen, dtype))
    return [next(with_grad if tensor.requires_grad else without) for tensor in tensors]


def _autograd(
    below: Callable[..., list[Tensor]], tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    if is_transformed():
        return torch.ops.smart_autocast.cast_each.default(tensors, dtype)
    return autograd(below, tensors, dtype)


def autograd_out(
    below: Callable[..., None],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    out: Sequence[Tensor],
) -> None:
    """The same for the form with `out`."""
    if torch.is_grad_enabled() and any_requires_grad(tensors, out):
        raise RuntimeError(
            "smart_autocast::multi_cast: argument 'out' takes no gradients, but a tensor requires "
            "grad; call it under torch.no_grad(), or without 'out'"
        )
    if any_tangent(tensors, out):
        raise RuntimeError(
            "smart_autocast::multi_cast: argument 'out' takes no derivatives, but a tensor has a "
            "tangent (forward-mode AD); call it without 'out'"
        )
    write(below, tensors, dtype, out=out)


def write(
    below: Callable[..., None],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    out: Sequence[Tensor],
) -> None:
    """The same where nothing is differentiated."""
    below(tensors, dtype, out=out)
    torch.autograd.graph.increment_version(out)


def _vmap(
    info: Any, in_dims: tuple[list[int | None], None], tensors: list[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[int | None]]:
    return torch.ops.smart_autocast.multi_cast.default(tensors, dtype), in_dims[0]


def register() -> None:
    """Registers all of it; the op must be defined already."""
    torch.library.register_fake(_NAME, _fake)
    torch.library.register_fake(f"{_NAME}.out", _fake_out)
    register_autograd_kernel("multi_cast", _autograd)
    register_autograd_kernel("multi_cast.out", autograd_out, mutates=True)
    torch.library.register_vmap(_NAME, _vmap)
