"""Find the autocast state of every node of a graph.

A region is a lexical span: between `_enter_autocast` and its `_exit_autocast`. Regions nest; what
lies outside all of them is under the ambient state. The functions that `torch.autocast` itself is
made of, `torch.set_autocast_enabled` and others, change the state for what follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from .._torch.autocast import enter_autocast, exit_autocast
from .._torch.dynamo_graphs import is_numpy_call
from ..graphs import nodes_of
from ..state import AutocastState


class RegionError(RuntimeError):
    """A graph whose enter and exit nodes do not pair up, or that was compiled for a dtype which a
    region of it no longer has."""


@dataclass(frozen=True)
class Placement:
    """Where a node stands.

    Attributes:
        state: the autocast state the node runs under.
        scope: what all nodes share between which eager autocast keeps its weight cache: the node
            that opened the outermost context, whose exit clears the cache, or that cleared it
            last, or `AMBIENT`. None where no context is open.
    """

    state: AutocastState
    scope: fx.Node | str | None


AMBIENT = "ambient"
"""The scope of the contexts around a compiled call."""

_SETTERS: dict[Any, Callable[..., AutocastState]] = {
    torch.set_autocast_enabled: lambda state, device_type, enabled: state.set(
        device_type, enabled=enabled
    ),
    torch.set_autocast_dtype: lambda state, device_type, dtype: state.set(device_type, dtype=dtype),
    torch.set_autocast_cache_enabled: lambda state, enabled: replace(state, cache_enabled=enabled),
    torch.clear_autocast_cache: lambda state: state,
    torch.autocast_increment_nesting: lambda state: state,
    torch.autocast_decrement_nesting: lambda state: state,
}
"""Functions that Dynamo writes into a graph as they are called, and the state after them."""


def is_region_node(node: fx.Node) -> bool:
    """Whether the node opens or closes a region, or sets the state in another way."""
    regions = (enter_autocast, exit_autocast)
    return node.op == "call_function" and (node.target in regions or node.target in _SETTERS)


def is_opened_in(scope: fx.Node | str | None, graph: fx.Graph) -> bool:
    """Whether a scope begins in `graph`: at each call of it anew."""
    return isinstance(scope, fx.Node) and scope.graph is graph


def is_cleared(scope: fx.Node | str | None) -> bool:
    """Whether a scope begins where the graph clears the cache of contexts that stay open."""
    return isinstance(scope, fx.Node) and scope.target is torch.clear_autocast_cache


def state_changes(graph: fx.Graph) -> Callable[[], None] | None:
    """What changes the calling thread's state as a run of the whole graph would; None for a graph
    of regions alone, which end as they began. It stays what it is when `graph` is changed."""
    nodes = [n for n in graph.nodes if is_region_node(n)]
    if not any(n.target in _SETTERS for n in nodes):
        return None
    changes = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = changes.node_copy(node, copies.__getitem__)
    changes.output(None)
    return fx.GraphModule(nn.Module(), changes)


def find_regions(graph: fx.Graph, outside: Placement) -> dict[fx.Node, Placement]:
    """The placement of every node of `graph`, which itself stands at `outside`.

        y = linear(x, w)                                  outside
        enter = _enter_autocast("cpu", torch.bfloat16)
        z = linear(y, w)                                  cpu: bfloat16
        inner = _enter_autocast("cpu", enabled=False)
        u = linear(z, w)                                  off
        _exit_autocast(inner)
        _exit_autocast(enter)

    Bodies of higher-order ops are graphs of their own: call again with the placement of their node.
    Calls of NumPy, which Dynamo writes as calls of tensors, stand under no autocast.

    Raises:
        RegionError: an exit without its enter, crossing pairs, or an enter without its exit.
    """
    placements: dict[fx.Node, Placement] = {}
    opened: list[tuple[fx.Node, Placement]] = []
    here = outside
    for node in graph.nodes:
        placements[node] = _without_autocast(here) if is_numpy_call(node.target) else here
        if node.op != "call_function":
            continue
        if node.target is enter_autocast:
            opened.append((node, here))
            scope = node if here.scope is None else here.scope
            here = Placement(here.state.enter(*node.args, **node.kwargs), scope)
        elif node.target is exit_autocast:
            if not opened or opened[-1][0] is not node.args[0]:
                expected = opened[-1][0].name if opened else "no open region"
                raise RegionError(
                    f"{where(node)} closes {node.args[0]}; expected it to close {expected}: "
                    "autocast regions must nest"
                )
            enter, before = opened.pop()
            here = Placement(here.state.exit(str(enter.args[0]), before.state), before.scope)
        elif node.target in _SETTERS:
            here = replace(here, state=_SETTERS[node.target](here.state, *node.args, **node.kwargs))
            if node.target is torch.clear_autocast_cache and here.scope is not None:
                here = replace(here, scope=node)
                opened = [(n, p if p.scope is None else replace(p, scope=node)) for n, p in opened]
    if opened:
        raise RegionError(
            f"{where(opened[-1][0])} opens a region that the graph never closes; where a generator "
            "was left inside of it, run it to its end or call its close()"
        )
    return placements


def _without_autocast(here: Placement) -> Placement:
    state = here.state
    for device in state.enabled_devices:
        state = state.set(device.device_type, enabled=False)
    return replace(here, state=state)


def dtypes_taken_over(
    graph_module: fx.GraphModule, now: AutocastState, around: Sequence[Mapping[str, Any]]
) -> tuple[tuple[str, torch.dtype], ...]:
    """The device types that are off in `now`, and the dtypes they have there, which the graph
    computes in all the same: a region in it, or of those `around` it, names no dtype of its own.
    Found by trying other dtypes. A body of a higher-order op is taken to stand outside of regions.
    """
    if not around and not any(map(is_region_node, nodes_of(graph_module))):
        return ()
    others = {torch.bfloat16: torch.float16}
    other = now
    for d in now.devices:
        if not d.enabled:
            other = other.set(d.device_type, dtype=others.get(d.dtype, torch.bfloat16))
    here, there = (Placement(state.inside(around), None) for state in (now, other))
    found = set()
    for graph in {node.graph: None for node in nodes_of(graph_module)}:
        placements = find_regions(graph, here)
        tried = find_regions(graph, there)
        states = {id(p): (p.state, tried[node].state) for node, p in placements.items()}
        for state, if_other in states.values():
            for d, o in zip(state.devices, if_other.devices, strict=True):
                if d != o and o.enabled:  # it is where `d` is: autocast knows the other dtype
                    found.add(d.device_type)
    return tuple((d.device_type, d.dtype) for d in now.devices if d.device_type in found)


def source_line(node: fx.Node) -> str:
    """The line of the user's code a node comes from, or an empty string."""
    trace = (node.meta.get("stack_trace") or node.stack_trace or "").strip().splitlines()
    return next((t.strip() for t in reversed(trace) if t.strip().startswith("File ")), "")


def call_name(node: fx.Node) -> str:
    """What a node calls, and where, for messages."""
    line = source_line(node)
    return f"the call of {target_name(node)}" + (f" ({line})" if line else "")


def target_name(node: fx.Node) -> str:
    """The name of what a node calls."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def where(node: fx.Node) -> str:
    """A node's name and the line of the user's code it comes from, for errors.

    `torch.export` gives enter and exit nodes no line; the nearest call that has one is named
    instead.
    """
    if line := source_line(node):
        return f"node {node.name} ({line})"
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    for near in (*nodes[at + 1 :], *reversed(nodes[:at])):
        if line := source_line(near):
            return f"node {node.name} (near {near.name}, {line})"
    return f"node {node.name}"
