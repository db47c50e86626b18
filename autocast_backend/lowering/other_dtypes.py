"""Prove lowered calls for other dtypes than those they were traced with.

A call that autocast leaves alone for float32 need not be left alone for bfloat16: `pad` hides an op
that autocast runs in float32, and nothing of that is to be seen where the argument is float32. A
compiled graph never meets other dtypes - Dynamo traces anew - but an exported program does.

A graph of `lower_autocast` does, too. There the calls with casts are asked about, for the policy of
a name need not be the call's: `F.mse_loss` with a `weight` calls no `mse_loss`, and as long as its
arguments are float32, nobody sees that eager autocast does not cast them to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._torch.fake_tensors import observing
from ..policies.table import Policy
from ..state import AutocastState
from ..validation.compare import Failed, Observation, difference, observe
from ..validation.verdicts import key_of, names_an_address
from . import recipes
from .planning import Candidate
from .proving import looks_mutating
from .recipes import Recipe, tensor_arguments

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_SINGLE = 4  # arguments that are also changed alone; a call with more is a list of tensors

_Variant = Mapping[fx.Node, torch.dtype]
_Answer = tuple[str | None, Recipe | None]


def judge_other_dtypes(candidates: list[Candidate], fake_mode: Any) -> None:
    """Ask about every candidate again, with floating-point arguments of each of `DTYPES`: all of
    them, and each alone. What holds for one dtype only is refused, unless the casts that eager
    autocast makes for another dtype hold for all."""
    known: dict[str, _Answer] = {}
    for c in candidates:
        if c.refused is not None or c.overridden:
            continue
        if c.in_transform:
            c.refused = "a torch.func transform is proved for the dtypes it was traced with alone"
        else:
            key = key_of(c.node, c.recipe, c.placement.state, c.grad, strict=True)
            if key not in known:
                known[key] = _settle(c, fake_mode)
            c.refused, c.recipe = known[key]
        if c.refused is not None:
            # Nobody has asked whether the call may get casts where it stays under autocast: it may
            # read the weight as it is, too.
            c.shared = ()


def treats_other_dtypes(c: Candidate, fake_mode: Any, known: dict[str, bool]) -> bool:
    """Whether autocast treats a call without a policy where its arguments have other dtypes.

    Args:
        known: answers that were given before, to be kept by the caller.
    """
    key = key_of(c.node, None, c.placement.state, c.grad, strict=True)
    answer = known.get(key)
    if answer is None:
        variants, eager = _seen(c, fake_mode)
        answer = _failure(c, Recipe(), variants, eager, fake_mode) is not None
        if not names_an_address(key):  # example values are replaced between two questions
            known[key] = answer
    return answer


def _settle(c: Candidate, fake_mode: Any) -> _Answer:
    variants, eager = _seen(c, fake_mode)
    reason = _failure(c, c.recipe or Recipe(), variants, eager, fake_mode)
    if reason is None:
        return None, c.recipe
    for variant in variants:
        seen, values = _watch(c, Recipe(), c.placement.state, variant, fake_mode)
        if isinstance(seen, Failed):
            continue
        casts = []
        for i, n in enumerate(tensor_arguments(c.node)):
            if (dtype := seen.cast_to.get(id(values[n]))) is not None:
                full = dtype is torch.float32
                casts.append((i, Policy.FP32 if full else Policy.LOWER_PRECISION_FP))
        recipe = recipes.of_casts(c.node, c.placement.state, casts)
        traced = [*variants, {}]
        expected = [*eager, _watch(c, Recipe(), c.placement.state, {}, fake_mode)[0]]
        if _failure(c, recipe, traced, expected, fake_mode) is None:
            return None, recipe or None
    return reason, c.recipe


def _seen(c: Candidate, fake_mode: Any) -> tuple[list[_Variant], list[Observation | Failed]]:
    """Arguments of other dtypes, and what eager autocast does with each."""
    variants = list(_variants(c.node))
    return variants, [_watch(c, Recipe(), c.placement.state, v, fake_mode)[0] for v in variants]


def _failure(
    c: Candidate,
    recipe: Recipe,
    variants: list[_Variant],
    eager: list[Observation | Failed],
    fake_mode: Any,
) -> str | None:
    """Why `recipe` does not hold for every variant that eager autocast takes."""
    arguments = tensor_arguments(c.node)
    weights = {arguments[i] for i in c.shared}
    for variant, expected in zip(variants, eager, strict=True):
        if isinstance(expected, Failed):
            continue
        ours, _ = _watch(c, recipe, None, variant, fake_mode)
        if isinstance(ours, Observation) and not weights.isdisjoint(variant):
            # Of other weights than those in float32 eager's cache takes none: each use casts them.
            ours = replace(ours, casts=expected.casts)
        if (reason := difference(expected, ours, "ops")) is not None:
            changed = ", ".join(f"{n.name}: {str(dtype)[6:]}" for n, dtype in variant.items())
            return f"for other dtypes ({changed}) {reason}"
    return None


def _variants(node: fx.Node) -> Iterator[_Variant]:
    dtypes = {
        n: getattr(n.meta.get("example_value"), "dtype", None) for n in tensor_arguments(node)
    }
    floating = {n: dtype for n, dtype in dtypes.items() if dtype in DTYPES}
    for dtype in DTYPES:
        others = [n for n, traced in floating.items() if traced is not dtype]
        if others:
            yield dict.fromkeys(floating, dtype)
        if others and 1 < len(floating) <= _MOST_SINGLE:
            yield from ({n: dtype} for n in others)


def _watch(
    c: Candidate, recipe: Recipe, under: AutocastState | None, variant: _Variant, fake_mode: Any
) -> tuple[Observation | Failed, dict[fx.Node, Any]]:
    """What the call does with arguments of other dtypes, and these arguments."""
    copied = looks_mutating(c.node)
    values: dict[fx.Node, Any] = {}
    with observing(fake_mode):
        for n in tensor_arguments(c.node):
            value: Any = n.meta.get("example_value")
            if n in variant:
                value = value.detach().to(variant[n]).requires_grad_(value.requires_grad)
            if copied and isinstance(value, torch.Tensor):
                value = value.clone()
            values.setdefault(n, value)

    def call() -> Any:
        target, args, kwargs = recipes.apply(recipe, c.node, lambda _, n: values[n], recipes.run)
        return recipes.run(target, args, kwargs)

    cache = c.placement.state.cache_enabled
    return observe(call, under, fake_mode, c.grad, cache), values
