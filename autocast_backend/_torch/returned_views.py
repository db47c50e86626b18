"""Views that graphs return, which AOTAutograd makes anew outside of its graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from .patches import replaced


@contextlib.contextmanager
def detached_outputs_right() -> Iterator[None]:
    """Have `return t, t.detach()`, where `t` is a view, return the same numbers twice. Outside of
    the graph AOTAutograd makes the second of the first, by the calls that have made `t` of what it
    is a view of:

        t = (x @ w).t()
        return t, t.detach()         returned is t.t().detach(); of t = (x @ w)[1:], an error
    """
    from torch._functorch._aot_autograd import collect_metadata_analysis as analysis
    from torch._functorch._aot_autograd.functional_utils import MetadataKey
    from torch._functorch._aot_autograd.schemas import OutputType

    original = vars(analysis)["OutputAliasInfo"]
    of_outputs = OutputType.alias_of_intermediate_base_is_user_output

    def without_calls(*args: Any, **kwargs: Any) -> Any:
        info = original(*args, **kwargs)
        calls = info.view_meta_sequence
        if info.output_type is of_outputs and not info.requires_grad and calls is not None:
            calls.sequence = []  # sizes and strides are those of the output that it is made of
        return info

    def make(tensor: torch.Tensor) -> Any:
        return MetadataKey.make(tensor), tensor.dtype  # t.detach().view(torch.int32) is another

    with (
        replaced(analysis, "OutputAliasInfo", without_calls),
        replaced(analysis, "MetadataKey", SimpleNamespace(make=make)),
    ):
        yield


def views_without_gradients(graph_module: fx.GraphModule) -> dict[int, bool]:
    """The outputs of Dynamo's graph, by number, that are views made with autograd off, or views of
    such, and whether they claim to require grad. No gradient goes through them."""
    if not graph_module.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
        return {}
    outputs: Any = graph_module.graph.output_node().args[0]
    metas = [output.meta if isinstance(output, fx.Node) else {} for output in outputs]
    values = [meta.get("example_value") for meta in metas]
    return {
        i: value.requires_grad
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value._is_view() and _leads_nowhere(value)
    }


def _leads_nowhere(view: torch.Tensor) -> bool:
    """Whether autograd, from a view on, does not come to what it is a view of."""
    end, step = view._base.grad_fn if view._base is not None else None, view.grad_fn
    while step is not None and step is not end and len(step.next_functions) == 1:
        step = step.next_functions[0][0]
    return step is None
