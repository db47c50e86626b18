"""The option `policies`: what a user asks for instead of autocast's own policy.

Which calls an override names, and what it asks for. What becomes of them is in `overriding.py`.
"""

from __future__ import annotations

import fnmatch
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .._torch.autocast import dispatched_ops
from .._torch.dynamo import pass_through_error
from .._torch.ops import is_dispatched, op_name_of
from ..spelling import nearest, one_of
from ..state import AMBIENT_DTYPES, AutocastState
from ..validation.verdicts import comes_with_torch
from .paths import Name, parse_name
from .table import Policy, op_name

Stack = list[tuple[str, str]]
"""Identity and path of modules that lie in each other, outermost first."""

_POLICIES = (Policy.LOWER_PRECISION_FP.value, Policy.FP32.value, Policy.PROMOTE.value)
_VALUES = (*_POLICIES, "off")


class PolicyError(pass_through_error(), ValueError):  # type: ignore[misc]
    """An override that a graph cannot take. Reaches the user as a `ValueError`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Override:
    """What one entry of the option asks for.

    Attributes:
        key: "op" or "module".
        pattern: the op, or the module pattern.
        policy: instead of the op's own; None: the op's own.
        dtype: the lower precision, instead of the region's; None: the region's.
        off: no autocast at all.
        where: names the option in messages.
    """

    key: str
    pattern: str
    policy: Policy | None
    dtype: torch.dtype | None
    off: bool
    where: str = field(compare=False)

    def state(self, around: AutocastState) -> AutocastState:
        """The autocast state of a call that this override names, inside the state `around`."""
        devices = tuple(
            replace(d, enabled=not self.off, dtype=self.dtype or d.dtype) if d.enabled else d
            for d in around.devices
        )
        return replace(around, devices=devices)

    @property
    def parts(self) -> tuple[str, ...]:
        """Of a pattern of modules: `blocks.*` -> ("blocks", "*")."""
        return tuple(self.pattern.split("."))

    @property
    def names_all(self) -> bool:
        """Whether it names the outermost module, and so all calls there are."""
        return self.key == "module" and _matches(self.parts, ())

    def __str__(self) -> str:
        asked = ["off"] if self.off else []
        asked += [self.policy.value] if self.policy else []
        asked += [str(self.dtype)] if self.dtype else []
        return f"{self.where}: {self.key} {self.pattern!r} ({', '.join(asked)})"


@dataclass(frozen=True)
class Overrides:
    """All entries of the option, in the order in which they were given.

    Attributes:
        ops, modules: the entries of each key.
        names: identity of a module, as `nn_module_stack` has it -> all names it has in the model;
            a module that is shared has several.
        owners: name of a parameter or buffer -> the names of all modules that it is registered in.
        callable: the names of modules that have a `forward`, unlike `nn.ModuleList`.
    """

    ops: tuple[Override, ...] = ()
    modules: tuple[Override, ...] = ()
    names: Mapping[str, tuple[Name, ...]] = field(default_factory=dict)
    owners: Mapping[Name, tuple[Name, ...]] = field(default_factory=dict)
    callable: frozenset[Name] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.ops or self.modules)

    def of(self, node: fx.Node, stack: Stack | None = None) -> Override | None:
        """The override that names a call: the innermost match. A module that matches lies further
        in than an op, which is named everywhere; of two patterns that match one module, the later
        one counts.

        Args:
            stack: the modules the call stands in; those of its trace by default.
        """
        for names in self._innermost_first(module_stack(node) if stack is None else stack):
            for override in reversed(self.modules):
                if any(_matches(override.parts, name) for name in names):
                    return override
        named = (o for op in _op_names(node) for o in self.ops if o.pattern == op)
        return next(named, None)

    def names_around(self, node: fx.Node) -> set[Name]:
        """The names of all modules that a call stands in, but for containers that nobody calls."""
        return {n for i, path in module_stack(node) for n in self._names(i, path)}

    def _names(self, identity: str, path: str) -> tuple[Name, ...]:
        return self.names.get(identity) or (parse_name(path),)

    def _innermost_first(self, modules: Stack) -> Iterator[tuple[Name, ...]]:
        """The names of each of `modules`, also of containers such as `blocks`, which
        nobody calls; the compiled module's own name is empty. Of a shared module all names count,
        but the containers of those alone that lie in the module that called it; and where it was
        called by a name without them, none that could be called itself: it was not."""
        stack = [(self._names(i, path), parse_name(path)) for i, path in modules]
        while stack:
            names, called = stack.pop()
            around = {
                name[:end] for outer, _ in stack for name in outer for end in range(len(name) + 1)
            }
            yield names
            callers = stack[-1][0] if stack else ()
            reached = [n for n in names if any(n[: len(c)] == c for c in callers)] or names
            directly = called in reached and not self._in_callable(called, around)
            for end in range(max(map(len, reached)) - 1, 0, -1):
                yield tuple(
                    name[:end]
                    for name in reached
                    if name[:end] not in around
                    and not (directly and self._in_callable(name[: end + 1], around))
                )
        yield ((),)

    def _in_callable(self, name: Name, around: set[Name]) -> bool:
        """Whether a module with a `forward` is around the one of this name, beside `around`."""
        outer = (name[:end] for end in range(1, len(name)))
        return any(one in self.callable and one not in around for one in outer)

    def of_module(self, name: Name) -> Override | None:
        """The override that names the calls in a module, where no module inside has its own."""
        for end in range(len(name), -1, -1):
            for override in reversed(self.modules):
                if _matches(override.parts, name[:end]):
                    return override
        return None

    def check_modules(self, known: Iterable[Name], *, compiled_by_dynamo: bool) -> None:
        """Refuse patterns that match no module.

        Args:
            known: the names of all modules there are.
            compiled_by_dynamo: which may compile a part of the model by itself.

        Raises:
            PolicyError: with near names.
        """
        names = {name[:end] for name in known for end in range(len(name) + 1)} | {()}
        for override in self.modules:
            if not any(_matches(override.parts, name) for name in names):
                inside = {".".join(name) for name in names if name}
                near = nearest(override.pattern, inside) if inside else "'**', for there is but one"
                message = f"{override} matches no module; expected {near}"
                if compiled_by_dynamo:
                    message += (
                        ". Names count from the module that is compiled. A module whose forward "
                        "Dynamo compiles by itself, because of a graph break inside, is such a "
                        "module: compile with fullgraph=True, or compile that module with options "
                        "of its own"
                    )
                raise PolicyError(message)


def parse_overrides(where: str, given: Any) -> Overrides:
    """Check the value of the option.

    Args:
        where: names the option in messages.
        given: `{"op": {"aten::softmax": "fp32"}, "module": {"blocks.*.router": "fp32"}}`, either
            key or none; None is no override.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an unknown key, op, policy or dtype, with near names.
    """
    if isinstance(given, Overrides):
        return given
    entries = _mapping(where, {} if given is None else given, '{"op": ..., "module": ...}')
    for key in entries:
        if key not in ("op", "module"):
            raise ValueError(
                f"{where}: unknown key {key!r}; expected 'op' or 'module', such as "
                '{"op": {"aten::mm": "fp32"}}'
            )
    ops = _mapping(f"{where}: 'op'", entries.get("op", {}), '{"aten::softmax": "fp32"}')
    known = dispatched_ops() if ops else frozenset()
    for op in ops:
        if op not in known:
            raise ValueError(f"{where}: no op is called {op!r}; expected {_near_op(op, known)}")
    modules = _mapping(f"{where}: 'module'", entries.get("module", {}), '{"lm_head": "off"}')
    for pattern in modules:
        if not all(pattern.split(".")):
            raise ValueError(
                f"{where}: module pattern {pattern!r}: expected names with dots between them, such "
                'as "blocks.*.router"'
            )
    return Overrides(
        tuple(_override(where, "op", op, value) for op, value in ops.items()),
        tuple(_override(where, "module", name, value) for name, value in modules.items()),
    )


def _mapping(where: str, given: Any, example: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: expected a dict such as {example}; got {given!r}")
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"{where}: expected strings as keys, as in {example}; got {name!r}")
    return given


def _override(where: str, key: str, pattern: str, value: Any) -> Override:
    entry = f"{where}: {key} {pattern!r}"
    asked = {"policy": value} if isinstance(value, str) else value
    if not isinstance(asked, Mapping):
        raise TypeError(
            f"{entry}: expected {one_of(_VALUES)}, or a dict of 'policy' and 'dtype'; got {value!r}"
        )
    if unknown := [k for k in asked if k not in ("policy", "dtype")]:
        raise ValueError(f"{entry}: unknown key {unknown[0]!r}; expected 'policy' or 'dtype'")
    policy, dtype = asked.get("policy"), asked.get("dtype")
    if policy is None and dtype is None:
        raise ValueError(f"{entry}: expected 'policy' or 'dtype' or both; got {value!r}")
    if policy is not None and policy not in _VALUES:
        raise ValueError(
            f"{entry}: unknown policy {policy!r}; expected {one_of(_VALUES)}, or for another lower "
            'precision than that of the region a dict such as {"dtype": torch.float16}'
        )
    if dtype is not None and dtype not in AMBIENT_DTYPES:
        raise ValueError(
            f"{entry}: dtype: expected torch.bfloat16 or torch.float16, the lower precision; got "
            f'{dtype!r}. For float32 use "fp32"'
        )
    if dtype is not None and policy not in (None, "lower_precision_fp"):
        raise ValueError(
            f"{entry}: a dtype goes with 'lower_precision_fp' or with no policy; got {policy!r}"
        )
    off = policy == "off"
    named = None if off or policy is None else Policy(policy)
    return Override(key, pattern, named, dtype, off, where)


def _near_op(op: str, known: Iterable[str]) -> str:
    base = op.partition(".")[0]
    for name in (base, f"aten::{base}"):
        if name in known:
            return repr(name)
    return nearest(op, known)


def _matches(pattern: Name, name: Name) -> bool:
    """Whether a pattern names a module: part by part, each a glob or the part itself; `**` stands
    for any number of parts, none too."""
    if not pattern:
        return not name
    first, *rest = pattern
    if first == "**":
        return any(_matches(tuple(rest), name[i:]) for i in range(len(name) + 1))
    if not name or (name[0] != first and not fnmatch.fnmatchcase(name[0], first)):
        return False
    return _matches(tuple(rest), name[1:])


def module_stack(node: fx.Node) -> Stack:
    """Identity and path of the modules inside the compiled one that a call stands in, outermost
    first. A module that is called again has its identity with a suffix."""
    stack = (node.meta.get("nn_module_stack") or {}).items()
    return [(str(key).partition("@")[0], path) for key, (path, *_) in stack]


_MINUS, _DIVIDED = ("aten::rsub", "aten::sub"), ("aten::reciprocal", "aten::div")
_REFLECTED = {
    operator.sub: _MINUS,
    "__rsub__": _MINUS,
    operator.truediv: _DIVIDED,
    "__rtruediv__": _DIVIDED,
    "__rdiv__": _DIVIDED,
}
"""Calls of a number and a tensor, in this order: `1 - x` calls `rsub`, and `1 / x` `reciprocal`."""
_CALLED = {
    "nll_loss": ("aten::nll_loss_nd", "aten::nll_loss"),
    "norm": ("aten::linalg_vector_norm", "aten::norm"),
}
"""Calls of another op than the one whose policy they have: that op, and then this one."""


def _op_names(node: fx.Node) -> tuple[str, ...]:
    """The op that a call is, and where it is `1 - x` or a loss, the one that it looks like."""
    if is_dispatched(node.target):
        return (op_name_of(node.target)[0],)
    if node.op == "call_function" and not _comes_with_torch(node.target):
        return ()  # a user's function may have the name of an op
    if node.target in _REFLECTED and (node.op == "call_method" or not _is_tensor(node.args[0])):
        return _REFLECTED[node.target]
    name = (op_name(node) or "").partition(".")[0]
    if name == "norm" and "nuc" in (*node.args[1:2], node.kwargs.get("p")):
        return ("aten::linalg_matrix_norm", "aten::norm")
    return _CALLED.get(name, (f"aten::{name}",))


def _comes_with_torch(target: Any) -> bool:
    """Also functions that PyTorch makes itself and no key spells out, such as `F.max_pool2d`; not
    what `functools.wraps` has given the name of one."""
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    named = getattr(module, getattr(target, "__name__", ""), None)
    made_there = module is not None and module.__name__.startswith("torch.") and named is target
    return made_there or comes_with_torch(target)


def _is_tensor(argument: Any) -> bool:
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
    return isinstance(value, torch.Tensor)
