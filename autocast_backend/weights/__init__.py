"""Weights that are cast outside of the graphs that read them, once for all of them."""

from __future__ import annotations

from .cache import WeightCacheInfo, clear_weight_cache, weight_cache_info

__all__ = ["WeightCacheInfo", "clear_weight_cache", "weight_cache_info"]
