"""The Triton tier: the ops on devices for which no native library is there.

Importing this does not import Triton; the first call of an op does.
"""

from __future__ import annotations

import torch

from . import ops
from .launches import OLDEST_CAPABILITY

KERNELS = {
    "multi_cast": ops.multi_cast,
    "multi_cast.out": ops.multi_cast_out,
    "cast_with_stats": ops.cast_with_stats,
    "unscale_cast": ops.unscale_cast,
    "unscale_cast.out": ops.unscale_cast_out,
    "stochastic_cast": ops.stochastic_cast,
}


def register(library: torch.library.Library, dispatch_key: str) -> None:
    """Registers all of the tier's kernels for a device; the ops must be defined already."""
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, dispatch_key)


__all__ = ["KERNELS", "OLDEST_CAPABILITY", "register"]
