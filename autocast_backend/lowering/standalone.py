"""`lower_autocast`: the compiler's lowering on its own, for any FX graph with example values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.autocast import wrap_with_autocast
from .._torch.fake_tensors import fake_mode_of
from .._torch.modes import outside_of_inference_mode
from .._torch.ops import is_dispatched
from ..graphs import check_graph_module, nodes_of
from ..policies.modules import bind
from ..policies.overrides import parse_overrides
from ..regions import hops_to_regions, regions_to_hops
from ..state import AutocastState
from ..validation.compare import is_weight, observe
from . import recipes
from .context import Context
from .lower import lower
from .propagate import propagate
from .proving import looks_mutating
from .separate import separate_bodies

_MOVE = torch.ops.aten.to.dtype_layout


def lower_autocast(
    graph_module: fx.GraphModule,
    *,
    ambient: AutocastState | Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    policies: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """Rewrite the autocast regions of a graph into smart casts.

    Args:
        graph_module: a graph of torch-level calls, as Dynamo gives it to a backend, or of ATen ops,
            as `torch.export` and `make_fx(pre_dispatch=True)` make it: its regions are enter and
            exit nodes or `wrap_with_autocast` calls. Every input and call has its value, a fake
            tensor, in `meta["example_value"]` or `meta["val"]`: that under eager autocast, without
            `ambient`. `make_fx` writes them with `tracing_mode` "fake" or "symbolic", and forgets
            which inputs require grad: see "Returns". The graph is left as it is.
        ambient: the autocast state around the graph: an `AutocastState`, the arguments of one
            `torch.autocast`, or a sequence of them. Regions inside the graph come on top. The
            values of all calls are computed anew under it, from those of the inputs.
        policies: overrides, as the option `policies` of the backend takes them. The names of
            modules are those that the nodes know (`meta["nn_module_stack"]`).

    Returns:
        A new graph, to be run with autocast off. Its smart casts hold no dtype of the tensors they
        get: the same graph serves float32, bfloat16, float16 and float64 inputs as eager autocast
        does. Calls without a policy of their own that were proved equal, and brackets, were proved
        for the dtypes of the example values. A custom op without a rule for autocast, whose kernel
        nobody sees, stays in a bracket. Brackets are written as the regions were. An input whose
        value is float32 and requires grad is cast once for all its uses, as eager's weight cache
        has it, where the graph does not switch that cache off (`make_fx` does in the regions that
        it writes), and its `w.float()` is `w` there, which is not so of one given in float64.
        Elsewhere the gradients of an input that is cast twice add up in float32.

    Raises:
        TypeError, ValueError: an argument that is not what it should be, a graph without example
            values or with those of several fake modes, or one with calls of submodules whose
            values are to be computed anew, for `ambient` or `policies`.
        PolicyError: an override that names no module, or that a call cannot take.
        RegionError: enter and exit nodes that do not pair up.
    """
    check_graph_module(graph_module)
    _check_one_fake_mode(graph_module)
    overrides = bind(parse_overrides("policies", policies), graph_module)
    flat, _ = hops_to_regions(graph_module)
    context = Context(
        AutocastState.of(ambient), other_dtypes="cast", overrides=overrides, watched=False
    )
    propagated = not context.ambient.enabled_devices
    if context.overrides or not propagated:
        _check_no_submodules(graph_module)
    lower_flat(flat, context, propagated)
    if any(n.target is wrap_with_autocast for n in nodes_of(graph_module)):
        flat, _ = regions_to_hops(flat)
    return flat


def _check_one_fake_mode(graph_module: fx.GraphModule) -> None:
    """Refuse values that no op can take together."""
    values = [n.meta.get("val", n.meta.get("example_value")) for n in graph_module.graph.nodes]
    modes = {id(mode) for value in values if (mode := fake_mode_of([value])) is not None}
    if len(modes) > 1:
        raise ValueError(
            f"graph_module: its example values are of {len(modes)} fake modes; expected those of "
            'one, as make_fx writes them with tracing_mode="fake" or "symbolic", and not with '
            '"real", its default'
        )


def _check_no_submodules(graph_module: fx.GraphModule) -> None:
    """Refuse calls of submodules: their parameters are no fake tensors."""
    for node in nodes_of(graph_module):
        if node.op == "call_module":
            raise ValueError(
                f"graph_module: node {node.name!r} calls the submodule {node.target!r}, whose "
                "value cannot be computed anew, as for ambient= and policies=; expected calls of "
                "functions, as Dynamo and make_fx write them, and torch.fx.symbolic_trace does not"
            )


def lower_flat(
    graph_module: fx.GraphModule, context: Context, propagated: bool = True
) -> fx.GraphModule:
    """`lower`, in place, for graphs that keep their values in `meta["val"]` too.

    Args:
        propagated: whether the values are those under `context.ambient` already.
    """
    # What a strict export leaves of Dynamo's example values is older than its values.
    traced = any("val" in n.meta for n in nodes_of(graph_module))
    if traced:
        _forget_dtypes_of_moves(graph_module)
    for node in nodes_of(graph_module):
        if traced and "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    with outside_of_inference_mode():
        separate_bodies(graph_module, context.outside, torch.is_grad_enabled())
        if context.overrides or not propagated:
            propagate(graph_module, context)
        elif traced:
            _know_weights_again(graph_module)
        lower(graph_module, context)
    for node in nodes_of(graph_module):
        if traced and "example_value" in node.meta:
            node.meta["val"] = node.meta.pop("example_value")
    return graph_module


def _forget_dtypes_of_moves(graph_module: fx.GraphModule) -> None:
    """Let `x.to(device)`, `x.cpu()` and `x.to(memory_format=...)` keep their tensor's dtype.

    PyTorch calls this overload for those alone, with the dtype that the tensor has when it is
    traced. A dtype that the user asks for is in another overload.
    """
    for node in nodes_of(graph_module):
        dtype = node.kwargs.get("dtype")
        if node.target is _MOVE and isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}


def _know_weights_again(graph_module: fx.GraphModule) -> None:
    """Give a call that returns the weight it gets (`w.to(device)`, `+w`) the value of that weight,
    as Dynamo does: it is one weight, cast once. An exported program has a value of its own there.

    Not `w.float()`: it returns another tensor, where the program is given a `w` of another dtype.
    """
    fake_mode = fake_mode_of(n.meta.get("example_value") for n in nodes_of(graph_module))
    for node in nodes_of(graph_module) if fake_mode is not None else ():
        if not is_dispatched(node.target) or looks_mutating(node):
            continue
        for read in node.all_input_nodes:
            value = read.meta.get("example_value")
            weight = isinstance(value, torch.Tensor) and is_weight(value)
            dtypes = (torch.float32, torch.float64)
            if weight and all(_returns(node, read, dtype, fake_mode) for dtype in dtypes):
                node.meta["example_value"] = value


def _returns(node: fx.Node, argument: fx.Node, dtype: torch.dtype, fake_mode: Any) -> bool:
    """Whether a call returns an argument that has a dtype."""
    values: dict[fx.Node, Any] = {n: n.meta.get("example_value") for n in node.all_input_nodes}
    result: list[Any] = []

    def call() -> None:
        values[argument] = values[argument].to(dtype)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        result.append(recipes.run(node.target, args, kwargs))

    observe(call, None, fake_mode, grad=True)
    return bool(result) and result[0] is values[argument]
