"""``smart_autocast::multi_cast`` for the compiler and for autograd.

The op itself is in ``csrc/ops/multi_cast.cpp`` (or ``reference.py``).

With gradients on, a tensor that requires grad is cast by ``aten::to`` and the rest in one pass. So
every tensor has its own autograd node: a frozen tensor's result requires no grad, an absent
gradient stays None, and no gradient waits for those of other tensors. One node for all of them,
such as ``torch.library.register_autograd`` makes, would be none of that, and slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import any_requires_grad, register_autograd_kernel
from . import reference

_NAME = "smart_autocast::multi_cast"


def _fake(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    reference.check_multi_cast(tensors, dtype)
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def _fake_out(tensors: list[Tensor], dtype: torch.dtype, *, out: list[Tensor]) -> None:
    reference.check_multi_cast_out(tensors, dtype, out)


def _autograd(
    below: Callable[..., list[Tensor]], tensors: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    if not (torch.is_grad_enabled() and any_requires_grad(tensors)):
        return below(tensors, dtype)
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    cast = iter(below(frozen, dtype) if frozen else [])
    return [
        tensor.to(dtype, copy=True) if tensor.requires_grad else next(cast) for tensor in tensors
    ]


def _autograd_out(
    below: Callable[..., None], tensors: list[Tensor], dtype: torch.dtype, *, out: list[Tensor]
) -> None:
    if torch.is_grad_enabled() and any_requires_grad(tensors, out):
        raise RuntimeError(
            "smart_autocast::multi_cast: argument 'out' takes no gradients, but a tensor requires "
            "grad; call it under torch.no_grad(), or without 'out'"
        )
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
    register_autograd_kernel("multi_cast.out", _autograd_out, mutates=True)
    torch.library.register_vmap(_NAME, _vmap)
