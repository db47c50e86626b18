"""The plan of a lowering: which calls stand inside a region, and what the policy table says.

Nothing is changed yet, and nothing is proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .._torch.dynamo_graphs import (
    GradMode,
    is_functorch_transform,
    is_higher_order_op,
    runs_backward,
)
from .._torch.higher_order import is_selective
from ..regions import Placement, find_regions, is_region_node
from ..state import AutocastState
from . import recipes
from .bodies import APART, STALE, Bodies
from .recipes import Recipe, tensor_arguments


@dataclass
class Candidate:
    """A call inside a region, and what is to become of it.

    Attributes:
        node: the call.
        position: its place among the nodes of its graph, `get_attr` nodes not counted.
        placement: the autocast state and the scope it stands under.
        grad: whether autograd records there.
        recipe: the casts to write; None where the call is left alone.
        refused: why it stays under autocast; None where it does not.
        shared: numbers of the arguments whose cast other calls read too.
        keeps: whether it casts weights for itself alone, where eager autocast shares these casts.
        shared_within: whether the call gets these arguments as they are, and finds their casts.
        in_transform: whether it stands inside a `torch.func` transform, so that example values are
            of no use.
        selective: whether it stands inside a selective checkpoint.
        overridden: whether the recipe is a user's wish, which autocast does not judge.
        stale: whether eager autocast was seen to give another dtype than the example value has.
        mistraced: whether AOTAutograd's trace of it would give another dtype than eager does.
    """

    node: fx.Node
    position: int
    placement: Placement
    grad: bool
    recipe: Recipe | None = None
    refused: str | None = None
    shared: tuple[int, ...] = ()
    keeps: bool = False
    shared_within: bool = False
    in_transform: bool = False
    selective: bool = False
    overridden: bool = False
    stale: bool = False
    mistraced: bool = False


@dataclass
class Plan:
    """One graph - the outermost one or the body of a higher-order op - and its candidates.

    Attributes:
        retraced: whether PyTorch runs it several times on the same leaves while it is compiled.
    """

    module: fx.GraphModule
    retraced: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    regions: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Overridden:
    """A call that the option `policies` names.

    Attributes:
        state: the autocast state it is lowered for.
        recipe: the casts it gets, whatever autocast would do; None: what autocast does in `state`.
        asked: the entry of the option, for reports.
    """

    state: AutocastState
    recipe: Recipe | None
    asked: str = ""


def plan_graph(
    module: fx.GraphModule,
    outside: Placement,
    grad: bool,
    overridden: Mapping[fx.Node, Overridden],
    retraced: bool = False,
    selective: bool = False,
) -> Iterator[Plan]:
    """The plan of a graph that stands at `outside`, then those of the bodies it runs in place.

    Raises:
        RegionError: enter and exit nodes that do not pair up.
    """
    placements = find_regions(module.graph, outside)
    plan = Plan(module, retraced)
    selective = selective or (grad and is_selective(module))
    bodies = Bodies(module)
    alike = _called_alike(module, bodies, placements, grad)
    transforms = 0  # how many torch.func transforms are open
    mode = GradMode(grad)
    inner: list[tuple[fx.GraphModule, Placement, bool, bool]] = []
    for position, node in enumerate(n for n in module.graph.nodes if n.op != "get_attr"):
        if is_region_node(node):
            plan.regions.append(node)
            continue
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        mode.follow(node)
        inside = transforms
        transforms += is_functorch_transform(node.target)
        candidate = Candidate(node, position, placements[node], mode.grad, selective=selective)
        body = bodies.of(node) if is_higher_order_op(node.target) else None
        if body is not None and body.module in alike:
            body_grad = body.call.grad_mode(node, mode.grad)
            found = (body.module, placements[node], body_grad, retraced or body.call.retraced)
            inner += [] if found in inner else [found]
            continue
        if not (inside or transforms) and (apart := bodies.apart(node, mode.grad)):
            inner += [(found, placements[node], False, retraced) for found in apart]
            continue
        candidate.in_transform = bool(inside or transforms)
        candidate.refused = refusal(node, candidate.in_transform)
        if candidate.refused is None and not touches_tensors(node):
            continue
        if (asked := overridden.get(node)) is not None:
            candidate.placement = replace(placements[node], state=asked.state)
            candidate.recipe, candidate.overridden = asked.recipe, asked.recipe is not None
        if candidate.placement.state.enabled_devices:
            if candidate.refused is None and not candidate.overridden:
                candidate.recipe = recipes.build(node, candidate.placement.state)
            plan.candidates.append(candidate)
    yield plan
    for body_module, placement, body_grad, traced in inner:
        yield from plan_graph(body_module, placement, body_grad, overridden, traced, selective)


def _called_alike(
    module: fx.GraphModule, bodies: Bodies, placements: Mapping[fx.Node, Placement], grad: bool
) -> set[fx.GraphModule]:
    """The bodies that all their calls find in one state, with operands of the dtypes that their
    example values have. (Dynamo writes `torch.no_grad()` into the graph: a body that is called
    inside and outside of it is called in two states.)"""
    found: dict[fx.GraphModule, set[Any]] = {}
    mode = GradMode(grad)
    for node in module.graph.nodes:
        mode.follow(node)
        if is_higher_order_op(node.target) and (body := bodies.of(node)) is not None:
            inputs = body.module.graph.find_nodes(op="placeholder")
            operands = node.args[body.call.first_operand :]
            fits = not body.call.again or _dtypes(inputs) == _dtypes(operands)
            found.setdefault(body.module, set()).add((placements[node], mode.grad, fits))
    return {
        body for body, calls in found.items() if len(calls) == 1 and all(fits for *_, fits in calls)
    }


def _dtypes(nodes: Sequence[Any]) -> list[torch.dtype | None]:
    values = (n.meta.get("example_value") if isinstance(n, fx.Node) else n for n in nodes)
    return [getattr(value, "dtype", None) for value in values]


def refusal(node: fx.Node, inside_transform: bool) -> str | None:
    """Why a call is not even tried; None where it is."""
    if is_higher_order_op(node.target):
        if STALE in node.meta:
            return (
                f"the higher-order op {node.target} is not lowered where the values of a graph are "
                "computed anew, as for overrides, another ambient state or another device type"
            )
        if str(node.target) in APART:
            return f"the higher-order op {node.target} is lowered without gradients only"
        return f"the higher-order op {node.target} is not lowered yet"
    if node.op == "call_module":
        return "a call of a submodule is not looked into"
    if runs_backward(node.target):
        return "it runs the backward of calls before it"
    return "it stands inside a torch.func transform" if inside_transform else None


def touches_tensors(node: fx.Node) -> bool:
    """Whether tensors go into a call or come out of it."""
    values = [node.meta.get("example_value")]
    values += [n.meta.get("example_value") for n in tensor_arguments(node)]
    return any(isinstance(v, (torch.Tensor, tuple, list)) for v in values)
