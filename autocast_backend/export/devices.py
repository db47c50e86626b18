"""A program of the CPU as one of another device type, for as long as it is lowered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch.autocast import enter_autocast
from .._torch.fake_tensors import fake_mode_of, new_fake_mode
from ..graphs import nodes_of
from ..state import AutocastState


def casts_fake_tensors(device_type: str) -> bool:
    """Whether a program can be lowered for the policies of a device type that autocast knows: on
    fake tensors of some nothing runs under autocast (IPU), or autocast does nothing (MAIA)."""
    dtype = torch.bfloat16
    state = AutocastState.of({"device_type": device_type, "dtype": dtype})
    with new_fake_mode(), state.applied():
        x = torch.empty(1, 1, device=f"{device_type}:0")
        try:
            return torch.mm(x, x).dtype is dtype
        except NotImplementedError:
            return False


@contextlib.contextmanager
def on_device_type(graph_module: fx.GraphModule, device_type: str | None) -> Iterator[None]:
    """Put a graph with enter and exit nodes on `device_type`: its inputs in `meta["val"]`, devices
    among the arguments of its calls, regions. Afterwards everything returns to the CPU, but for the
    regions, and what was computed meanwhile stays.

    The inputs require no grad meanwhile: on a machine without that device type, autograd on its
    fake tensors ends the process (2.13).
    """
    if device_type in (None, "cpu"):
        yield
        return
    there = f"{device_type}:0"
    moved = [n for n in nodes_of(graph_module) if _move(n, "cpu", there)]
    inputs = graph_module.graph.find_nodes(op="placeholder")
    before = {node: node.meta["val"] for node in inputs}
    mode = fake_mode_of(before.values()) or contextlib.nullcontext()
    with mode:
        for node in inputs:
            node.meta["val"] = _placed(node.meta["val"], "cpu", there)
    yield
    for node in moved:
        _move(node, device_type, "cpu")
    with mode:
        for node in nodes_of(graph_module):
            if "val" in node.meta:
                node.meta["val"] = _placed(node.meta["val"], device_type, "cpu")
    for node, value in before.items():
        node.meta["val"] = value


def _move(node: fx.Node, source: str, target: str) -> bool:
    """Rewrite the devices among the arguments of a call, or the device type of a region; whether
    there was one."""
    moved = False

    def move(argument: Any) -> Any:
        nonlocal moved
        if isinstance(argument, torch.device) and argument.type == source:
            moved = True
            return torch.device(target)
        return argument

    node.args, node.kwargs = pytree.tree_map(move, (node.args, dict(node.kwargs)))
    if node.target is enter_autocast and node.args[0] == source:
        node.args = (torch.device(target).type, *node.args[1:])
    return moved


def _placed(value: Any, source: str, target: str) -> Any:
    """The tensors of `value` that are on one device type, on another."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != source:
            return tensor
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=target
        )

    return pytree.tree_map_only(torch.Tensor, place, value)
