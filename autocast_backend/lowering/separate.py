"""One body for one autocast state and the same weights among its operands, in one graph.

    y = invoke_subgraph(body, "body", x)  # under autocast
    z = invoke_subgraph(body, "body", y)  # not

becomes

    y = invoke_subgraph(body, "body", x)
    z = invoke_subgraph(body_1, "body_1", y)

A nested compile region is one body, called as often as the code calls it, and compilers trace it
once for its name. Under another autocast state it is another computation: with one name, the second
call would get what was traced for the first. So it is in another graph, the body of a checkpoint or
of another nested region, say, which may be called under another state, or hand it other casts. And
eager autocast caches the casts of weights alone: a call with a computed tensor in a weight's place
casts it once more.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from .._torch.dynamo_graphs import GradMode
from ..graphs import copy_graph
from ..regions import Placement, find_regions
from ..validation.compare import is_weight
from .bodies import Bodies


def separate_bodies(
    module: fx.GraphModule, outside: Placement, grad: bool, names: set[str] | None = None
) -> None:
    """Give every graph, autocast state, grad mode and choice of weights that calls a body a copy of
    its own, in place.

    Args:
        names: those of the bodies found so far; new ones are put into it.

    Raises:
        RegionError: enter and exit nodes that do not pair up.
    """
    names = set() if names is None else names
    placements = find_regions(module.graph, outside)
    bodies = Bodies(module)
    copies: dict[fx.GraphModule, dict[Any, tuple[fx.Node, str]]] = {}
    inner: list[tuple[fx.GraphModule, Placement, bool]] = []
    mode = GradMode(grad)
    for node in list(module.graph.nodes):
        mode.follow(node)
        if (body := bodies.of(node)) is None:
            continue
        found = body.module
        if body.call.again:
            known = copies.setdefault(found, {})
            operands = [_value(n) for n in node.args[body.call.first_operand :]]
            weights = tuple(isinstance(v, torch.Tensor) and is_weight(v) for v in operands)
            place = (placements[node].state, placements[node].scope, mode.grad, weights)
            if place not in known:
                attribute, name = node.args[0], str(node.args[1])
                if name in names:
                    found = copy_body(node, found, names)
                    attribute, name = node.args[0], str(node.args[1])
                names.add(name)
                inputs = found.graph.find_nodes(op="placeholder")
                for placeholder, value in zip(inputs, operands, strict=True):
                    placeholder.meta["example_value"] = value
                known[place] = (attribute, name)
                inner.append((found, placements[node], body.call.grad_mode(node, mode.grad)))
            node.args = (*known[place], *node.args[2:])
        else:
            inner.append((found, placements[node], body.call.grad_mode(node, mode.grad)))
    if copies:
        _drop_unread(module)
    for found, placement, records in inner:
        separate_bodies(found, placement, records, names)


def copy_body(node: fx.Node, body: fx.GraphModule, names: set[str]) -> fx.GraphModule:
    """Have a call of a nested compile region call a copy of its body, and return that.

    Args:
        names: of all bodies; the new one is put into it.
    """
    graph, module = node.graph, node.graph.owning_module
    assert module is not None
    taken = str(node.args[1])
    name = next(n for i in itertools.count(1) if (n := f"{taken}_{i}") not in names)
    names.add(name)
    copy = copy_graph(body)
    module.add_submodule(name, copy)
    with graph.inserting_before(node):
        node.args = (graph.get_attr(name), name, *node.args[2:])
    return copy


def _value(operand: Any) -> Any:
    return operand.meta.get("example_value") if isinstance(operand, fx.Node) else operand


def _drop_unread(module: fx.GraphModule) -> None:
    """Drop the bodies that copies have replaced."""
    unread = [n for n in module.graph.find_nodes(op="get_attr") if not n.users]
    for node in unread:
        module.graph.erase_node(node)
    still = {n.target for n in module.graph.find_nodes(op="get_attr")}
    for node in unread:
        if node.target not in still:
            module.delete_submodule(str(node.target))
    module.recompile()
