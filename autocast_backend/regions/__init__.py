"""Autocast regions of a graph: which node stands under which state, and the two ways to write a
region down.

    enter = _enter_autocast("cpu", torch.bfloat16, True, None)
    y = linear(x, w)                                                enter and exit nodes
    _exit_autocast(enter)

    y = wrap_with_autocast("cpu", torch.bfloat16, True, None, body, x, w)[0]      a higher-order op

Dynamo writes the first, `torch.export` turns it into the second; `regions_to_hops` and
`hops_to_regions` go either way.
"""

from __future__ import annotations

from .hops import regions_to_hops
from .inlining import hops_to_regions
from .placement import (
    AMBIENT,
    Placement,
    RegionError,
    call_name,
    dtypes_taken_over,
    find_regions,
    is_cleared,
    is_opened_in,
    is_region_node,
    source_line,
    state_changes,
    target_name,
    where,
)

__all__ = [
    "AMBIENT",
    "Placement",
    "RegionError",
    "call_name",
    "dtypes_taken_over",
    "find_regions",
    "hops_to_regions",
    "is_cleared",
    "is_opened_in",
    "is_region_node",
    "regions_to_hops",
    "source_line",
    "state_changes",
    "target_name",
    "where",
]
