"""smart_autocast: mixed precision as a property of the graph.

    model = torch.compile(model, backend="smart_autocast")

needs no import of this package. What it exports is loaded on first use, so that importing it costs
next to nothing: `import torch` does, for `TORCH_LOGS="+smart_autocast"` and `torch.ops` to know us.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import smart_autocast
    from .backward.ambient import BackwardAutocastError, BackwardAutocastWarning, BackwardError
    from .custom_ops import CustomOpWarning
    from .explaining import CastReport, explain
    from .lowering.standalone import lower_autocast
    from .ops import (
        CastStats,
        UnscaledGrads,
        autocast_to_bf16,
        autocast_to_fp16,
        autocast_to_full_precision,
        autocast_to_reduced_precision,
        cast_with_stats,
        kernels,
        multi_cast,
        promote,
        unscale_cast,
    )
    from .state import AutocastState
    from .weights import clear_weight_cache, weight_cache_info

_HOMES = {
    "CastReport": "explaining",
    "CastStats": "ops",
    "AutocastState": "state",
    "BackwardAutocastError": "backward.ambient",
    "BackwardAutocastWarning": "backward.ambient",
    "BackwardError": "backward.ambient",
    "CustomOpWarning": "custom_ops",
    "UnscaledGrads": "ops",
    "autocast_to_bf16": "ops",
    "autocast_to_fp16": "ops",
    "autocast_to_full_precision": "ops",
    "autocast_to_reduced_precision": "ops",
    "clear_weight_cache": "weights",
    "explain": "explaining",
    "kernels": "ops",
    "lower_autocast": "lowering.standalone",
    "cast_with_stats": "ops",
    "multi_cast": "ops",
    "promote": "ops",
    "smart_autocast": "backend",
    "unscale_cast": "ops",
    "weight_cache_info": "weights",
}

__all__ = [
    "AutocastState",
    "BackwardAutocastError",
    "BackwardAutocastWarning",
    "BackwardError",
    "CastReport",
    "CastStats",
    "CustomOpWarning",
    "UnscaledGrads",
    "autocast_to_bf16",
    "autocast_to_fp16",
    "autocast_to_full_precision",
    "autocast_to_reduced_precision",
    "cast_with_stats",
    "clear_weight_cache",
    "explain",
    "kernels",
    "lower_autocast",
    "multi_cast",
    "promote",
    "smart_autocast",
    "unscale_cast",
    "weight_cache_info",
]


def __getattr__(name: str) -> Any:
    if name in ("backend", "export", "ops", "regions"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
