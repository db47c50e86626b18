"""No node of an exported program may give nothing: no file could hold it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .. import ops as _ops  # noqa: F401  (defines torch.ops.smart_autocast)
from .._torch.ops import arguments_of
from ..graphs import drop_unused_bodies, get_attribute, nodes_of, recompile

_DTYPE_OF = torch.ops.smart_autocast.full_precision_dtype.default
_WITH_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_FULL = torch.ops.smart_autocast.autocast_to_full_precision.default


def without_absent_dtypes(graph_module: fx.GraphModule) -> None:
    """Cast the operand of an op that autocast asks for a float32 result, in place of asking, where
    the answer is no dtype at all: with the float64 operand that the program was exported with.

        dtype = full_precision_dtype(x)                   full = autocast_to_full_precision(x)
        y = softmax(self=x, dim=-1, dtype=dtype)          y = softmax(full, -1)

    The results have the same dtypes, and are the same but for the order in which a kernel adds up
    numbers of another dtype: these ops say that they cast their operand first.
    """
    for node in list(nodes_of(graph_module)):
        if node.target is not _DTYPE_OF or node.meta["val"] is not None:
            continue
        graph = node.graph
        operand: Any = node.args[0]
        for call in list(node.users):
            with graph.inserting_before(call):
                full = graph.call_function(_FULL, (operand,))
            full.meta = {**node.meta, "val": operand.meta["val"]}  # float64, which it leaves alone
            arguments = {**call.kwargs, "self": full, "dtype": None}
            call.args, call.kwargs = _positional(call.target, arguments)
        graph.erase_node(node)
    recompile(graph_module)


def without_absent_results(graph_module: fx.GraphModule) -> None:
    """Let every region of `torch.no_grad()` and the like return something: `torch.export.load`
    cannot read the call of one that does not. One with nothing inside is taken out, such as is left
    of a moving average in evaluation mode; one that writes returns its first tensor."""
    for module in reversed([m for m in graph_module.modules() if isinstance(m, fx.GraphModule)]):
        for node in module.graph.find_nodes(op="call_function", target=_WITH_GRAD_MODE):
            body = get_attribute(module, str(node.args[1].target))
            output = body.graph.output_node()
            if output.args[0]:
                continue
            if all(inside.op in ("placeholder", "output") for inside in body.graph.nodes):
                module.graph.erase_node(node)
                continue
            values = ((n, n.meta.get("val")) for n in body.graph.nodes)
            for first, value in ((n, v) for n, v in values if isinstance(v, torch.Tensor)):
                output.args = ((first,),)
                output.meta["val"] = node.meta["val"] = (value,)
                break
        drop_unused_bodies(module)
    recompile(graph_module)


def _positional(op: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as export writes them: by position, and no defaults at the end."""
    schema = arguments_of(op)
    keywords = {
        a.name: arguments[a.name]
        for a in schema
        if a.kwarg_only and arguments.get(a.name) is not None
    }
    given = [arguments.get(a.name, a.default_value) for a in schema if not a.kwarg_only]
    defaults = [a.default_value for a in schema if not a.kwarg_only]
    while len(given) > 1 and given[-1] == defaults[-1]:
        given.pop()
        defaults.pop()
    return tuple(given), keywords
