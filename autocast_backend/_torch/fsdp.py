"""Fully sharded data parallel: which tensors it manages."""

from __future__ import annotations

import sys

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
    groups = [getattr(state, "_fsdp_param_group", None) for state in states]
    groups += [g for state in states for g in getattr(state, "_fsdp_param_groups", ())]
    managed = (p for group in groups if group is not None for p in group.fsdp_params)
    return any(getattr(p, "_unsharded_param", None) is tensor for p in managed)
