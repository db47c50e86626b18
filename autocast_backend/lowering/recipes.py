"""A policy, applied to one call: which of its arguments pass through which smart cast.

A recipe is data; `apply` follows it once with fake tensors, to see what it does, and once with
graph nodes, to write it down. So what was checked is what is built.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx

from .. import ops as _ops  # noqa: F401  (defines torch.ops.smart_autocast)
from .._torch.ops import OpOverload, arguments_of
from ..policies.table import COMPOSITES, Policy, find_policy, op_name
from ..state import AutocastState, DeviceAutocast
from .expansions import EXPANSIONS, Caller
from .given import finding_casts

_SMART, _ATEN = torch.ops.smart_autocast, torch.ops.aten
FULL = _SMART.autocast_to_full_precision.default
_LOWER = {
    torch.bfloat16: _SMART.autocast_to_bf16.default,
    torch.float16: _SMART.autocast_to_fp16.default,
}

# Overloads that take a dtype, for each op of the policy fp32_set_opt_dtype. A call takes the first
# one its arguments fit.
_WITH_DTYPE = {
    "cumprod": ("cumprod",),
    "cumsum": ("cumsum",),
    "linalg_matrix_norm": ("linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    "linalg_norm": ("linalg_norm", "linalg_norm.ord_str"),
    "linalg_vector_norm": ("linalg_vector_norm",),
    "log_softmax": ("log_softmax.int",),
    "prod": ("prod", "prod.dim_int"),
    "softmax": ("softmax.int",),
    "sum": ("sum", "sum.dim_IntList"),
}
# The overload that needs a dtype, for each op of the policy fp32_append_dtype.
_APPENDED = {
    "norm.Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
    "norm.ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
}


@dataclass(frozen=True)
class Cast:
    """One smart cast: the op, and what it takes besides the tensor."""

    op: OpOverload
    args: tuple[Any, ...] = ()
    device_type: str | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"device_type": self.device_type} if self.device_type else {}


@dataclass(frozen=True)
class Recipe:
    """What to do with the tensor arguments of a call, numbered in order of appearance.

    Attributes:
        casts: argument number -> the cast it passes through, in the order in which they are made.
            That decides the order in which gradients add up, and get ready. Where nobody has seen
            how eager autocast does it, the last argument of a policy op comes first: C++ leaves
            that to the compiler, and it is what GCC does, which builds PyTorch for Linux.
        promoted: groups of arguments that pass through `promote` together, each with the device
            type it is limited to.
        with_dtype: the overload to call instead, with `full_precision_dtype` of its first argument;
            where it needs a dtype, with that argument's own if it is not to be float32.
        expansion: the name of the expansion that replaces the call.
        within: whether the call gets the arguments as they are, and finds the casts (given.py).
        direct: whether the policy op gets the arguments themselves. A composite may give it a view
            instead, whose cast eager autocast does not cache.
    """

    casts: tuple[tuple[int, Cast], ...] = ()
    promoted: tuple[tuple[tuple[int, ...], str | None], ...] = ()
    with_dtype: OpOverload | None = None
    direct: bool = True
    expansion: str | None = None
    within: bool = False

    def __bool__(self) -> bool:
        return bool(self.casts or self.promoted or self.with_dtype or self.expansion)

    def ordered(self, order: Sequence[int]) -> Recipe:
        """The same casts, made in the order of these argument numbers."""
        rank = {i: position for position, i in enumerate(order)}
        casts = sorted(self.casts, key=lambda pair: rank.get(pair[0], len(rank)))
        groups = (
            (tuple(sorted(group, key=lambda i: rank.get(i, len(rank)))), device_type)
            for group, device_type in self.promoted
        )
        return replace(self, casts=tuple(casts), promoted=tuple(groups))


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The node arguments of a call in order of appearance, an argument used twice twice."""
    found: list[fx.Node] = []

    def keep(argument: fx.Node) -> fx.Node:
        found.append(argument)
        return argument

    fx.node.map_arg((node.args, node.kwargs), keep)
    return found


def example_value(node: fx.Node) -> Any:
    """The value Dynamo left in a node; None where there is none."""
    return node.meta.get("example_value")


def build(
    node: fx.Node,
    state: AutocastState,
    instead: Policy | None = None,
    value_of: Callable[[fx.Node], Any] = example_value,
) -> Recipe | None:
    """The recipe of a call under `state`; None where no policy of the table applies.

    Args:
        instead: a policy to apply in the place of the table's.
        value_of: gives the arguments' values.

    Left alone: calls with `out=`, which autocast does not touch; arguments that are not dense
    floating tensors of a device type that is switched on.
    """
    name = op_name(node)
    if not (name or instead) or node.kwargs.get("out") is not None:
        return None
    arguments = [value_of(n) for n in tensor_arguments(node)]
    casts: list[tuple[int, Cast]] = []
    promoted: list[tuple[tuple[int, ...], str | None]] = []
    with_dtype = None
    places = {i: t.device.type for i, t in enumerate(arguments) if _is_castable(t)}
    mixed = len(set(places.values())) > 1
    for device in state.enabled_devices:
        mine = tuple(i for i, place in places.items() if place == device.device_type)
        if not mine:
            continue
        policy = instead or find_policy(name, device.device_type)
        limit = device.device_type if mixed else None
        if policy in (Policy.LOWER_PRECISION_FP, Policy.FP32):
            casts += [(i, _cast(policy, device, limit)) for i in mine]
        elif policy is Policy.PROMOTE:
            promoted.append((mine, limit))
        elif policy is Policy.FP32_SET_OPT_DTYPE and name:
            with_dtype = _overload_with_dtype(name, node)
        elif policy is Policy.FP32_APPEND_DTYPE:
            with_dtype = _APPENDED.get(name or "")
    direct = not any(name in COMPOSITES.get(d.device_type, {}) for d in state.enabled_devices)
    if direct:
        casts.reverse()
    recipe = Recipe(tuple(casts), tuple(promoted), with_dtype, direct)
    return recipe if recipe else None


