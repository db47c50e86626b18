"""Example values for the options `autocast` and `policies`.

Dynamo traced the graph without that region and without overrides, so `meta["example_value"]` holds
what eager gives without them. This pass runs the graph on fake tensors with them, writes down what
it gives, and notes in the context what becomes of the calls that are overridden. The graph is not
changed, but that calls of a nested compile region get bodies of their own where they have to.

It runs as well where Dynamo is mistaken about eager: `F.affine_grid` gives bfloat16 under autocast,
and on fake tensors float32 (_torch/kernels.py).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from .._logging import log
from .._torch.autocast import disable_autocast
from .._torch.dynamo_graphs import (
    GradMode,
    functorch_levels_restored,
    input_path,
    is_functorch_transform,
    is_higher_order_op,
)
from .._torch.fake_tensors import fake_mode_of, like, running
from .._torch.higher_order import is_selective
from .._torch.kernels import kernels_closed
from ..graphs import get_attribute, names_of
from ..policies.overrides import PolicyError
from ..policies.paths import parse_name
from ..regions import Placement, call_name, find_regions, is_region_node
from . import recipes
from .bodies import APART, STALE, Bodies
from .context import Context
from .nested_calls import NestedCalls
from .overriding import Overrider
from .passed_over import PassedOver
from .planning import refusal

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def propagate(graph_module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Set `meta["example_value"]` of every node to its value under `context.ambient` and
    `context.overrides`, and fill `context.overridden`.

    Raises:
        PolicyError: a call cannot be made as an override asks, or not any more after one.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [n.meta.get("example_value") for n in placeholders]
    fake_mode = fake_mode_of(inputs)
    if fake_mode is None:  # a graph without tensors for inputs makes its own
        fake_mode = fake_mode_of([n.meta.get("example_value") for n in graph_module.graph.nodes])
    if fake_mode is not None:
        passed_over = PassedOver(context.overrides)
        overrider = Overrider(
            context.overrides,
            context.validate,
            context.other_dtypes == "all",
            context.overridden,
            passed_over,
        )
        run = _Run(overrider, NestedCalls(context.overrides, graph_module), fake_mode)
        with running(fake_mode), functorch_levels_restored():
            # A call may write to its inputs; leaves that require grad are safe from that.
            copies = [_copy(value) for value in inputs]
            for node, value in zip(placeholders, copies, strict=True):
                owners = context.overrides.owners.get(parse_name(input_path(node) or ""))
                if owners is not None:
                    passed_over.weights[id(value)] = owners
            outside = Placement(context.ambient, None)
            run.graph(graph_module, copies, outside, torch.is_grad_enabled())
        names = names_of(graph_module)
        report = context.report
        report.overridden = {names[n]: o.asked for n, o in context.overridden.items()}
        report.entries = [*map(str, (*context.overrides.ops, *context.overrides.modules))]
        report.passed_over = passed_over.told()
        for told in report.passed_over:
            log.warning("%s", told)
    return graph_module


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return value.clone()
    return value


class _Run:
    """One run of a graph and of the bodies it calls in place."""

    def __init__(self, overrider: Overrider, nested: NestedCalls, fake_mode: Any) -> None:
        self._overrider = overrider
        self._nested = nested
        self._fake_mode = fake_mode

    def graph(
        self,
        module: fx.GraphModule,
        inputs: list[Any],
        outside: Placement,
        grad: bool,
        recorded: bool = True,
    ) -> Any:
        """Run a graph that stands at `outside`, and return its output.

        Args:
            grad: the grad mode at its beginning.
            recorded: False inside the forward of an autograd function. What it gives requires grad,
                though autograd records nothing of it.
        """
        placements = find_regions(module.graph, outside)
        bodies = Bodies(module)
        values: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        transforms = 0
        mode = GradMode(grad)
        for node in module.graph.nodes:
            inside = transforms
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            if node.op == "placeholder":
                values[node] = next(feed)
                _note(node, values)
            elif node.op == "get_attr":
                attribute = get_attribute(module, str(node.target))
                values[node] = node.meta.get("example_value", attribute)
            elif is_region_node(node):
                values[node] = None
            elif (body := bodies.of(node)) is not None:
                operands = list(args[body.call.first_operand :])
                records = bool(node.args[0]) if body.call.records_grad is None else mode.grad
                found = body.module
                if body.call.again:
                    found = self._nested.body_of(node, found, operands, placements[node], records)
                selective = records and is_selective(found)
                with kernels_closed() if selective else contextlib.nullcontext():
                    returned = self.graph(
                        found,
                        operands,
                        placements[node],
                        records,
                        recorded and body.call.records_grad is not False,
                    )
                values[node] = body.call.result(returned)
                _note(node, values)
            elif mode.follow(node):
                values[node] = None
            else:
                if str(node.target) in APART:
                    node.meta[STALE] = True  # its bodies are not run here
                if is_higher_order_op(node.target):
                    self._overrider.check_bodies(
                        module, node, placements[node], recorded and mode.grad, self._fake_mode
                    )
                transforms += is_functorch_transform(node.target)
                refused = refusal(node, bool(inside or transforms))
                records = recorded and mode.grad
                with torch.set_grad_enabled(mode.grad):
                    if is_functorch_transform(node.target):
                        values[node] = recipes.run(node.target, args, kwargs)
                        self._overrider.decide(
                            node, placements[node], records, self._fake_mode, refused
                        )
                    else:
                        self._call(node, values, placements[node], records, refused)
        return None

    def _call(
        self,
        node: fx.Node,
        values: dict[fx.Node, Any],
        placement: Placement,
        grad: bool,
        refused: str | None,
    ) -> None:
        """Note the value of a call under autocast, and then the one an override gives it."""
        overrider = self._overrider
        symbol = node.meta.get("example_value")
        if isinstance(symbol, _SYMBOLS):  # a size, or `item()`, which would raise or make a new one
            values[node] = symbol
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        try:
            # A module names a call only if autocast treats it, which its value tells.
            if not overrider.forces(node, placement, refused):
                # It may be an error, as of a `cat` of another lower precision than the region's;
                # and run once more, if nothing overrides it.
                with contextlib.suppress(RuntimeError), placement.state.applied():
                    values[node] = recipes.run(node.target, args, kwargs)
                if node in values:
                    _note(node, values)
            asked = overrider.decide(node, placement, grad, self._fake_mode, refused)
            if asked is None and node in values:
                return
            if asked is None or asked.recipe is None:
                state = placement.state if asked is None else asked.state
                with state.applied():
                    values[node] = recipes.run(node.target, args, kwargs)
            else:
                with disable_autocast():
                    values[node] = recipes.run(
                        *recipes.apply(asked.recipe, node, lambda _, n: values[n], recipes.run)
                    )
            _note(node, values)
        except PolicyError:
            raise
        except (RuntimeError, TypeError) as error:
            if not overrider.calls:
                raise
            raise PolicyError(
                f"option 'policies': {call_name(node)} raises {error}, after "
                f"{len(overrider.calls)} calls that are overridden, the first of them by "
                f"{overrider.first}. Let the override reach over this call too, or give its "
                "operands one dtype"
            ) from error


def _note(node: fx.Node, values: dict[fx.Node, Any]) -> None:
    """Write down the value of a node. Symbols stay those of the trace: what has as many elements as
    data says would make new ones."""
    if node.meta.get("unbacked_bindings"):
        values[node] = tree_map(like, node.meta.get("example_value"), values[node])
    if isinstance(values[node], _SYMBOLS):
        values[node] = node.meta.get("example_value", values[node])
    elif "example_value" in node.meta:
        node.meta["example_value"] = values[node]
