"""The weight plan of a graph: which casts of weights leave it, and when that pays.

A cast outside of the graph is made once for all calls within its lifetime. For a single call it
costs more than one inside, which the compiler puts right before its reader, while the weight is in
cache. So a graph is compiled

    casts outside     where autograd records them: in eager mode one cast collects the gradients of
                      all calls in a scope; and with weight_cache="version"
    casts inside      otherwise, at first; with the casts outside as well, once a second call comes
                      in one scope, with the same weights. Which of the two runs is then foretold by
                      the last scope.

On the CPU a large cast is always outside: no cache holds it until its reader comes, and outside it
has memory that is used again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import _logging
from .._torch.aot import compiling_again
from .._torch.configs import compile_configs, cuda_graphs_are_on, freezing_is_on
from .._torch.fake_tensors import numbers_as_first_traced
from .._torch.hooks import saved_tensor_hooks_are_on
from .._torch.modes import (
    in_function_mode,
    in_selective_checkpoint,
    outside_of_function_modes,
    outside_of_selective_checkpoints,
)
from ..guards import ShapeGuards
from ..reports.report import Report
from ..state import AutocastState
from .graph_weights import GraphWeights, Parts
from .hoisting import Hoisted, hoist, weight_casts
from .scope import Scope

log = _logging.log

USES_THAT_PAY = 2
"""Calls in one scope from which on a cast outside of the graph is faster than one in each call:
`benchmarks threshold`."""

LARGE_CAST_BYTES = 32 * 2**20
"""Casts on the CPU from which on one outside is faster even for a single call. glibc asks the
system for new pages for each allocation of this size (its greatest M_MMAP_THRESHOLD), and their
page faults take longer than the cast: `benchmarks decode`, a context per token."""

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
InScope = Callable[[Scope | None, Sequence[Any]], Any]
Weights = GraphWeights | Parts


class WeightPlan:
    """Which casts of one lowered graph leave it.

    Args:
        weight_cache: "scope", "version" or "off".
        ambient: the autocast state around the call.
        inductor: the config patches Inductor will get; None for another inner compiler.
        report: told of every cast of a weight.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        weight_cache: str,
        ambient: AutocastState,
        inductor: Mapping[str, Any] | None,
        report: Report,
    ) -> None:
        self._graph_module = graph_module
        self._inputs = inputs
        self._lasting = weight_cache == "version"
        self._scoped = bool(ambient.enabled_devices)
        self._keep_memory = inductor is not None and cuda_graphs_are_on(inductor)
        reason = _why_none(weight_cache, ambient, inductor)
        self._casts, told = weight_casts(graph_module, inputs, lasting=self._lasting)
        if reason is not None:
            self._casts = {}
            told = [replace(t, inside=reason) for t in told]
        if not self._lasting and not any(_records(cast) for cast in self._casts):
            later = {cast.name for cast in self._casts if not _is_large_on_cpu(cast)}
            told = [replace(t, from_second_call=t.node in later) for t in told]
        report.weights.extend(told)

    def compile(self, compile_graph: Compile) -> Callable[..., Any]:
        """Compile the graph, with its casts where the plan wants them."""
        if not self._casts:
            return compile_graph(self._graph_module, self._inputs)
        hoisted, weights = self._take_out(self._casts)
        large = {cast: i for cast, i in self._casts.items() if _is_large_on_cpu(cast)}
        if self._lasting or any(hoisted.grads) or len(large) == len(self._casts):
            return self._outside(hoisted, weights, compile_graph).call
        count = len(hoisted.weights)
        if large:
            partly, some = self._take_out(large)
            count -= len(partly.weights)
            inside: InScope = self._outside(partly, some, compile_graph).in_scope
        else:
            inside = _inside(compile_graph(self._graph_module, self._inputs))
        return _ByUse(hoisted, weights, inside, count, compile_graph).call

    def _take_out(self, casts: dict[fx.Node, int]) -> tuple[Hoisted, Weights]:
        hoisted = hoist(self._graph_module, self._inputs, casts)
        lasting = [self._lasting and static for static in hoisted.static]
        given = [hoisted.arguments[i] for i in hoisted.weights]
        sizes = [n for weight in given for n in (*weight.shape, *weight.stride())]
        parts = []
        # Side by side: the casts are to be made in their order, in which gradients get ready.
        for lifetime, run in itertools.groupby(range(len(lasting)), key=lasting.__getitem__):
            numbers = list(run)
            places = slice(numbers[0], numbers[-1] + 1)
            part = GraphWeights(
                hoisted.dtypes[places],
                hoisted.grads[places],
                lasting=lifetime,
                scoped=self._scoped,
                keep_memory=self._keep_memory,
                dynamic=any(isinstance(n, torch.SymInt) for n in sizes),
            )
            parts.append((places, part))
        return hoisted, parts[0][1] if len(parts) == 1 else Parts(parts)

    def _outside(self, hoisted: Hoisted, weights: Weights, compile_graph: Compile) -> _Outside:
        given = [self._inputs[i] for i in hoisted.kept] + hoisted.inputs[len(hoisted.kept) :]
        return _Outside(hoisted, weights, compile_graph(hoisted.graph_module, given))


