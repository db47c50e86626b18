"""Partitioners: what they save for the backward, and which calls they take for one."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .patches import replaced


@contextlib.contextmanager
def calls_apart() -> Iterator[None]:
    """Have each call draw random numbers of its own, and 0.0 and -0.0 be two numbers. Partitioners,
    and Inductor's freezing, make one call of those with equal arguments. Their list of ops that
    draw has no `randn_like`, `uniform` or `exponential`, no custom op, and not the higher-order op
    of those that write.
    """
    from torch._functorch import compile_utils

    original, apart = compile_utils.get_aten_target, compile_utils.rand_ops[0]

    def get_aten_target(node: fx.Node) -> Any:
        return apart if draws_itself(node) or _has_negative_zero(node) else original(node)

    with replaced(compile_utils, "get_aten_target", get_aten_target):
        yield


def draws_itself(node: fx.Node) -> bool:
    """Whether a call draws random numbers, itself or by the op that it wraps."""
    return any(is_random(op) for op in (node.target, *node.args))


def is_random(op: Any) -> bool:
    """Whether an op is tagged as one that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _has_negative_zero(node: fx.Node) -> bool:
    arguments = (*node.args, *node.kwargs.values())
    return any(isinstance(a, float) and a == 0 and math.copysign(1, a) < 0 for a in arguments)


@contextlib.contextmanager
def marks_heeded(*marks: Callable[[fx.Graph], None]) -> Iterator[None]:
    """Have the partitioner save what must be saved. Where it may use little memory, it overlooks
    some: all with a budget of 0, or what returns several tensors.

    Args:
        marks: are given each joint graph as the partitioner gets it, after Inductor's passes.
    """
    from torch._functorch import partitioners

    original = partitioners.choose_saved_values_set

    def choose_saved_values_set(joint: fx.Graph, node_info: Any, *args: Any, **kwargs: Any) -> Any:
        for mark in marks:
            mark(joint)
        chosen = original(joint, node_info, *args, **kwargs)
        # What returns several tensors is none of them, though it may be chosen for its mark.
        chosen = [n for n in chosen if not isinstance(n.meta.get("val"), (tuple, list))]
        return chosen + _overlooked(chosen, node_info.required_bw_nodes)

    with replaced(partitioners, "choose_saved_values_set", choose_saved_values_set):
        yield


def _overlooked(saved: list[fx.Node], backward: Collection[fx.Node]) -> list[fx.Node]:
    """What must be saved, and would be computed again for `backward` with what is `saved`. Of a
    view that is what it is one of."""
    from torch._functorch.partitioners import get_default_op_list

    is_view = get_default_op_list().is_view
    overlooked: list[fx.Node] = []
    seen = {*saved, *backward}
    pending = [*backward]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in seen:
                continue
            seen.add(node)
            call: Any = node.args[0] if node.target is operator.getitem else node
            (overlooked if is_saved(call) and not is_view(call) else pending).append(node)
    return overlooked


def in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_recomputed(node: fx.Node) -> bool:
    """Whether a checkpoint has a node of a joint graph computed again in the backward."""
    from torch._functorch.partitioners import must_recompute

    return bool(must_recompute(node))


def must_save(node: fx.Node) -> None:
    """Forbid partitioners to compute a node of the forward again in the backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def is_saved(node: fx.Node) -> bool:
    """Whether that is forbidden."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
