"""Verdicts of validation, each asked for once.

A verdict depends on what is called, on the metadata of its arguments, on the autocast state, the
grad mode and PyTorch's switches: it is kept by a key that spells these out.
Within a process in memory; across processes in one file per graph beside torch.compile's own
caches, so that a warm start does not validate again.

What cannot be spelled out - a function or an op of the user's, who may change what it does; a
tensor subclass, whose fields may decide what a call does - is named by its address in the key, and
the verdict is kept for as long as the graph is looked at. So are all of them while the user's code
gives PyTorch's own ops other rules or kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .._logging import log
from .._torch.autocast import autocast_device_types, has_autocast_kernel
from .._torch.code_of_users import is_function_of_users
from .._torch.configs import compile_cache_dir, made_with, switches
from .._torch.fake_tensors import symbol_key
from .._torch.formulas import grad_fn_of
from .._torch.kernels import are_closed, has_kernels_of_users
from .._torch.ops import OpOverload, OpOverloadPacket, is_dispatched, overloads_of
from .._torch.tensors import is_fake, is_plain_tensor
from ..state import AutocastState

_MEMORY_LIMIT = 1 << 16
_FLAGS = ("expanded", "within", "keeps", "stale", "mistraced")
_known: dict[str, Verdict] = {}


@dataclass(frozen=True)
class Verdict:
    """The answer of validation for one call.

    Attributes:
        reason: why the call was not proved equal; None where it was.
        shared: numbers of the arguments whose casts eager autocast keeps in its cache, and which so
            come from one cast that other calls read too.
        found: numbers of the arguments to cast, and whether to float32 ("fp32") or to the lower
            precision, where the policy table has no answer that holds but watching eager gave one;
            None where the table's answer holds.
        order: numbers of the arguments in the order in which eager casts them, where it was seen.
        expanded: whether the call is to be written out (expansions.py).
        within: whether the call is to find the shared casts inside (given.py).
        keeps: whether it casts weights for itself alone, where eager autocast shares these casts.
        stale: whether eager gives another dtype than the example value has.
        mistraced: whether AOTAutograd's trace of it gives another dtype than eager does.
    """

    reason: str | None = None
    shared: tuple[int, ...] = ()
    found: tuple[tuple[int, str], ...] | None = None
    order: tuple[int, ...] = ()
    expanded: bool = False
    within: bool = False
    keeps: bool = False
    stale: bool = False
    mistraced: bool = False


def key_of(node: fx.Node, recipe: Any, state: AutocastState, grad: bool, strict: bool) -> str:
    """Everything a verdict depends on."""
    numbers: dict[int, int] = {}

    def leaf(argument: fx.Node) -> Any:
        value = argument.meta.get("example_value", argument)
        return _Leaf(value, numbers.setdefault(id(value), len(numbers)))

    described = _describe(fx.node.map_arg((node.args, node.kwargs), leaf))
    devices = [(d.device_type, str(d.dtype)) for d in state.enabled_devices]
    flags = (state.cache_enabled, grad, strict, are_closed(), *switches())
    return f"{_target(node.target)} {described} {recipe} {devices} {flags}"


def names_an_address(key: str) -> bool:
    """Whether a key means nothing any more once the node, or an example value, is another."""
    return " at 0x" in key


class Verdicts:
    """The verdicts of one graph, to be dropped before the graph is.

    Args:
        keys: the keys of all calls of the graph that may need a verdict.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        lasting = () if has_kernels_of_users() else keys
        self._kept = {key for key in lasting if not names_an_address(key)}
        self._here: dict[str, Verdict] = {}
        self._unsaved = False
        if len(_known) > _MEMORY_LIMIT:
            forget()
        self._path = None if self._kept <= _known.keys() else _path(self._kept)
        if self._path is not None:
            _known.update(_load(self._path))

    def get(self, key: str) -> Verdict | None:
        """The verdict, if it is known."""
        return (_known if key in self._kept else self._here).get(key)

    def add(self, key: str, verdict: Verdict) -> None:
        """Keep a new verdict."""
        if key in self._kept:
            _known[key], self._unsaved = verdict, True
        else:
            self._here[key] = verdict

    def save(self) -> None:
        """Write the verdicts for the next process, if there are new ones and a cache to write
        to."""
        if not self._unsaved or self._path is None:
            return
        found = {k: _known[k] for k in sorted(self._kept) if k in _known}
        rows = {
            k: [v.reason, v.shared, v.found, v.order, *(getattr(v, flag) for flag in _FLAGS)]
            for k, v in found.items()
        }
        try:
            _write(self._path, rows)
        except OSError as error:  # a folder that is read-only, or full
            log.warning("the next process validates again, verdicts are not kept: %s", error)


