"""Ask validation about every candidate: is the lowered call equal to the call under autocast?"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch.autocast import disable_autocast, has_autocast_kernel
from .._torch.dynamo_graphs import requires_grad_changes_after
from .._torch.fake_tensors import observing, with_python_kernels
from .._torch.kernels import body_of_triton_op, kernels_closed
from .._torch.ops import overloads_of
from .._torch.tensors import storages_of
from ..policies.table import Policy
from ..reports.report import Report
from ..state import AutocastState
from ..validation.compare import (
    Failed,
    Observation,
    casts_again,
    difference,
    dtypes_of,
    is_weight,
    observe,
    observed,
)
from ..validation.verdicts import Verdict, Verdicts, comes_with_torch, key_of, names_an_address
from . import recipes
from .planning import Candidate, touches_tensors
from .recipes import Recipe, tensor_arguments


def judge(candidates: list[Candidate], fake_mode: Any, validate: str, report: Report) -> None:
    """Settle what is to become of every candidate, asking the same question once.

    Args:
        validate: "strict" or "dtype", which asks for the dtypes of results alone, but of composites
            without a rule; "off" asks nothing and believes the policy table.
    """
    for c in candidates:
        if c.overridden or validate == "off":
            c.shared = _as_in_the_end(c, _shared_by_name(c))
    if validate == "off":
        return
    strict = validate == "strict"
    asked = [c for c in candidates if c.refused is None and not c.overridden]
    keys = [_key(c, strict) for c in asked]
    verdicts = Verdicts(keys)
    for c, key in zip(asked, keys, strict=True):
        verdict = verdicts.get(key)
        if verdict is None:
            with _kernels_as_in_eager(c):
                verdict = _validate(c, fake_mode, strict)
                if strict and verdict.reason is None and (order := _order_seen(c, fake_mode)):
                    verdict = replace(verdict, order=order)
            verdicts.add(key, verdict)
            report.checked += 1
        c.refused, c.shared = verdict.reason, _as_in_the_end(c, verdict.shared)
        c.shared_within, c.keeps = verdict.within and bool(c.shared), verdict.keeps
        c.stale, c.mistraced = verdict.stale, verdict.mistraced
        if verdict.found is not None:
            found = [(i, Policy(name)) for i, name in verdict.found]
            c.recipe = recipes.of_casts(c.node, c.placement.state, found)
        if verdict.expanded:
            c.recipe = recipes.expanded(c.node)
        if verdict.order and c.recipe is not None:
            c.recipe = c.recipe.ordered(verdict.order)
    verdicts.save()


def _key(c: Candidate, strict: bool) -> str:
    with _kernels_as_in_eager(c):
        return key_of(c.node, c.recipe, c.placement.state, c.grad, strict)


def _kernels_as_in_eager(c: Candidate) -> contextlib.AbstractContextManager[None]:
    return kernels_closed() if c.selective else contextlib.nullcontext()


def _validate(c: Candidate, fake_mode: Any, strict: bool) -> Verdict:
    """Prove one call equal to itself under autocast, or say why it is not."""
    if fake_mode is None:
        return Verdict("its example value is not a fake tensor")
    state, again = c.placement.state, False
    if not comes_with_torch(c.node.target) and (weights := _weights(c)):
        # A user's rule may cast without eager's weight cache.
        anew = casts_again(lambda: follow(c.node, Recipe()), state, fake_mode, c.grad)
        again = not anew.isdisjoint(map(id, weights))
        state = replace(state, cache_enabled=not again)

    def watch(recipe: Recipe, under: AutocastState | None) -> Observation | Failed:
        return observe(
            lambda: follow(c.node, recipe), under, fake_mode, c.grad, state.cache_enabled
        )

    ours = watch(c.recipe or Recipe(), None)
    # Dynamo ran the call under autocast when it traced: its example value is eager's answer. Later
    # calls may have changed the value's shape in place, never its dtype.
    reason = difference(observed(c.node.meta.get("example_value")), ours, level="dtypes")
    # Of a composite that no rule names it says too little: what it hides may have rules. And fake
    # tensors have autocast off in a Triton op.
    is_triton_op = body_of_triton_op(c.node.target) is not None
    hides = is_triton_op or (
        isinstance(ours, Observation)
        and ((c.recipe is None and ours.is_composite) or ours.own_backward)
    )
    if reason is None and not strict and not hides:
        return Verdict(None, _shared_by_name(c))
    eager = watch(Recipe(), state)
    if isinstance(eager, Failed):  # kernels in a Triton op cannot be observed
        return Verdict(difference(eager, ours, level="ops"), stale=is_triton_op)
    reason = reason or difference(eager, ours, level="ops")
    stale = eager.dtypes != dtypes_of(c.node.meta.get("example_value"))
    if is_triton_op or (eager.own_backward and not _has_rule(c)):
        # Its backward gets what it was given, uncast; with a rule, that is cast above autograd.
        if reason is None and c.recipe:
            reason = "its backward is a formula of its own"
        return Verdict(reason, stale=stale)
    casts, shared = _casts_seen(c, eager, state)
    if reason is None:
        return Verdict(None, shared, order=tuple(i for i, _ in casts))
    # A composite, maybe: does it help to cast what eager was seen to cast, before the call? Or, for
    # one that casts views of its arguments, all of them?
    for tried in (casts, *_all_lower(c, eager)):
        if difference(eager, watch(recipes.of_casts(c.node, state, tried), None), "ops") is None:
            found = tuple((i, policy.value) for i, policy in tried)
            return Verdict(None, shared, found, order=tuple(i for i, _ in casts))
    expanded = recipes.expanded(c.node)
    if expanded and difference(eager, watch(expanded, None), "ops") is None:
        return Verdict(None, expanded=True)
    # It stays under autocast. May it at least read the weight casts that other calls read?
    given = recipes.of_casts(c.node, state, [cast for cast in casts if cast[0] in shared])
    finds = not again and difference(eager, watch(given, state), "ops") is None
    if finds and not _is_mistraced(c, given, eager, state, fake_mode):
        return Verdict(reason, shared, stale=stale)
    mistraced = _is_mistraced(c, Recipe(), eager, state, fake_mode)
    within = _finds_its_casts(c, given, state, fake_mode, eager)
    # A call that casts `again` past eager's cache may cast by the cache as well.
    keeps = (bool(shared) or again) and c.grad and not within
    shared = shared if within else ()
    return Verdict(reason, shared, within=within, keeps=keeps, stale=stale, mistraced=mistraced)


def _is_mistraced(
    c: Candidate, given: Recipe, eager: Observation, state: AutocastState, fake_mode: Any
) -> bool:
    """Whether AOTAutograd's trace of a call that is given some casts has other dtypes than eager
    autocast: PyTorch has a Python kernel for traces of some composites, of `lstm` for one, and
    autocast does not reach what it calls."""

    def traced() -> Any:
        with with_python_kernels():
            return follow(c.node, given)

    seen = observe(traced, state, fake_mode, c.grad, state.cache_enabled)
    return not isinstance(seen, Failed) and seen.dtypes != eager.dtypes


def _has_rule(c: Candidate) -> bool:
    """Whether the call is of an op that autocast has a rule for."""
    on = [d.device_type for d in c.placement.state.enabled_devices]
    return any(has_autocast_kernel(op, on) for op in overloads_of(c.node.target))


def _finds_its_casts(
    c: Candidate, given: Recipe, state: AutocastState, fake_mode: Any, eager: Observation
) -> bool:
    """Whether a call does what it does under eager autocast, but for the casts of weights, if it
    finds these. They are made before it, so it must not read the weights first: the order of calls
    is the order in which their gradients add up."""
    if not given or c.node.op != "call_function":
        return False
    values = [n.meta.get("example_value") for n in tensor_arguments(c.node)]
    weights = {id(values[i]) for i, _ in given.casts}
    if weights & set(eager.read_first):
        return False
    within = replace(given, within=True)
    with observing(fake_mode), torch.set_grad_enabled(c.grad), disable_autocast():
        call = recipes.apply(within, c.node, lambda i, _: values[i], recipes.run)
    ours = observe(lambda: recipes.run(*call), state, fake_mode, c.grad, state.cache_enabled)
    if isinstance(ours, Failed) or weights & ours.cast_to.keys():
        return False
    return difference(eager, replace(ours, casts=ours.casts + len(weights)), "ops") is None


def treats(c: Candidate, fake_mode: Any, validate: str, known: dict[str, bool]) -> bool:
    """Whether autocast treats a call: by the policy table, or because the call without casts is not
    proved equal.

    Args:
        known: answers that were given before, to be kept by the caller.
    """
    state = c.placement.state
    if c.refused is not None or recipes.build(c.node, state) is not None:
        return True
    if validate == "off" or not touches_tensors(c.node):
        return False
    key = key_of(c.node, None, state, c.grad, validate == "strict")
    answer = known.get(key)
    if answer is None:
        verdict = _validate(c, fake_mode, validate == "strict")
        answer = verdict.reason is not None or bool(verdict.found)
        if not names_an_address(key):  # example values are replaced between two questions
            known[key] = answer
    return answer


def _weights(c: Candidate) -> list[torch.Tensor]:
    """The values of arguments whose cast eager autocast would cache."""
    state = c.placement.state
    return [n.meta["example_value"] for n in tensor_arguments(c.node) if _is_cached(n, state)]


def _casts_seen(
    c: Candidate, eager: Observation, state: AutocastState
) -> tuple[list[tuple[int, Policy]], tuple[int, ...]]:
    """The arguments that eager autocast cast as they were given, and how, in its order; and the
    numbers of those whose cast it would keep in its weight cache."""
    arguments = tensor_arguments(c.node)
    numbers: dict[int, list[int]] = {}
    for i, n in enumerate(arguments):
        numbers.setdefault(id(n.meta.get("example_value")), []).append(i)
    casts, shared = [], []
    for value, dtype in eager.cast_to.items():
        full = dtype is torch.float32
        for i in numbers.get(value, ()):
            casts.append((i, Policy.FP32 if full else Policy.LOWER_PRECISION_FP))
            if not full and _is_cached(arguments[i], state):
                shared.append(i)
    return casts, tuple(shared)


def _all_lower(c: Candidate, eager: Observation) -> list[list[tuple[int, Policy]]]:
    """The casts of all floating-point arguments to the lower precision, where eager made none but
    such casts: as a list of one or no guesses."""
    if not eager.cast_to or torch.float32 in eager.cast_to.values():
        return []
    on = {d.device_type for d in c.placement.state.enabled_devices}
    values = [n.meta.get("example_value") for n in tensor_arguments(c.node)]
    castable = [
        (i, Policy.LOWER_PRECISION_FP)
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type in on
    ]
    return [castable]


def _order_seen(c: Candidate, fake_mode: Any) -> tuple[int, ...]:
    """The order in which eager autocast casts the arguments of a call, where one tensor is several
    of them: it is the order in which their gradients are added up."""
    values = [n.meta.get("example_value") for n in tensor_arguments(c.node)]
    floating = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if len(floating) == len(set(map(id, floating))) or looks_mutating(c.node):
        return ()
    with observing(fake_mode), torch.set_grad_enabled(c.grad):
        apart = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]

    def call() -> Any:
        return recipes.run(*recipes.apply(Recipe(), c.node, lambda i, _: apart[i], recipes.run))

    seen = observe(call, c.placement.state, fake_mode, c.grad, False)
    if isinstance(seen, Failed):
        return ()
    numbers = {id(value): i for i, value in enumerate(apart)}
    return tuple(numbers[key] for key in seen.cast_to if key in numbers)


def _shared_by_name(c: Candidate) -> tuple[int, ...]:
    """The casts that are shared, where nobody looks what eager does: those of weights that are
    arguments of a policy op itself, not of a composite."""
    if c.recipe is None or not c.recipe.direct:
        return ()
    arguments = tensor_arguments(c.node)
    return tuple(i for i, _ in c.recipe.casts if _is_cached(arguments[i], c.placement.state))


def _as_in_the_end(c: Candidate, shared: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the shared casts that are of what the value is when the call reads it: an example
    value tells what `requires_grad` was in the end."""
    arguments = tensor_arguments(c.node)
    return tuple(i for i in shared if not requires_grad_changes_after(c.node, arguments[i]))


