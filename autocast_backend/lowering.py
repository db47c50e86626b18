"""Lowering: rewrite autocast regions into smart casts, with autocast off.

    enter = _enter_autocast("cpu", torch.bfloat16, True, None)
    h = linear(x, w, b)
    y = cat([h, x])
    _exit_autocast(enter)

becomes

    x_cast = autocast_to_bf16(x)
    w_cast = autocast_to_bf16(w)
    b_cast = autocast_to_bf16(b)
    h = linear(x_cast, w_cast, b_cast)
    wide = promote([h, x])
    y = cat([wide[0], wide[1]])

Left alone: nodes outside every region; nodes that autocast does not change; `out=` and in-place
calls, which eager autocast does not change either.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from . import recipes
from ._torch import (
    disable_autocast,
    enter_autocast,
    exit_autocast,
    fake_mode_of,
    is_functorch_transform,
    is_higher_order_op,
    is_set_grad_enabled,
    observing,
)
from .bodies import Bodies
from .policies import Policy
from .recipes import Recipe, tensor_arguments
from .regions import Placement, find_regions, is_region_node, source_line
from .report import Bracketed, Report
from .state import AutocastState
from .validation import Failed, Observation, difference, is_weight, observe, observed
from .verdicts import Verdict, Verdicts, key_of


@dataclass(frozen=True)
class Context:
    """What a pass needs to know besides the graph.

    Attributes:
        ambient: the autocast state around the compiled call.
        validate: "dtype", "strict" or "off".
        report: filled in as the passes run.
    """

    ambient: AutocastState
    validate: str = "strict"
    report: Report = field(default_factory=Report)


@dataclass
class _Candidate:
    """A call inside a region, and what is to become of it."""

    node: fx.Node
    position: int  # among the calls of its graph
    placement: Placement
    grad: bool
    recipe: Recipe | None = None
    key: str = ""
    refused: str | None = None  # why it is bracketed
    shared: tuple[int, ...] = ()  # numbers of arguments whose cast is shared


@dataclass
class _Plan:
    """One graph - the outermost one or the body of a higher-order op - and its candidates."""

    module: fx.GraphModule
    candidates: list[_Candidate] = field(default_factory=list)
    regions: list[fx.Node] = field(default_factory=list)


def lower(graph_module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Lower every region of `graph_module` in place, and return it.

    Every call node needs the value it had under eager autocast in `meta["example_value"]`, as
    Dynamo's graphs have.

    Raises:
        RegionError: the graph's enter and exit nodes do not pair up.
    """
    report = context.report
    with report.timed("regions"):
        scope = 0 if context.ambient.enabled_devices else None
        outside = Placement(context.ambient, scope)
        plans = list(_plan(graph_module, outside, torch.is_grad_enabled()))
    candidates = [c for plan in plans for c in plan.candidates]
    fake_mode = fake_mode_of([c.node.meta.get("example_value") for c in candidates])
    with report.timed("validation"):
        _judge(candidates, fake_mode, context)
    with report.timed("lowering"):
        for plan in plans:
            _Writer(plan, fake_mode, report).write()
    return graph_module


# --- plan ----------------------------------------------------------------------------------------


def _plan(module: fx.GraphModule, outside: Placement, grad: bool) -> Iterator[_Plan]:
    placements = find_regions(module.graph, outside)
    plan = _Plan(module)
    bodies = Bodies(module)
    transforms = 0  # how many torch.func transforms are open
    inner: list[tuple[fx.GraphModule, Placement, bool]] = []
    for position, node in enumerate(n for n in module.graph.nodes if n.op != "get_attr"):
        if is_region_node(node):
            plan.regions.append(node)
            continue
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        if is_set_grad_enabled(node.target):
            grad = bool(node.args[0])
        inside = transforms
        transforms += is_functorch_transform(node.target)
        candidate = _Candidate(node, position, placements[node], grad)
        if is_higher_order_op(node.target):
            if (body := bodies.of(node)) is not None:
                inner.append((body.module, placements[node], grad and body.call.records_grad))
                continue
            candidate.refused = f"the higher-order op {node.target} is not lowered yet"
        elif node.op == "call_module":
            candidate.refused = "a call of a submodule is not looked into"
        elif inside or transforms:
            candidate.refused = "it stands inside a torch.func transform"
        elif not _touches_tensors(node):
            continue
        if placements[node].state.enabled_devices:
            if candidate.refused is None:
                candidate.recipe = recipes.build(node, placements[node].state)
            plan.candidates.append(candidate)
    yield plan
    for body_module, placement, body_grad in inner:
        yield from _plan(body_module, placement, body_grad)