def of_casts(node: fx.Node, state: AutocastState, casts: Iterable[tuple[int, Policy]]) -> Recipe:
    """The recipe that casts the given arguments (by number) to the region's dtype or to float32,
    in the order given."""
    arguments = tensor_arguments(node)
    devices = ((i, p, arguments[i].meta["example_value"].device.type) for i, p in casts)
    return Recipe(tuple((i, _cast(p, state.device(d), None)) for i, p, d in devices))


def expanded(node: fx.Node) -> Recipe | None:
    """The recipe that writes a composite out; None where it is not known how."""
    name = op_name(node)
    return Recipe(expansion=name) if name in EXPANSIONS else None


def _cast(policy: Policy, device: DeviceAutocast, limit: str | None) -> Cast:
    if policy is Policy.FP32:
        return Cast(FULL, (), limit)
    if device.dtype in _LOWER:
        return Cast(_LOWER[device.dtype], (), limit)
    return Cast(_SMART.autocast_to_reduced_precision.default, (device.dtype,), limit)


def _is_castable(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout is torch.strided
    )


def _overload_with_dtype(name: str, node: fx.Node) -> OpOverload | None:
    for full_name in _WITH_DTYPE.get(name.partition(".")[0], ()):
        packet, _, overload = full_name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if name in (packet, full_name) and bind(op, node.args, node.kwargs) is not None:
            return op
    return None


def bind(op: OpOverload, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a torch-level call by the names of `op`'s schema; None where they do not
    fit.

    Spells `input` as `self` and drops `_stacklevel`, which `torch.nn.functional` adds.
    """
    given = dict(kwargs)
    if "input" in given:
        given["self"] = given.pop("input")
    given.pop("_stacklevel", None)
    names = [a.name for a in arguments_of(op)]
    positional = [a.name for a in arguments_of(op) if not a.kwarg_only]
    if len(args) > len(positional):
        return None
    bound = dict(zip(positional, args, strict=False))
    if bound.keys() & given.keys() or given.keys() - set(names):
        return None
    bound |= given
    required = [a.name for a in arguments_of(op) if not a.has_default_value()]
    if any(bound.get(n) is None for n in required):
        return None
    # Overloads may differ in this alone: `ord` of a norm is a number or a word.
    words = {a.name for a in arguments_of(op) if "str" in str(a.type)}
    return bound if all(n in words for n, v in bound.items() if isinstance(v, str)) else None


Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def apply(
    recipe: Recipe,
    node: fx.Node,
    leaf: Callable[[int, fx.Node], Any],
    call: Call,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Follow `recipe`: make the casts, and return the (target, args, kwargs) of the call itself.

    Args:
        leaf: what stands for an argument of the call: its number and node -> a value.
        call: makes one call: (target, args, kwargs) -> a value. With fake tensors it runs it, with
            nodes it adds it to the graph.
    """
    values = [leaf(i, n) for i, n in enumerate(tensor_arguments(node))]
    before = list(values)
    for i, cast in recipe.casts:
        values[i] = call(cast.op, (values[i], *cast.args), cast.kwargs)
    for group, device_type in recipe.promoted:
        limit = {"device_type": device_type} if device_type else {}
        wide = call(_SMART.promote.default, ([values[i] for i in group],), limit)
        for position, i in enumerate(group):
            values[i] = call(operator.getitem, (wide, position), {})
    remaining: Iterator[Any] = iter(before if recipe.within else values)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: next(remaining))
    if recipe.within:
        weights, casts = [before[i] for i, _ in recipe.casts], [values[i] for i, _ in recipe.casts]
        assert callable(node.target)
        return finding_casts(node.target), (weights, casts, *args), kwargs
    if recipe.expansion is not None:
        first = example_value(tensor_arguments(node)[0])
        return EXPANSIONS[recipe.expansion](Caller(call, first.dim()), *args, **kwargs)
    if recipe.with_dtype is None:
        return node.target, args, kwargs
    if recipe.with_dtype in _APPENDED.values():
        schema = arguments_of(node.target)  # type: ignore[arg-type]
        positional = [*args, *(kwargs.get(a.name, a.default_value) for a in schema[len(args) :])]
        own = call(_ATEN.result_type.Tensor, (positional[0], positional[0]), {})
        dtype = call(_ATEN.promote_types.default, (own, torch.float32), {})
        return recipe.with_dtype, tuple(positional), {"dtype": dtype}
    bound = bind(recipe.with_dtype, args, kwargs)
    assert bound is not None  # `build` bound the same call
    given = (bound["self"], bound.get("dtype"))
    bound["dtype"] = call(_SMART.full_precision_dtype.default, given, {})
    return recipe.with_dtype, (), bound


def run(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make one call for real: of a method, where the target is a name, else of a function."""
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)
