"""Calls inside `torch.func` transforms.

    _vmap_increment_nesting; x_1 = _add_batch_dim(x); y_1 = matmul(x_1, x_1);
    y = _remove_batch_dim(y_1); _vmap_decrement_nesting

Between the two ends, example values are wrappers of a transform level that no longer exists, so no
call can be asked about alone. The whole span is asked about instead, run from its inputs: as it is
under autocast, and with autocast off and the casts of the policy table in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from . import recipes
from ._torch.dynamo import functorch_levels_restored, is_functorch_transform
from .planning import Candidate
from .proving import looks_mutating
from .recipes import Recipe
from .state import AutocastState
from .validation import Failed, Observation, difference, is_weight, observe


def judge_transforms(candidates: list[Candidate], fake_mode: Any) -> None:
    """Settle what is to become of the candidates inside transforms: all calls of a span that is
    proved equal are lowered, or left alone."""
    if fake_mode is None:
        return
    for span in _spans(candidates):
        reason = _why_not(span)
        found: dict[fx.Node, Recipe] = {}
        if reason is None:
            eager = _watch(span, span[0].placement.state, fake_mode, {})
            reason = difference(eager, _watch(span, None, fake_mode, found), "ops")
        for c in span:
            c.refused = reason and f"{c.refused}: {reason}"
            c.recipe = None if reason else found.get(c.node)


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


def _why_not(span: list[Candidate]) -> str | None:
    first, last = span[0], span[-1]
    if last.position - first.position + 1 != len(span):
        return "a part of the transform stands under another autocast state"
    if any(c.placement.state != first.placement.state for c in span):
        return "it stands under more than one autocast state"
    for c in span:
        if c.node.op == "call_module" or isinstance(c.node.target, torch._ops.HigherOrderOperator):
            return f"{c.node.name} is not looked into"
        if looks_mutating(c.node):
            return f"{c.node.name} writes to its arguments"
    return None


class _CachedCast(Exception):
    """A weight is cast inside: eager's cache would share that with calls outside."""


def _watch(
    span: list[Candidate],
    state: AutocastState | None,
    fake_mode: Any,
    found: dict[fx.Node, Recipe],
) -> Observation | Failed:
    """Run a span under `state`; with None, autocast is off and the policy table gives the casts,
    which are put into `found`."""
    here = span[0].placement.state
    inside = {c.node for c in span}
    values: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return values[node] if node in values else node.meta.get("example_value")

    def run() -> Any:
        for c in span:
            recipe = None if state else recipes.build(c.node, here, value_of=value)
            if recipe:
                found[c.node] = recipe
                arguments = recipes.tensor_arguments(c.node)
                casts = [value(arguments[i]) for i, _ in recipe.casts]
                if any(here.cache_enabled and is_weight(t) for t in casts):
                    raise _CachedCast("a weight is cast inside, and eager's cache shares its cast")
            with torch.set_grad_enabled(c.grad):
                values[c.node] = recipes.run(
                    *recipes.apply(recipe or Recipe(), c.node, lambda _, n: value(n), recipes.run)
                )
        return [values[n] for n in values if n.users.keys() - inside]

    with functorch_levels_restored():
        return observe(run, state, fake_mode, span[0].grad, here.cache_enabled)