def _touches_tensors(node: fx.Node) -> bool:
    values = [node.meta.get("example_value")]
    values += [n.meta.get("example_value") for n in tensor_arguments(node)]
    return any(isinstance(v, (torch.Tensor, tuple, list)) for v in values)


# --- judge ---------------------------------------------------------------------------------------


def _judge(candidates: list[_Candidate], fake_mode: Any, context: Context) -> None:
    """Ask validation about every candidate, the same question once."""
    if context.validate == "off":
        for c in candidates:
            c.shared = _shared_by_name(c)
        return
    strict = context.validate == "strict"
    asked = [c for c in candidates if c.refused is None]
    for c in asked:
        c.key = key_of(c.node, c.recipe, c.placement.state, c.grad, strict)
    verdicts = Verdicts(c.key for c in asked)
    for c in asked:
        verdict = verdicts.get(c.key)
        if verdict is None:
            verdict = _validate(c, fake_mode, strict)
            verdicts.add(c.key, verdict)
            context.report.checked += 1
        c.refused, c.shared = verdict.reason, verdict.shared
        if verdict.found is not None:
            found = [(i, Policy(name)) for i, name in verdict.found]
            c.recipe = recipes.of_casts(c.node, c.placement.state, found)
    verdicts.save()


def _validate(c: _Candidate, fake_mode: Any, strict: bool) -> Verdict:
    """Prove one call equal to itself under autocast, or say why it is not."""
    if fake_mode is None:
        return Verdict("its example value is not a fake tensor")
    state = c.placement.state

    def watch(recipe: Recipe, under: AutocastState | None) -> Observation | Failed:
        return observe(
            lambda: _follow(c.node, recipe), under, fake_mode, c.grad, state.cache_enabled
        )

    ours = watch(c.recipe or Recipe(), None)
    # Dynamo ran the call under autocast when it traced: its example value is eager's answer. Later
    # calls may have changed the value's shape in place, never its dtype.
    reason = difference(observed(c.node.meta.get("example_value")), ours, level="dtypes")
    if reason is None and not strict:
        return Verdict(None, _shared_by_name(c))
    eager = watch(Recipe(), state)
    if isinstance(eager, Failed):
        return Verdict(difference(eager, ours, level="ops"))
    reason = reason or difference(eager, ours, level="ops")
    casts, shared = _casts_seen(c, eager)
    if reason is None:
        return Verdict(None, shared)
    # A composite, maybe: does it help to cast what eager was seen to cast, before the call?
    if difference(eager, watch(recipes.of_casts(c.node, state, casts), None), "ops") is None:
        return Verdict(None, shared, tuple((i, policy.value) for i, policy in casts))
    # It stays under autocast. May it at least read the weight casts that other calls read?
    given = recipes.of_casts(c.node, state, [cast for cast in casts if cast[0] in shared])
    shareable = difference(eager, watch(given, state), "ops") is None
    return Verdict(reason, shared if shareable else ())


def _casts_seen(
    c: _Candidate, eager: Observation
) -> tuple[list[tuple[int, Policy]], tuple[int, ...]]:
    """The arguments that eager autocast cast as they were given, and how; and the numbers of those
    whose cast it would keep in its weight cache."""
    casts, shared = [], []
    for i, n in enumerate(tensor_arguments(c.node)):
        dtype = eager.cast_to.get(id(n.meta.get("example_value")))
        if dtype is None:
            continue
        full = dtype is torch.float32
        casts.append((i, Policy.FP32 if full else Policy.LOWER_PRECISION_FP))
        if not full and _is_cached(n, c.placement.state):
            shared.append(i)
    return casts, tuple(shared)


def _shared_by_name(c: _Candidate) -> tuple[int, ...]:
    """The casts that are shared, where nobody looks what eager does: those of weights that are
    arguments of a policy op itself, not of a composite."""
    if c.recipe is None or not c.recipe.direct:
        return ()
    arguments = tensor_arguments(c.node)
    return tuple(i for i, _ in c.recipe.casts if _is_cached(arguments[i], c.placement.state))


def _follow(node: fx.Node, recipe: Recipe) -> Any:
    """Run a call on the example values of its arguments."""
    fresh = _replicas() if _looks_mutating(node) else lambda value: value
    target, args, kwargs = recipes.apply(
        recipe, node, lambda _, n: fresh(n.meta.get("example_value")), recipes.run
    )
    return recipes.run(target, args, kwargs)


