"""Backwards for compiled autograd, which copies backward graphs and calls no compiled ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.node import has_side_effect

from .._torch.autocast import enter_autocast, exit_autocast
from .._torch.dynamo_graphs import calls_hook
from .ambient import BackwardError, Key, current_key, key_name


@has_side_effect
def autocast_must_be(line: str, device_types: Sequence[str], key: Key) -> None:
    """Stands first in a backward that compiled autograd has copied: it keeps the copy for later
    calls, whatever the state is then, and runs this again where the state differs."""
    found = current_key(device_types)
    if found != key:
        raise BackwardError(
            f"compiled autograd captured the backward of {line} under autocast {key_name(key)} and "
            f"runs it under {key_name(found)}. Call backward() under one state, or without "
            "compiled autograd"
        )


def as_it_is(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient itself. Stands where autocast is what it was before the backward."""
    return gradient


def for_compiled_autograd(
    backward: fx.GraphModule, line: str, device_types: Sequence[str], key: Key
) -> fx.GraphModule:
    """A copy of the backward under `key` for compiled autograd, which runs its ops where autocast
    may be on: it checks that it is still the right one, then switches autocast off.

        autocast_must_be(line, device_types, key)
        enter = _enter_autocast("cpu", None, False, None)
        ...
        _exit_autocast(enter)
        return as_it_is(gradient), ...

    Hooks run under the state that is met. Those that the forward has put on tensors are calls in
    the graph, before which it exits; one that raises finds nothing entered. All others read
    gradients that it returns, and compiled autograd moves them right behind the nodes that these
    come from.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}

    def enter() -> list[fx.Node]:
        return [graph.call_function(enter_autocast, (d, None, False, None)) for d, _ in key]

    def leave() -> None:
        for node in reversed(entered):
            graph.call_function(exit_autocast, (node,))

    for node in backward.graph.find_nodes(op="placeholder"):
        values[node] = graph.node_copy(node)
    graph.call_function(autocast_must_be, (line, tuple(device_types), key))
    entered = enter()
    for node in backward.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if calls_hook(node):
            leave()
        values[node] = graph.node_copy(node, values.__getitem__)
        if calls_hook(node):
            entered = enter()
    leave()
    if entered:
        for node in backward.graph.output_node().all_input_nodes:
            values[node] = graph.call_function(as_it_is, (values[node],))
    graph.output(fx.map_arg(backward.graph.output_node().args[0], values.__getitem__))
    return fx.GraphModule(backward, graph)
