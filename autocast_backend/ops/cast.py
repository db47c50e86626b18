"""``smart_autocast::cast`` for the compiler: its fake, autograd and vmap registrations.

The op itself is in ``csrc/ops/cast.cpp`` (or ``reference.py``). The smart casts need nothing of the
kind: they are composite. ``torch.func.grad`` takes no op that is registered this way (a limit of
``torch.library``, 2.13); ``vmap`` and ordinary autograd do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NAME = "smart_autocast::cast"


def _fake(self: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(self, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad.to(ctx.dtype), None


def _vmap(
    info: Any, in_dims: tuple[int | None, None], self: Tensor, dtype: torch.dtype
) -> tuple[Tensor, int | None]:
    return torch.ops.smart_autocast.cast.default(self, dtype), in_dims[0]


def register() -> None:
    """Registers all three; the op must be defined already."""
    torch.library.register_fake(_NAME, _fake)
    torch.library.register_autograd(_NAME, _backward, setup_context=_setup_context)
    torch.library.register_vmap(_NAME, _vmap)
