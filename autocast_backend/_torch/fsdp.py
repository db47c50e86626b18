"""Fully sharded data parallel: which tensors it manages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def managed_by_fsdp(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some tensors that FSDP, of either kind, gathers for a forward and frees after.

    It keeps the version counter of a gathered tensor as it was, so new values look like old ones.
    """
    # Where nobody has imported FSDP2, nothing is managed by it. No import: it would take as long as
    # a cast, and this is asked whenever casts are made.
    gathered = set()
    module = sys.modules.get("torch.distributed._composable_state")
    mapping = {} if module is None else module._module_state_mapping
    if mapping:
        states = [reference() for reference in mapping.values()]
        managed = (p for s in states for group in _groups(s) for p in group.fsdp_params)
        gathered = {id(getattr(p, "_unsharded_param", None)) for p in managed}
    return [t for t in tensors if t.__dict__.get("_fsdp_flattened") or id(t) in gathered]


def _groups(state: Any) -> Sequence[Any]:
    """The groups of weights that a module's state has: several where they are on several meshes.
    Versions of PyTorch that know that raise where they are asked for the one group."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