def forget() -> None:
    """Drop the verdicts in memory, as a new process would."""
    _known.clear()


def _write(path: Path, rows: dict[str, list[Any]]) -> None:
    """Beside its final place and renamed, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(rows, file)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _load(path: Path) -> dict[str, Verdict]:
    try:
        rows = json.loads(path.read_text())
        return {key: _verdict(*row) for key, row in dict(rows).items()}
    except OSError:  # mostly: there is none yet
        return {}
    except (ValueError, TypeError):  # cut off or edited: validate again and write it anew
        return {}


def _verdict(
    reason: str | None,
    shared: list[int],
    found: list[list[Any]] | None,
    order: list[int],
    *flags: bool,
) -> Verdict:
    casts = None if found is None else tuple((int(i), str(policy)) for i, policy in found)
    named = dict(zip(_FLAGS, flags, strict=True))
    return Verdict(reason, tuple(shared), casts, tuple(order), **named)


def _path(keys: Iterable[str]) -> Path | None:
    folder = compile_cache_dir()
    if folder is None:
        return None
    digest = hashlib.sha256("\n".join([made_with(), *sorted(keys)]).encode()).hexdigest()
    return Path(folder) / "smart_autocast" / f"{digest[:32]}.json"


def _by_address(value: object) -> str:
    return f"{type(value).__qualname__} at {id(value):#x}"


def comes_with_torch(target: Any) -> bool:
    """Whether a call is of PyTorch's own code, not of a custom op or a user's function."""
    name = _target(target)
    return name.startswith(_WITH_TORCH) and not names_an_address(name)


_WITH_TORCH = ("torch.", "aten.", "method:", "_operator.")


@dataclass(frozen=True)
class _Leaf:
    """An argument node: its example value, and which of the arguments are one and the same."""

    value: Any
    number: int


def _target(target: Any) -> str:
    if isinstance(target, str):
        return f"method:{target}"
    if is_dispatched(target):
        name = str(target) + _rule_of(target)
    else:
        module = getattr(target, "__module__", None) or "torch"  # builtins of torch._C have none
        name = f"{module}.{getattr(target, '__qualname__', None) or repr(target)}"
    if name.startswith(_WITH_TORCH) and "<" not in name and not is_function_of_users(target):
        return name
    return f"{name}, {_by_address(target)}"


def _rule_of(op: OpOverload | OpOverloadPacket) -> str:
    """Whether somebody has registered a rule for a custom op, which can happen at any time."""
    others = [overload for overload in overloads_of(op) if overload.namespace != "aten"]
    on = autocast_device_types() if others else ()
    return " with a rule" if any(has_autocast_kernel(other, on) for other in others) else ""


def _describe(value: Any) -> str:
    if isinstance(value, _Leaf):
        return f"{_describe(value.value)}#{value.number}"
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_describe, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_describe(k)}:{_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice{_describe((value.start, value.stop, value.step))}"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return symbol_key(value)
    return repr(value) if type(value) in _SPELLED_OUT else _by_address(value)


_SPELLED_OUT = {bool, int, float, complex, str, bytes, type(None), type(...)} | {
    *(torch.dtype, torch.device, torch.layout, torch.memory_format)
}


def _describe_tensor(t: torch.Tensor) -> str:
    if not is_plain_tensor(t) and not is_fake(t):
        return _by_address(t)
    strides = t.stride() if t.layout is torch.strided else ()
    leaf = grad_fn_of(t) is None
    flags = (t.requires_grad, leaf, t._is_view(), t.is_conj(), t.is_neg(), t.is_inference())
    marks = "".join("01"[f] for f in flags)
    return (
        f"{type(t).__qualname__}({t.dtype},{t.device},{t.layout},"
        f"{_describe(t.shape)},{_describe(strides)},{marks})"
    )
