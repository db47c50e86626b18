"""Example values for the option `autocast=`.

Dynamo traced the graph without that region, so `meta["example_value"]` holds what eager gives
without it. This pass runs the graph on fake tensors under the region and writes down what it gives.
The graph itself is not changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import recipes
from ._torch.fake_tensors import fake_mode_of, observing
from .bodies import Bodies
from .lowering import Context
from .regions import Placement, find_regions, is_region_node


def propagate(graph_module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Set `meta["example_value"]` of every node to its value under `context.ambient`."""
    inputs = [n.meta.get("example_value") for n in graph_module.graph.find_nodes(op="placeholder")]
    fake_mode = fake_mode_of(inputs)
    if fake_mode is not None:
        with observing(fake_mode):
            # A call may write to its inputs; leaves that require grad are safe from that.
            copies = [_copy(value) for value in inputs]
            _run_graph(
                graph_module, copies, Placement(context.ambient, None), torch.is_grad_enabled()
            )
    return graph_module


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return value.clone()
    return value


def _run_graph(module: fx.GraphModule, inputs: list[Any], outside: Placement, grad: bool) -> Any:
    placements = find_regions(module.graph, outside)
    bodies = Bodies(module)
    values: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in module.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            values[node] = next(feed)
            continue
        if node.op == "get_attr":
            values[node] = node.meta.get("example_value", _attribute(module, str(node.target)))
        elif is_region_node(node):
            values[node] = None
        elif (body := bodies.of(node)) is not None:
            operands = list(args[body.call.first_operand :])
            # What an autograd function gives requires grad, though its forward records nothing.
            records = bool(node.args[0]) if body.call.records_grad is None else grad
            values[node] = body.call.result(
                _run_graph(body.module, operands, placements[node], records)
            )
        else:
            with placements[node].state.applied(), torch.set_grad_enabled(grad):
                values[node] = recipes.run(node.target, args, kwargs)
        # Symbols stay Dynamo's own: running `item()` again would make new ones.
        if isinstance(values[node], (torch.SymInt, torch.SymFloat, torch.SymBool)):
            values[node] = node.meta.get("example_value", values[node])
        elif "example_value" in node.meta:
            node.meta["example_value"] = values[node]
    return None


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
