"""Calls inside `torch.func` transforms.

    _vmap_increment_nesting; x_1 = _add_batch_dim(x); y_1 = matmul(x_1, x_1);
    y = _remove_batch_dim(y_1); _vmap_decrement_nesting

Between the two ends, example values are wrappers of a transform level that no longer exists, so no
call can be asked about alone. The whole span is asked about instead, run from its inputs: as it is
under autocast, and with autocast off and the casts of the policy table in it. Casts of weights,
which other calls read too, stand where eager autocast makes them: autograd adds gradients up in the
order of the calls. Inside of a gradient, each call casts for itself: what it reads is a wrapper,
which eager's cache does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from .._torch.dynamo_graphs import (
    functorch_levels_restored,
    is_functorch_transform,
    is_gradient_transform,
    is_higher_order_op,
)
from .._torch.tensors import is_of_transform
from ..policies.table import Policy
from ..state import AutocastState
from ..validation.compare import (
    Failed,
    Observation,
    WeightCache,
    casts_again,
    difference,
    is_weight,
    observe,
)
from . import recipes
from .planning import Candidate
from .proving import looks_mutating, replicas
from .recipes import Recipe

Read = tuple[fx.Node, int]
"""A call, and the `id` of a weight that it reads."""

Given = dict[fx.Node, tuple[int, ...]]
"""Calls, and the numbers of their arguments that are weights, whose casts other calls read too."""


def judge_transforms(candidates: list[Candidate], fake_mode: Any) -> None:
    """Settle what is to become of the candidates inside transforms: all calls of a span that is
    proved equal are lowered, or left alone."""
    if fake_mode is None:
        return
    spans = list(_spans(candidates))
    casts = Counter(cast for c in candidates for cast in _casts_kept(c)) if spans else Counter()
    for span in spans:
        reason = _why_not(span)
        found: dict[fx.Node, Recipe] = {}
        given: Given | None = {}
        if reason is None:
            reason, given = _judge(span, fake_mode, found)
        elif any(casts[cast] > 1 for c in span for cast in _casts_kept(c)):
            given = None
        for c in span:
            c.keeps = given is None and c.grad
            c.refused = reason and f"{c.refused}: {reason}"
            c.recipe = None if reason else found.get(c.node)
            c.shared = (given or {}).get(c.node, ())


def _judge(
    span: list[Candidate], fake_mode: Any, found: dict[fx.Node, Recipe]
) -> tuple[str | None, Given | None]:
    """Why a span is not proved equal, and the weights whose casts it shares with other calls: None
    where eager autocast shares some, and it could not.

    Args:
        found: the casts of the policy table are put into it.
    """
    here, grad = span[0].placement.state, span[0].grad
    with functorch_levels_restored():
        running: list[fx.Node] = []

        def read(weight: torch.Tensor) -> Read:
            return running[-1], id(weight)

        def cached(weight: torch.Tensor) -> bool:
            return here.cache_enabled and read(weight) not in again

        def watch(
            under: AutocastState | None, weight_cache: WeightCache = cached, **arguments: Any
        ) -> Observation | Failed:
            call = partial(_run, span, running, **arguments)
            return observe(call, under, fake_mode, grad, weight_cache)

        again = casts_again(partial(_run, span, running), here, fake_mode, grad, read)
        eager = watch(here)
        if isinstance(eager, Failed):
            return difference(eager, eager, "ops"), {}
        reason = difference(eager, watch(None, found=found), "ops")
        if reason:
            # It stays under autocast. May it at least read the casts that other calls read?
            for rules in ({}, found):
                given = _weights_cast(span, eager, again, rules)
                if not given or not (
                    _wrapped(span, given)
                    or difference(eager, watch(here, given=given), "ops")
                    or _others_cast(eager, given, watch(here, weight_cache=False, given=given))
                ):
                    return reason, given
            return reason, None
        given = _weights_cast(span, eager, again, found)
        if _wrapped(span, given):
            return "autocast keeps a cast that it makes inside of a gradient", None
        # A weight that the transform slices is cast whole: before the call that slices it.
        sliced = {n: given[n] for n in given if n not in found}
        if sliced and (why := difference(eager, watch(None, found={}, given=sliced), "ops")):
            return why, None
        found |= {n: _casts_of_weights(n, here, sliced[n]) for n in sliced}
        return None, given


def _casts_kept(c: Candidate) -> list[tuple[int, Any]]:
    """The casts of weights that eager autocast keeps for a call, as far as the policy table knows:
    the `id` of each weight, and the scope."""
    state = c.placement.state
    if not c.grad or not state.cache_enabled:
        return []
    recipe = recipes.build(c.node, state) or Recipe()
    arguments = recipes.tensor_arguments(c.node)
    lower = {*c.shared, *(i for i, cast in recipe.casts if cast.op is not recipes.FULL)}
    values = [arguments[i].meta["example_value"] for i in sorted(lower)]
    weights = (value for value in values if not is_of_transform(value) and is_weight(value))
    return [(id(weight), c.placement.scope) for weight in weights]


def _spans(candidates: list[Candidate]) -> Iterator[list[Candidate]]:
    span: list[Candidate] = []
    depth = 0
    for c in candidates:
        depth += is_functorch_transform(c.node.target)
        if c.in_transform:
            span.append(c)
        if span and depth == 0:
            yield span
            span = []


def _wrapped(span: list[Candidate], given: Given) -> bool:
    """Whether a cast before one of the calls would give a gradient's wrapper, of no use outside. (A
    cast that `vmap` makes inside of a gradient is none, and eager's cache keeps it.)"""
    levels: list[bool] = []
    for c in span:
        if c.node in given and any(levels):
            return True
        if (change := is_functorch_transform(c.node.target)) > 0:
            levels.append(is_gradient_transform(c.node.target))
        elif change < 0:
            levels.pop()
    return False


