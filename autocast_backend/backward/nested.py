"""Nested compile regions, and calls like them, written out.

    joint graph                                   written out
    ------------------------------------------    ------------------------------
    body = partitioned_fw_0                       y = mm(x, w)
    call = invoke_subgraph(body, "fw_0", x, w)    z = sin(y)
    z, y = call[0], call[1]

PyTorch traces and partitions such a region by itself: what it saves stands in no other graph. And
where it traces the backward of a region under autocast, it does so with the forward. So a variant
is traced without them, and what the compiled forward saved is found in its graphs, written out.
The backward of `foreach_map` and `InvokeQuant`, too, has their forward in it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx

from .._torch.dynamo_graphs import is_higher_order_op
from ..graphs import nodes_of, same_inputs
from ..lowering.bodies import IN_PLACE
from .differences import attribute

WRITTEN_OUT = ("invoke_subgraph", "foreach_map", "invoke_quant_packed")
"""The ops whose bodies are."""


def is_written_out(node: fx.Node) -> bool:
    """Whether a node calls a body that is written out."""
    return is_higher_order_op(node.target) and str(node.target) in WRITTEN_OUT


def has_nested(module: fx.GraphModule) -> bool:
    """Whether a graph, or a body in it, has such calls."""
    return any(map(is_written_out, nodes_of(module)))


class WrittenOut(NamedTuple):
    """A graph without nested compile regions and calls like them.

    Attributes:
        module: computes what the graph that was given does.
        names: its nodes, by the names of those they stand for.
    """

    module: fx.GraphModule
    names: Mapping[str, fx.Node]


def write_out(module: fx.GraphModule) -> WrittenOut:
    """Write the bodies of such calls into the graph, and into other bodies in it; `module` itself
    if it has none."""
    if not has_nested(module):
        return WrittenOut(module, {node.name: node for node in module.graph.nodes})
    graph = fx.Graph()
    attributes: dict[str, Any] = {}

    def copy(source: fx.GraphModule, values: dict[fx.Node, Any], tag: str | None) -> Any:
        """Copy the nodes of `source`, whose placeholders have `values`; what it returns."""
        for node in source.graph.nodes:
            if node in values:
                continue
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node.op == "get_attr":
                value = attribute(source, node)
                if all(map(is_written_out, node.users)):
                    values[node] = value  # a body
                    continue
                if isinstance(value, fx.GraphModule):
                    value = write_out(value).module
                name = str(node.target) if source is module else f"written_out_{len(attributes)}"
                attributes[name] = value
                values[node] = graph.create_node("get_attr", name)
                values[node].meta = dict(node.meta)
            elif is_written_out(node):
                arguments = fx.map_arg(node.args, values.__getitem__)
                call = IN_PLACE[str(node.target)]
                body, operands = arguments[call.body], arguments[call.first_operand :]
                inputs = zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
                values[node] = copy(body, dict(inputs), node.meta.get("partitioner_tag"))
            elif node.target is operator.getitem and isinstance(values[node.args[0]], tuple | list):
                values[node] = result = values[node.args[0]][node.args[1]]
                if isinstance(result, fx.Node) and "val" in node.meta:
                    result.meta = {**result.meta, "val": node.meta["val"]}
            else:
                values[node] = graph.node_copy(node, values.__getitem__)
                if tag is not None:
                    values[node].meta["partitioner_tag"] = tag
        raise AssertionError("a graph without an output")

    values: dict[fx.Node, Any] = {}
    graph.output(copy(module, values, None))
    same_inputs(graph, module.graph)
    written = fx.GraphModule(attributes, graph)
    written.meta.update(module.meta)
    names = {node.name: value for node, value in values.items() if isinstance(value, fx.Node)}
    return WrittenOut(written, names)
