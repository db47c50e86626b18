"""What Inductor makes of an op of ATen."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def zero_tensors_have_memory() -> None:
    """Have Inductor make zeros where forward-mode AD leaves `aten._efficientzerotensor` in a graph,
    for good. Otherwise its code calls that op, whose result has no memory: kernels then read from
    address 0, and where they are not Inductor's, they mostly raise."""
    from torch._inductor.lowering import fallbacks, lowerings

    aten = torch.ops.aten
    op = aten._efficientzerotensor.default

    def zeros(size: Any, *, dtype: torch.dtype, device: torch.device, **_: Any) -> Any:
        return lowerings[aten.full.default](size, 0, dtype=dtype, device=device)

    fallbacks.discard(op)
    lowerings[op] = zeros