def _why_not(span: list[Candidate]) -> str | None:
    first, last = span[0], span[-1]
    whole = last.position - first.position + 1 == len(span)
    if not whole or is_functorch_transform(first.node.target) != 1:  # a region inside of it
        return "a part of the transform stands under another autocast state"
    if any(c.placement.state != first.placement.state for c in span):
        return "it stands under more than one autocast state"
    if any(c.grad != first.grad for c in span):
        return "it switches gradients on or off"
    for c in span:
        if c.node.op == "call_module" or is_higher_order_op(c.node.target):
            return f"{c.node.name} is not looked into"
        if looks_mutating(c.node) and not c.grad:  # to a weight as well, whose cast may be cached
            return f"{c.node.name} writes to its arguments, and autograd does not see it"
    return None


class _CachedInside(Exception):
    """`torch.func.grad` makes leaves of its own, whose casts eager autocast keeps as well."""


def _weights_cast(
    span: list[Candidate],
    eager: Observation,
    again: Collection[Read],
    found: Mapping[fx.Node, Recipe],
) -> Given:
    """The weights that eager autocast was seen to cast, and keeps the casts of. Calls that are not
    in `found` are taken to cast a weight only where none in it does.

    Args:
        again: the calls that cast a weight anew, whatever is kept.
    """
    inside = {c.node for c in span}
    readers: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for c in span:
        for i, n in enumerate(recipes.tensor_arguments(c.node)):
            key = id(n.meta.get("example_value"))
            if n not in inside and key in eager.kept and (c.node, key) not in again:
                readers.setdefault(n, []).append((c.node, i))
    given: Given = {}
    for calls in readers.values():
        by_rule = [(n, i) for n, i in calls if n in found and i in dict(found[n].casts)]
        for node, i in by_rule or calls:
            given[node] = (*given.get(node, ()), i)
    return given


def _others_cast(eager: Observation, given: Given, uncached: Observation | Failed) -> bool:
    """Whether calls that are not given the cast of a weight make one themselves.

    Args:
        uncached: of the span, given casts, where each cast of a weight counts.
    """
    assert isinstance(uncached, Observation)  # as with casts of one weight counted as one
    places = [recipes.tensor_arguments(n)[i] for n, numbers in given.items() for i in numbers]
    return uncached.casts - eager.casts > len(places) - len(set(places))


def _run(
    span: list[Candidate],
    running: list[fx.Node],
    found: dict[fx.Node, Recipe] | None = None,
    given: Given | None = None,
) -> Any:
    """Run a span, and return what others read of it.

    Args:
        running: the call that runs is put onto its end.
        found: make the casts of the policy table, and put them into it.
        given: cast these weights before the calls.
    """
    here = span[0].placement.state
    values: dict[fx.Node, Any] = {}
    leaves: list[fx.Node] = []  # of the transform, each as often as it is cast
    fresh = replicas() if any(looks_mutating(c.node) for c in span) else lambda value: value

    def value(node: fx.Node) -> Any:
        if node in values:
            return values[node]
        outside = node.meta.get("example_value")
        kept = isinstance(outside, torch.Tensor) and is_weight(outside)
        return outside if kept else fresh(outside)

    for c in span:
        running.append(c.node)
        recipe: Recipe | None = None
        if found is not None and (recipe := recipes.build(c.node, here, value_of=value)):
            found[c.node] = recipe
            cast = [recipes.tensor_arguments(c.node)[i] for i, _ in recipe.casts]
            leaves += [n for n in cast if n in values and is_weight(values[n])]
            if here.cache_enabled and len(leaves) > len(set(leaves)):
                raise _CachedInside("eager's cache shares the cast of a leaf of the transform")
        if given and c.node in given:
            recipe = _casts_of_weights(c.node, here, given[c.node])
        with torch.set_grad_enabled(c.grad):
            values[c.node] = recipes.run(
                *recipes.apply(recipe or Recipe(), c.node, lambda _, n: value(n), recipes.run)
            )
    inside = {c.node for c in span}
    return [values[n] for n in values if n.users.keys() - inside]


def _casts_of_weights(node: fx.Node, here: AutocastState, arguments: tuple[int, ...]) -> Recipe:
    return recipes.of_casts(node, here, [(i, Policy.LOWER_PRECISION_FP) for i in arguments])
