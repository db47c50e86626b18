"""Custom ops without an autocast rule, whose kernels call ops that have one.

Eager autocast acts inside of such a kernel. A compiled graph calls the op whole, with autocast off,
and gives other numbers: with every compiler. Nobody can see inside before it runs, so its first run
is watched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ._torch.inside import Watching, opaque_ops
from ._torch.ops import OpOverload, op_name_of
from .graphs import nodes_of
from .policies.table import Policy, find_policy, name_of
from .state import AutocastState, DeviceAutocast


class CustomOpWarning(UserWarning):
    """The kernel of a custom op without an autocast rule calls an op that eager autocast acts on.
    Compiled, autocast is off in there."""


def ops_without_rule(
    graph_module: fx.GraphModule, state: AutocastState
) -> dict[OpOverload, AutocastState]:
    """The custom ops without an autocast rule that a graph calls, all under `state`."""
    on = [device.device_type for device in state.enabled_devices]
    return {
        op: state
        for node in nodes_of(graph_module)
        # `auto_functionalized` has the op that it calls as an argument.
        for target in (node.target, *node.args[:1])
        for op in opaque_ops(target, on)
    }


def first_run_watched(
    compiled: Callable[..., Any], ops: Mapping[OpOverload, AutocastState]
) -> Callable[..., Any]:
    """The compiled graph, which warns once if eager autocast would act inside of its custom ops.
    Each op is watched in the first call that runs it: those in a branch of `cond` may run later.

    Args:
        ops: custom ops without an autocast rule, and the state that they stand under.
    """
    unseen = dict(ops)

    def tell(op: OpOverload, inner: OpOverload, tensors: list[torch.Tensor]) -> None:
        state = unseen.get(op)
        for device in () if state is None else state.enabled_devices:
            if _acts(find_policy(name_of(inner), device.device_type), tensors, device):
                if unseen.pop(op, None) is not None:  # by no other thread meanwhile
                    _warn(op, inner, device)
                return

    def run(*args: Any) -> Any:
        if not unseen:
            return compiled(*args)
        watching = Watching(list(unseen), tell)
        with watching:
            results = compiled(*args)
        for op in watching.ran:
            unseen.pop(op, None)
        return results

    return run


def _acts(policy: Policy | None, tensors: list[torch.Tensor], device: DeviceAutocast) -> bool:
    """Whether autocast would cast one of the tensors of a call."""
    dtypes = {
        t.dtype
        for t in tensors
        if t.is_floating_point()
        and t.dtype is not torch.float64
        and t.device.type == device.device_type
    }
    if policy is Policy.LOWER_PRECISION_FP:
        return bool(dtypes - {device.dtype})
    if policy is Policy.PROMOTE:
        return len(dtypes) > 1
    return policy not in (None, Policy.BANNED) and bool(dtypes - {torch.float32})


def _warn(op: OpOverload, inner: OpOverload, device: DeviceAutocast) -> None:
    name, called = op_name_of(op)[0], op_name_of(inner)[0]
    warnings.warn(
        f"the kernel of the custom op {name} calls {called}, which eager autocast acts on. "
        "Compiled, it runs with autocast off and gives other numbers. Say what the op means: "
        f"torch.library.register_autocast({name!r}, {device.device_type!r}, {device.dtype})",
        CustomOpWarning,
        stacklevel=2,
    )
