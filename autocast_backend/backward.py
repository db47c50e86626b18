"""The backward pass of a compiled region, under whatever autocast state it really runs in.

Eager autograd decides nothing in advance: each backward op runs under the autocast state around
`backward()`. AOTAutograd traces the backward while it compiles the forward, under one assumption.
Here the compiled backward looks at the state when it is called:

    autocast off                          the backward AOTAutograd compiled, traced with it off
    a state that would change nothing     the same code, with autocast switched off around it
    any other state                       a variant: traced under that state, compiled, kept

With a pinned assumption the backward of that assumption runs always, and a call in another state
that would have changed it warns or raises.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from . import _logging
from ._torch import (
    TrainingGraph,
    any_autocast_enabled,
    compile_configs,
    compile_lock,
    counters,
    disable_autocast,
    fake_like,
    trace_joint_graph,
)
from .guards import ShapeGuards
from .joint import (
    AutocastActsAboveOnly,
    BackwardError,
    Call,
    autocast_can_change,
    calls_of,
    differing_ops,
    extract_backward,
)
from .standalone import copy_graph
from .state import AutocastState

log = _logging.log

Key = tuple[tuple[str, torch.dtype], ...]
"""A state of the backward pass, as far as one region can tell: (device type, dtype) of the device
types that are on, among those its tensors live on. Empty for "off"."""


class BackwardAutocastWarning(UserWarning):
    """A backward ran under another autocast state than `backward_pass_autocast` assumes, and would
    have been another computation there."""


class BackwardAutocastError(BackwardError):
    """The same, where `on_backward_autocast_mismatch="error"`."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What `backward_pass_autocast` says.

    Attributes:
        state: the state the backward is taken to run in; None for "auto": the one it runs in.
        name: the option's value, for messages.
        on_mismatch: "warn", "error" or "do_nothing".
    """

    state: AutocastState | None = None
    name: str = "auto"
    on_mismatch: str = "warn"


@dataclass
class Region:
    """One compiled graph, as it was before the inner compiler took it over.

    Attributes:
        graph_module: a copy of the lowered graph.
        inputs: its fake inputs.
        compile_graph: the inner compiler.
        assumption: what is known about the state of the backward pass.
        line: the user's code, for messages.
    """

    graph_module: fx.GraphModule
    inputs: Sequence[Any]
    compile_graph: Callable[..., Any]
    assumption: Assumption
    line: str
    configs: Callable[[], Any] = field(default_factory=compile_configs)

    @functools.cached_property
    def device_types(self) -> tuple[str, ...]:
        """The device types of all values in the graph."""
        values = [self.inputs] + [n.meta.get("example_value") for n in self.graph_module.graph.nodes]
        leaves = pytree.tree_leaves(values)
        return tuple(sorted({v.device.type for v in leaves if isinstance(v, torch.Tensor)}))

    def trace(self, key: Key) -> tuple[fx.GraphModule, Callable[..., Any] | None]:
        """The joint graph whose backward runs under `key`, and the inner backward compiler."""
        regions = [{"device_type": device, "dtype": dtype} for device, dtype in key]
        with self.configs(), AutocastActsAboveOnly():
            return trace_joint_graph(
                self.compile_graph, copy_graph(self.graph_module), self.inputs, regions
            )


def follow_autocast(region: Region, training: TrainingGraph) -> None:
    """Let the backward of `training` follow the autocast state it runs under."""
    fresh = training.placeholders is not None
    if (
        fresh
        and not region.assumption.state
        and not autocast_can_change(training.backward_module(), region.device_types)
    ):
        return
    backward = Backward(region, training)
    if training.compiled_backward is not None:
        training.compiled_backward = backward.runner(training.compiled_backward)
    if training.compile_backward is not None:
        training.compile_backward = backward.compile_first


class Backward:
    """The compiled backward of one region: one variant for each state that makes a difference."""

    def __init__(self, region: Region, training: TrainingGraph) -> None:
        self._region = region
        self._training = training
        self._compile = training.compile_backward
        self._lock = threading.RLock()
        self._codes: dict[Key, Callable[..., Any]] = {}
        self._graphs: dict[Key, fx.GraphModule] = {}
        self._calls: dict[Key, list[Call]] = {}
        assumed = region.assumption.state
        self._assumed = None if assumed is None else self._key_of(assumed)

    def compile_first(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Stands in for the inner backward compiler: the first backward calls it."""
        assert self._compile is not None
        with disable_autocast():
            return self.runner(self._compile(graph, inputs))

    def runner(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """The function autograd calls, in place of the code that was compiled with autocast off."""
        self._off = _boxed(code)
        if not self._assumed:
            self._codes[()] = self._off

        @functools.wraps(code, updated=("__dict__",))
        def run(args: list[Any]) -> Any:
            if not any_autocast_enabled():
                chosen = self._codes.get(()) or self._choose((), args)
                return chosen(args)
            key = self._key_now()
            chosen = self._codes.get(key) or self._choose(key, args)
            with disable_autocast():
                return chosen(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _key_now(self) -> Key:
        return tuple(
            (device, torch.get_autocast_dtype(device))
            for device in self._region.device_types
            if torch.is_autocast_enabled(device)
        )

    def _key_of(self, state: AutocastState) -> Key:
        return tuple(
            (d.device_type, d.dtype)
            for d in sorted(state.enabled_devices, key=lambda d: d.device_type)
            if d.device_type in self._region.device_types
        )

    def _choose(self, key: Key, args: list[Any]) -> Callable[..., Any]:
        """The code for a state that is met for the first time."""
        with self._lock, compile_lock(), disable_autocast():
            if key not in self._codes:
                if self._assumed is None:
                    self._codes[key] = self._compiled(key, args)
                else:
                    self._compare(key)
                    self._codes[key] = self._compiled(self._assumed, args)
            return self._codes[key]

    def _compare(self, found: Key) -> None:
        """Tell of a backward that the pinned assumption makes differ from eager's."""
        assumption = self._region.assumption
        if assumption.on_mismatch == "do_nothing":
            return
        differing = self._differing(self._assumed or (), found)
        if not differing:
            return
        several = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        message = (
            f"the backward of {self._region.line} runs under autocast {_str(found)}, but "
            f"backward_pass_autocast={assumption.name!r} assumes {_str(self._assumed or ())}; in "
            f"eager mode {differing[0]}{several}. Run backward() under the assumed state, or use "
            'backward_pass_autocast="auto", which follows the state it meets'
        )
        if assumption.on_mismatch == "error":
            raise BackwardAutocastError(message)
        warnings.warn(message, BackwardAutocastWarning, stacklevel=2)

    def _compiled(self, key: Key, args: list[Any]) -> Callable[..., Any]:
        """The code of the backward under `key`: the first code, where that computes the same."""
        guards = ShapeGuards(self._region.inputs)
        differing = self._differing((), key)
        if not differing:
            return self._off
        line = self._region.line
        log.info("backward of %s: a variant for %s, where %s", line, _str(key), differing[0])
        counters()["smart_autocast"]["backward_variants"] += 1
        graph = self._graphs[key]
        compile_backward = self._compile or self._compile_again
        assert compile_backward is not None, "AOTAutograd calls no backend without a compiler"
        with self._training.contexts(), self._region.configs(), torch.no_grad():
            code = _boxed(compile_backward(graph, self._placeholders(graph, args)))
        return guards.around(code, graph, f"the backward of {line} under {_str(key)}")

    def _differing(self, assumed: Key, found: Key) -> list[str]:
        """What differs between the backwards of two states; empty where they are the same."""
        if assumed == found:
            return []
        first, second = self._traced(assumed), self._traced(found)
        return [] if first == second else differing_ops(first, second)

    def _traced(self, key: Key) -> list[Call]:
        """The calls of the backward under `key`, traced once."""
        if key not in self._calls:
            joint, self._compile_again = self._region.trace(key)
            try:
                graph = extract_backward(joint, self._training.backward_module())
            except BackwardError as error:
                raise BackwardError(
                    f"the backward of {self._region.line} cannot follow autocast {_str(key)}: "
                    f"{error}. Call backward() outside of autocast, or pin what it may assume: "
                    'options={"backward_pass_autocast": "off"}'
                ) from None
            self._graphs[key], self._calls[key] = graph, calls_of(graph)
        return self._calls[key]

    def _placeholders(self, graph: fx.GraphModule, args: list[Any]) -> list[Any]:
        """Fake inputs to compile a variant for, with the strides of what the forward saved."""
        if self._training.placeholders is not None:
            return self._training.placeholders
        nodes = graph.graph.find_nodes(op="placeholder")
        return [fake_like(n.meta.get("val"), real) for n, real in zip(nodes, args, strict=True)]


def _boxed(code: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return code if getattr(code, "_boxed_call", False) else lambda args: code(*args)


def _str(key: Key) -> str:
    return ", ".join(f"{device}: {str(dtype)[6:]}" for device, dtype in key) or "off"