def _looks_mutating(node: fx.Node) -> bool:
    """Whether a call may write to its arguments, metadata included: a second run on the same fake
    tensors would then see what the first one did."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.partition(".")[0]
    in_place = name.endswith("_") and not name.endswith("__")
    by_operator = node.target in _IN_PLACE_OPERATORS or name in ("setitem", "__setitem__")
    return in_place or by_operator or bool({"out", "inplace"} & node.kwargs.keys())


_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod"),
        *("imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
    )
)


def _replicas() -> Callable[[Any], Any]:
    """Copies of example values; the same value gets the same copy."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]

    return copy


def _is_cached(node: fx.Node, state: AutocastState) -> bool:
    """Whether eager autocast would cache the lower-precision cast of this value."""
    value = node.meta.get("example_value")
    return (
        isinstance(value, torch.Tensor)
        and is_weight(value)
        and state.cache_enabled
        and state.device(value.device.type).enabled
    )


# --- write ---------------------------------------------------------------------------------------


class _Writer:
    """Writes the plan of one graph into it."""

    def __init__(self, plan: _Plan, fake_mode: Any, report: Report) -> None:
        self.module = plan.module
        self.graph = plan.module.graph
        self.plan = plan
        self.fake_mode = fake_mode
        self.report = report
        # The casts eager autocast would find in its cache: one per weight, scope and grad mode.
        self.weight_casts: dict[tuple[Any, ...], fx.Node] = {}

    def write(self) -> None:
        for c in self.plan.candidates:
            if c.refused is not None:
                # In eager, these casts come from the cache; a bracket is traced without one.
                weights = [(i, Policy.LOWER_PRECISION_FP) for i in c.shared]
                self._rewrite(c, recipes.of_casts(c.node, c.placement.state, weights))
                self.report.bracketed.append(_bracketed(c))
            elif c.recipe:
                self._rewrite(c, c.recipe)
                self.report.lowered += 1
            else:
                self.report.untouched += 1
        for run in _runs([c for c in self.plan.candidates if c.refused is not None]):
            self._bracket(run)
        for node in reversed(self.plan.regions):
            self.graph.erase_node(node)
        self.module.recompile()

    def _rewrite(self, c: _Candidate, recipe: Recipe) -> None:
        if not recipe:
            return
        node = c.node
        with self.graph.inserting_before(node):
            target, args, kwargs = recipes.apply(recipe, node, lambda _, n: n, self._caller(c))
        if target is not node.target:
            node.op, node.target = "call_function", target
        node.args, node.kwargs = args, kwargs

    def _caller(self, c: _Candidate) -> recipes.Call:
        """Adds calls to the graph; the cast of a shared weight only where it is not there yet."""
        arguments = tensor_arguments(c.node)
        shared = {arguments[i] for i in c.shared}

        def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
            if not isinstance(args[0], fx.Node) or args[0] not in shared:
                return self._add(c, target, args, kwargs)
            key = (args[0], target, args[1:], c.placement.scope, c.grad)
            if key not in self.weight_casts:
                self.weight_casts[key] = self._add(c, target, args, kwargs)
            return self.weight_casts[key]

        return call

    def _add(self, c: _Candidate, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        if self.fake_mode is not None:
            values = fx.node.map_arg((args, kwargs), lambda n: n.meta.get("example_value"))
            with observing(self.fake_mode), torch.set_grad_enabled(c.grad), disable_autocast():
                node.meta["example_value"] = target(*values[0], **values[1])
        for name in ("stack_trace", "nn_module_stack"):
            if name in c.node.meta:
                node.meta[name] = c.node.meta[name]
        self.report.casts += target is not operator.getitem
        return node

    def _bracket(self, run: list[_Candidate]) -> None:
        state = run[0].placement.state
        # None: as it is around. AOTAutograd traces with the weight cache off, because the tensors
        # it would keep belong to the trace; a bracket must not switch it on again.
        cache = None if state.cache_enabled else False
        with self.graph.inserting_before(run[0].node):
            entered = [
                self.graph.call_function(enter_autocast, (d.device_type, d.dtype, True, cache))
                for d in state.enabled_devices
            ]
        at = run[-1].node
        for enter in reversed(entered):
            with self.graph.inserting_after(at):
                at = self.graph.call_function(exit_autocast, (enter,))


def _runs(refused: list[_Candidate]) -> Iterator[list[_Candidate]]:
    """Maximal runs of neighbours under one state: each gets one bracket."""
    numbered = enumerate(refused)
    for _, run in itertools.groupby(
        numbered, lambda pair: (pair[1].position - pair[0], pair[1].placement.state)
    ):
        yield [c for _, c in run]


def _bracketed(c: _Candidate) -> Bracketed:
    target = c.node.target
    call = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return Bracketed(c.node.name, call, c.refused or "", source_line(c.node))
