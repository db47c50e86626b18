"""Find the autocast state of every node of a graph.

A region is a lexical span: between `_enter_autocast` and its `_exit_autocast`. Regions nest; what
lies outside all of them is under the ambient state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from .._torch.autocast import enter_autocast, exit_autocast
from ..state import AutocastState


class RegionError(RuntimeError):
    """A graph whose enter and exit nodes do not pair up."""


@dataclass(frozen=True)
class Placement:
    """Where a node stands.

    Attributes:
        state: the autocast state the node runs under.
        scope: a number shared by all nodes between which eager autocast keeps its weight cache: the
            cache is cleared when the outermost context exits. None where no context is open.
    """

    state: AutocastState
    scope: int | None


def is_region_node(node: fx.Node) -> bool:
    """Whether the node opens or closes a region."""
    return node.op == "call_function" and node.target in (enter_autocast, exit_autocast)


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

    Raises:
        RegionError: an exit without its enter, crossing pairs, or an enter without its exit.
    """
    placements: dict[fx.Node, Placement] = {}
    opened: list[tuple[fx.Node, Placement]] = []
    here = outside
    scopes = 0
    for node in graph.nodes:
        placements[node] = here
        if node.op != "call_function":
            continue
        if node.target is enter_autocast:
            opened.append((node, here))
            if here.scope is None:
                scopes += 1
            scope = here.scope if here.scope is not None else scopes
            here = Placement(here.state.enter(*node.args, **node.kwargs), scope)
        elif node.target is exit_autocast:
            if not opened or opened[-1][0] is not node.args[0]:
                expected = opened[-1][0].name if opened else "no open region"
                raise RegionError(
                    f"{where(node)} closes {node.args[0]}; expected it to close {expected}: "
                    "autocast regions must nest"
                )
            here = opened.pop()[1]
    if opened:
        raise RegionError(f"{where(opened[-1][0])} opens a region that the graph never closes")
    return placements


def source_line(node: fx.Node) -> str:
    """The line of the user's code a node comes from, or an empty string."""
    trace = (node.meta.get("stack_trace") or node.stack_trace or "").strip().splitlines()
    return next((t.strip() for t in reversed(trace) if t.strip().startswith("File ")), "")


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


def nodes_of(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of the bodies in it."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
