"""No node of an exported program may give a dtype: `torch.export.save` cannot write it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from .. import ops as _ops  # noqa: F401  (defines torch.ops.smart_autocast)
from .._torch.autocast import disable_autocast
from .._torch.fake_tensors import fake_mode_of
from ..regions import nodes_of

_DTYPE_OF = torch.ops.smart_autocast.full_precision_dtype.default
_FULL = torch.ops.smart_autocast.autocast_to_full_precision.default


def without_dtype_values(graph_module: fx.GraphModule) -> None:
    """Cast the operand of an op that autocast asks for a float32 result, in place of asking.

        dtype = full_precision_dtype(x)                   full = autocast_to_full_precision(x)
        y = softmax(self=x, dim=-1, dtype=dtype)          y = softmax(full, -1)

    The results have the same dtypes, and are the same but for the order in which a kernel adds up
    numbers of another dtype: these ops say that they cast their operand first.
    """
    for node in [n for n in nodes_of(graph_module) if n.target is _DTYPE_OF]:
        graph = node.graph
        given_to_it: tuple[Any, ...] = node.args
        operand, given = (*given_to_it, None)[:2]
        for call in list(node.users):
            arguments = dict(call.kwargs)
            arguments["dtype"] = given
            if given is None:
                with graph.inserting_before(call):
                    full = graph.call_function(_FULL, (operand,))
                value = operand.meta["val"]
                with _mode_of(value), disable_autocast():
                    full.meta = {**node.meta, "val": _FULL(value)}
                arguments["self"] = full
            call.args, call.kwargs = _positional(call.target, arguments)
        graph.erase_node(node)
        owner = graph.owning_module
        assert owner is not None
        owner.recompile()


def _mode_of(value: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    return fake_mode_of([value]) or contextlib.nullcontext()


def _positional(op: Any, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by name as export writes them: by position, and no defaults at the end."""
    schema = op._schema.arguments
    keywords = {
        a.name: arguments[a.name]
        for a in schema
        if a.kwarg_only and arguments.get(a.name) is not None
    }
    given = [arguments.get(a.name, a.default_value) for a in schema if not a.kwarg_only]
    defaults = [a.default_value for a in schema if not a.kwarg_only]
    while given and len(given) > 1 and given[-1] == defaults[-1]:
        given.pop()
        defaults.pop()
    return tuple(given), keywords