class _Outside:
    """A compiled graph with the casts of its weights outside."""

    def __init__(self, hoisted: Hoisted, weights: Weights, code: Callable[..., Any]) -> None:
        self._kept = hoisted.kept
        self._positions = hoisted.weights
        self._older, self._newer = hoisted.older, hoisted.newer
        self._weights = weights
        self._code = code

    def call(self, *args: Any) -> Any:
        return self.in_scope(self._weights.scope(), args)

    def in_scope(self, scope: Scope | None, args: Sequence[Any]) -> Any:
        # Autocast casts below modes of functions. Of the two runs of a selective checkpoint one may
        # find casts that the other has to make.
        if in_function_mode() or in_selective_checkpoint():
            with outside_of_function_modes(), outside_of_selective_checkpoints():
                given = self._given(scope, args)
        else:
            given = self._given(scope, args)
        return self._code(*given)

    def _given(self, scope: Scope | None, args: Sequence[Any]) -> list[Any]:
        # Autograd runs newer nodes first: in this order a weight's gradients are added up.
        older = [_with_own_node(args[i]) for i in self._older]
        casts = self._weights.casts([args[i] for i in self._positions], scope)
        newer = [_with_own_node(args[i]) for i in self._newer]
        return [*(args[i] for i in self._kept), *older, *newer, *casts]


def _with_own_node(weight: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():  # the graph may switch autograd on itself
        return torch.ops.aten.alias.default(weight)


def _inside(code: Callable[..., Any]) -> InScope:
    return lambda scope, args: code(*args)


class _ByUse:
    """A graph compiled with its casts inside (but for large ones), and, from the second call in one
    scope on, with its casts outside, too. Autograd records none of them, so both give the same
    bits; but they save other tensors for the backward."""

    def __init__(
        self,
        hoisted: Hoisted,
        weights: Weights,
        inside: InScope,
        count_inside: int,
        compile_graph: Compile,
    ) -> None:
        self._inside = inside
        self._count_inside = count_inside
        self._outside: _Outside | None = None
        self._hoisted = hoisted
        self._weights = weights
        self._compile_graph = compile_graph
        self._configs = compile_configs()
        self._scope: Scope | None = None
        # By the first weight: the code of one block may serve many, each with its own.
        self._uses: dict[int, int] = {}
        self._uses_before: dict[int, int] = {}
        self._broken: Callable[[Sequence[Any]], str | None] | None = None

    def call(self, *args: Any) -> Any:
        scope = self._weights.scope()
        if torch.is_grad_enabled() and saved_tensor_hooks_are_on():
            # A checkpoint around the call gives the tensors that this saves what a later call does
            # in their order.
            return self._call_inside(scope, args)
        if scope is not self._scope:
            self._uses_before, self._uses, self._scope = self._uses, {}, scope
        first = id(args[self._hoisted.weights[0]])
        uses = self._uses[first] = self._uses.get(first, 0) + 1
        if scope is None or max(uses, self._uses_before.get(first, 0)) < USES_THAT_PAY:
            return self._call_inside(scope, args)
        outside = self._outside or self._compile()
        if self._broken is not None and self._broken(args):
            return self._call_inside(scope, args)
        return outside.in_scope(scope, args)

    def _call_inside(self, scope: Scope | None, args: Sequence[Any]) -> Any:
        GraphWeights.passed_over(self._count_inside)
        return self._inside(scope, args)

    def _compile(self) -> _Outside:
        hoisted = self._hoisted
        with compiling_again(hoisted.inputs), self._configs():
            if self._outside is not None:  # by another thread, meanwhile
                return self._outside
            log.info(
                "a second call in one scope: compiling with %d weights cast outside",
                len(hoisted.weights),
            )
            guards = ShapeGuards(hoisted.inputs)
            with numbers_as_first_traced(hoisted.inputs):
                code = self._compile_graph(hoisted.graph_module, hoisted.inputs)
            self._broken = guards.check(hoisted.arguments)
            self._outside = _Outside(hoisted, self._weights, code)
            return self._outside


def _records(cast: fx.Node) -> bool:
    return bool(cast.meta["example_value"].requires_grad)


def _is_large_on_cpu(cast: fx.Node) -> bool:
    result = cast.meta["example_value"]
    size = result.untyped_storage().nbytes()  # symbolic where the weight's shape is
    return result.is_cpu and isinstance(size, int) and size >= LARGE_CAST_BYTES


def _why_none(
    weight_cache: str, ambient: AutocastState, inductor: Mapping[str, Any] | None
) -> str | None:
    """Why no cast of a graph may leave it; None where they may."""
    if weight_cache == "off":
        return 'weight_cache="off"'
    if not ambient.cache_enabled:
        return "the weight cache is off: cache_enabled=False"
    if weight_cache == "scope" and not ambient.enabled_devices:
        return "no autocast context is around the call"
    if inductor is not None and not torch.is_grad_enabled() and freezing_is_on(inductor):
        return "Inductor's freezing makes weights constants"
    return None
