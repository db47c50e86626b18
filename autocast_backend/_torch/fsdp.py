"""Fully sharded data parallel: which tensors it manages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def is_managed_by_fsdp(tensor: torch.Tensor) -> bool:
    """Whether FSDP, of either kind, gathers this tensor for a forward and frees it after.

    It keeps the version counter of the gathered tensor as it was, so new values look like old ones.
    """
    if getattr(tensor, "_fsdp_flattened", False):
        return True
    # Where nobody has imported FSDP2, nothing is managed by it.
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return False
    from torch.distributed._composable_state import _module_state_mapping

    states = [reference() for reference in _module_state_mapping.values()]
    managed = (p for s in states for group in _groups(s) for p in group.fsdp_params)
    return any(getattr(p, "_unsharded_param", None) is tensor for p in managed)


def _groups(state: Any) -> Sequence[Any]:
    """The groups of weights that a module's state has: several where they are on several meshes.
    Versions of PyTorch that know that raise where they are asked for the one group."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
