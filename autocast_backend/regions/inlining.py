"""Higher-order ops into enter and exit nodes: the inverse of `hops.py`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature

from .._torch.autocast import enter_autocast, exit_autocast, wrap_with_autocast
from ..graphs import check_graph_module, copy_graph, drop_unused_bodies, free_name, get_attribute
from .placement import RegionError, where
from .signature import with_outputs_of


def hops_to_regions(
    graph_module: fx.GraphModule, signature: ExportGraphSignature | None = None
) -> tuple[fx.GraphModule, ExportGraphSignature | None]:
    """Put the body of every `wrap_with_autocast` call in its place, between an enter and an exit
    node; also inside of bodies, those of other higher-order ops included.

        region = wrap_with_autocast(           enter = _enter_autocast(
            "cpu", dtype, True, None,              "cpu", dtype, True, None)
            body, x, w)                        y = linear(x, w)
        y = region[0]                          _exit_autocast(enter)

    Args:
        graph_module: any FX graph; it is left as it is.
        signature: of an exported program's graph; it is left as it is.

    Returns:
        A new graph, and its signature, in which outputs that are now called otherwise are renamed.

    Raises:
        TypeError: `graph_module` is no graph, or `signature` no signature.
        RegionError: a call that is not `wrap_with_autocast(device_type, dtype, enabled,
            cache_enabled, body, *operands)` with one operand for each input of its body.
    """
    check_graph_module(graph_module)
    copy = copy_graph(graph_module)
    _inline(copy)
    return copy, with_outputs_of(copy, signature)


def _inline(module: fx.GraphModule) -> None:
    for child in list(module.children()):
        if isinstance(child, fx.GraphModule):
            _inline(child)
    for node in module.graph.find_nodes(op="call_function", target=wrap_with_autocast):
        _inline_call(module, node, _body_of(module, node))
    drop_unused_bodies(module)
    module.recompile()


def _body_of(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    expected = (
        f"{where(node)}: expected wrap_with_autocast(device_type, dtype, enabled, cache_enabled, "
        "body, *operands)"
    )
    attribute = node.args[4] if len(node.args) > 4 else None
    if node.kwargs or not isinstance(attribute, fx.Node) or attribute.op != "get_attr":
        raise RegionError(f"{expected} with a body from get_attr; got {node.format_node()}")
    body = get_attribute(module, str(attribute.target))
    if not isinstance(body, fx.GraphModule):
        raise RegionError(f"{expected} with an FX graph as its body; got {type(body).__name__}")
    inputs, operands = body.graph.find_nodes(op="placeholder"), node.args[5:]
    if len(inputs) != len(operands):
        raise RegionError(
            f"{expected} with one operand for each of the body's {len(inputs)} inputs; "
            f"got {len(operands)}"
        )
    return body


def _inline_call(module: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    graph = module.graph
    inputs = body.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(inputs, call.args[5:], strict=True))
    returned: Any = None
    with graph.inserting_before(call):
        enter = graph.call_function(enter_autocast, call.args[:4])
        for node in body.graph.nodes:
            if node.op == "output":
                returned = fx.node.map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                values[node] = graph.node_copy(node, values.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    values[node].target = _adopt(module, body, str(node.target))
        exit_ = graph.call_function(exit_autocast, (enter,))
    for marker in (enter, exit_):
        marker.meta = {
            k: v for k, v in call.meta.items() if k in ("nn_module_stack", "stack_trace")
        }
    for user in list(call.users):
        result: Any = None
        if user.target is operator.getitem and isinstance(returned, (tuple, list)):
            index: Any = user.args[1]
            result = returned[index]
        if isinstance(result, fx.Node):
            user.replace_all_uses_with(result)
            graph.erase_node(user)
            if result not in call.args:
                result.name, user.name = user.name, result.name
        else:
            user.args, user.kwargs = fx.node.map_arg(
                (user.args, user.kwargs), lambda n: returned if n is call else n
            )
    graph.erase_node(call)


def _adopt(module: fx.GraphModule, body: fx.GraphModule, path: str) -> str:
    """Give `module` what `body` has at `path`; where it is."""
    value = get_attribute(body, path)
    name = free_name(module, path.replace(".", "_"))
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)
    return name