def follow(node: fx.Node, recipe: Recipe) -> Any:
    """Run a call on the example values of its arguments."""
    fresh = replicas() if looks_mutating(node) else lambda value: value
    target, args, kwargs = recipes.apply(
        recipe, node, lambda _, n: fresh(n.meta.get("example_value")), recipes.run
    )
    return recipes.run(target, args, kwargs)


def written_and_returned(
    node: fx.Node, state: AutocastState | None, fake_mode: Any
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The arguments that a call writes to, and those whose memory it returns; none where it cannot
    run under `state` (None: autocast off)."""
    copied = replicas()
    versions: dict[fx.Node, int] = {}
    results: list[Any] = []

    def copy(_: int, argument: fx.Node) -> Any:
        value = copied(argument.meta.get("example_value"))
        if isinstance(value, torch.Tensor):
            versions[argument] = value._version
        return value

    def call() -> None:
        results.append(recipes.run(*recipes.apply(Recipe(), node, copy, recipes.run)))

    observe(call, state, fake_mode, grad=False)
    values = {argument: copied(argument.meta["example_value"]) for argument in versions}
    returned = storages_of(t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor))
    return (
        {a for a, version in versions.items() if values[a]._version != version},
        {a for a, value in values.items() if not returned.isdisjoint(storages_of([value]))},
    )


def looks_mutating(node: fx.Node) -> bool:
    """Whether a call may write to its arguments, metadata included: a second run on the same fake
    tensors would then see what the first one did."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.partition(".")[0]
    in_place = name.endswith("_") and not name.endswith("__")
    by_operator = node.target in _IN_PLACE_OPERATORS or name in ("setitem", "__setitem__")
    return in_place or by_operator or any(node.kwargs.get(key) for key in ("out", "inplace"))


_IN_PLACE_OPERATORS = frozenset(  # not `imatmul`: a tensor has none, and `x @= w` is `x = x @ w`
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imod"),
        *("imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
    )
)


def replicas() -> Callable[[Any], Any]:
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
