"""The ops of ``smart_autocast``: importing this registers them, native where that is possible.

The functions here are the public ones; ``torch.ops.smart_autocast`` has all ops of ``schemas.py``.
"""

from __future__ import annotations

import torch

from .. import _native
from . import (
    _cast_with_stats,
    _multi_cast,
    _stochastic_cast,
    _unscale_cast,
    reference,
    schemas,
)

KERNEL_TIER = _native.load()
"""The kernels in use, an ``autocast_backend._native.KernelTier``."""

if KERNEL_TIER.name == "native":
    schemas.check_registered()
    _library = torch.library.Library("smart_autocast", "FRAGMENT")
else:
    _library = reference.register()
reference.refuse_nested(_library)
_cast_with_stats.register(_library)
_multi_cast.register()
_stochastic_cast.register(_library)
_unscale_cast.register(_library)
for _device_type, _tier in KERNEL_TIER.devices.items():
    if _tier.name == "triton":
        from . import triton

        triton.register(_library, _device_type.upper())
if KERNEL_TIER.devices["cuda"].name != "reference":
    from . import gpus

    gpus.watch(KERNEL_TIER, _library)

# After the ops exist: these functions look them up when they are imported.
from .casts import CastStats, UnscaledGrads, cast_with_stats, multi_cast, unscale_cast  # noqa: E402
from .smart_casts import (  # noqa: E402
    autocast_to_bf16,
    autocast_to_fp16,
    autocast_to_full_precision,
    autocast_to_reduced_precision,
    promote,
)


def kernels() -> _native.KernelTier:
    """The tier of kernels in use, why it is that one, and what it was built with; its ``devices``
    has the tier of each device type, and why.

    What GPUs there are is looked at when CUDA is initialised (``torch.cuda.init()``): a tier that
    does not run on all of them is replaced by the next one then, with a warning.

    ``SMART_AUTOCAST_KERNELS=native``, ``triton`` or ``reference`` forces one when the package is
    first used; one that is not there is an error then, with the reason, and one that does not run
    on the GPUs is an error when CUDA is initialised.
    """
    return KERNEL_TIER


__all__ = [
    "KERNEL_TIER",
    "CastStats",
    "UnscaledGrads",
    "autocast_to_bf16",
    "autocast_to_fp16",
    "autocast_to_full_precision",
    "autocast_to_reduced_precision",
    "cast_with_stats",
    "kernels",
    "multi_cast",
    "promote",
    "unscale_cast",
]
