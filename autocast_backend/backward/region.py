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

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import _logging
from .._torch.aot import TrainingGraph
from .._torch.autocast import any_autocast_enabled, autocast_device_types, disable_autocast
from .._torch.configs import compile_configs, own_cache_entries
from .._torch.dynamo import compile_session, counters, dynamo_error, never_traced
from .._torch.fake_tensors import assumptions_noted, fake_like, sizes_as_first_traced
from .._torch.hooks import Hooks, inlined_hooks, unpacking_of
from .._torch.joint_graphs import JointGraph, trace_joint_graph
from .._torch.kernels import kernels_opened
from .._torch.modes import outside_of_modes
from .._torch.traces import trace_of
from ..custom_ops import first_run_watched, ops_without_rule
from ..graphs import copy_graph, nodes_of
from ..guards import ShapeGuards
from ..state import AutocastState, outside_of_contexts, put_right_after_errors
from .ambient import (
    BackwardAutocastError,
    BackwardAutocastWarning,
    BackwardError,
    Key,
    current_key,
    key_name,
    regions,
)
from .captured import for_compiled_autograd
from .differences import Call, autocast_can_change, calls_of, differing_ops, is_plain
from .hooks import unpacks_differently
from .joint import Numbering, extract_backward, mark_values, saved_nodes
from .joint_passes import give_zeros_memory, keep_in_backward, save_what_is_overwritten
from .nested import has_nested, write_out

log = _logging.log


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What `backward_pass_autocast` says.

    Attributes:
        state: the state the backward is taken to run in; None for "auto": the one it runs in.
        name: the option's value, for messages.
        on_mismatch: "warn", "error" or "do_nothing".
    """

    state: AutocastState | None = None
    name: str = "'auto'"
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
        hooks: saved-tensor hooks that are written into forward and backward.
        configs: the compilers' configuration.
        grad: whether autograd was on around the graph.
        training_graphs: how many the inner compiler has made of it.
        can_change: whether autocast acts on its backward as that was traced. Inductor makes one op,
            which autocast does not know, of attention that is written out.
    """

    graph_module: fx.GraphModule
    inputs: Sequence[Any]
    compile_graph: Callable[..., Any]
    assumption: Assumption
    line: str
    hooks: Hooks | None = field(default_factory=inlined_hooks)
    configs: Callable[[], Any] = field(default_factory=compile_configs)
    grad: bool = field(default_factory=torch.is_grad_enabled)
    training_graphs: int = 0
    can_change: bool = False
    _values: Numbering = field(default_factory=Numbering)

    def __post_init__(self) -> None:
        self._sizes = sizes_as_first_traced(self.inputs)

    @functools.cached_property
    def device_types(self) -> tuple[str, ...]:
        """The device types of all values in the graph and in the bodies it calls, without those
        that autocast does not know, such as "meta"."""
        graphs = [m.graph for m in self.graph_module.modules() if isinstance(m, fx.GraphModule)]
        values = [n.meta.get("example_value") for graph in graphs for n in graph.nodes]
        leaves = pytree.tree_leaves([self.inputs, values])
        found = {v.device.type for v in leaves if isinstance(v, torch.Tensor)}
        return tuple(sorted(found.intersection(autocast_device_types())))

    def keep_in_backward(self, joint: fx.GraphModule) -> None:
        """A pass over the joint graph before it is partitioned."""
        give_zeros_memory(joint)
        self.can_change |= keep_in_backward(joint, self.device_types)
        save_what_is_overwritten(joint)

    def _prepare(self, joint: fx.GraphModule) -> None:
        """A pass over each joint graph that is traced again."""
        give_zeros_memory(joint)
        save_what_is_overwritten(joint)
        mark_values(joint, self._values)

    def follow_autocast(self, training: TrainingGraph) -> None:
        """Let the backward of `training` follow the autocast state it runs under."""
        self.training_graphs += 1
        fresh = training.placeholders is not None
        if (
            fresh
            and self.hooks is None
            and is_plain(self.graph_module)
            and not self.can_change
            and not autocast_can_change(training.backward_module(), self.device_types)
        ):
            if training.compile_backward is not None:
                training.compile_backward = _with_own_entries(training.compile_backward)
            return
        Backward(self, training).take_over()

    def trace(self, key: Key) -> JointGraph:
        """The joint graph whose backward runs under `key`, nested compile regions written out."""
        return self._trace(write_out(copy_graph(self.graph_module)).module, key)

    def trace_as_compiled(self) -> JointGraph:
        """The joint graph that the inner compiler has partitioned."""
        return self._trace(copy_graph(self.graph_module), ())

    def _trace(self, graph_module: fx.GraphModule, key: Key) -> JointGraph:
        with contextlib.ExitStack() as stack:
            stack.enter_context(outside_of_modes())
            stack.enter_context(outside_of_contexts())
            stack.enter_context(kernels_opened())
            stack.enter_context(self.configs())
            stack.enter_context(torch.inference_mode(False))  # a backward may run in it
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(self._sizes())
            return trace_joint_graph(
                self.compile_graph,
                graph_module,
                self.inputs,
                regions(key),
                self._prepare,
            )


class Backward:
    """The compiled backward of one region: one variant for each state that makes a difference."""

    def __init__(self, region: Region, training: TrainingGraph) -> None:
        self._region = region
        self._training = training
        self._compile = training.compile_backward
        self._codes: dict[Key, Callable[..., Any]] = {}  # by the state that is met
        self._variants: dict[Key, Callable[..., Any]] = {}  # by the state they are traced under
        self._joints: dict[Key, JointGraph] = {}
        self._calls: dict[Key, list[Call]] = {}
        assumed = region.assumption.state
        self._assumed = None if assumed is None else self._key_of(assumed)

    def take_over(self) -> None:
        """Put this in the place of the compiled backward, of the compiler that will make it, and of
        the graph that compiled autograd copies."""
        training = self._training
        if training.compiled_backward is not None:
            training.compiled_backward = self._runner(training.compiled_backward)
        if training.compile_backward is not None:
            training.compile_backward = self._compile_first
        training.for_compiled_autograd = self._for_compiled_autograd
        device_types = self._region.device_types
        training.state_for_compiled_autograd = lambda: current_key(device_types)

    @never_traced
    def _compile_first(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Stands in for the inner backward compiler: the first backward calls it."""
        assert self._compile is not None
        return self._runner(_with_own_entries(self._compile)(graph, inputs))

    def _runner(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """The function autograd calls, in place of the code that was compiled with autocast off."""
        codes, device_types = self._codes, self._region.device_types
        self._off = _boxed(code)
        if not self._assumed:
            codes[()] = self._off

        @never_traced
        @functools.wraps(code)
        def run(args: list[Any]) -> Any:
            if not any_autocast_enabled():
                return (codes.get(()) or self._choose((), args))(args)
            key = current_key(device_types)
            chosen = codes.get(key) or self._choose(key, args)
            with disable_autocast():
                return chosen(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _key_of(self, state: AutocastState) -> Key:
        on = {d.device_type: d.dtype for d in state.enabled_devices}
        return tuple((d, on[d]) for d in self._region.device_types if d in on)

    def _choose(self, key: Key, args: list[Any]) -> Callable[..., Any]:
        """The code for a state that is met for the first time."""
        with compile_session(), put_right_after_errors(), disable_autocast():
            if key not in self._codes:
                if self._assumed is None:
                    code = self._compiled(key, args)
                else:
                    self._compare(key)
                    code = self._compiled(self._assumed, args)
                self._codes[key] = self._watched(code, key)
            return self._codes[key]

    def _watched(self, code: Callable[..., Any], key: Key) -> Callable[..., Any]:
        """The code for a state, which warns of custom ops that eager autocast would act in."""
        state = AutocastState.of(regions(key))
        ops = ops_without_rule(self._training.backward_module(), state) if key else {}
        return first_run_watched(code, ops) if ops else code

    def _compare(self, found: Key) -> None:
        """Tell of a backward that the pinned assumption makes differ from eager's."""
        assumption, assumed = self._region.assumption, self._assumed or ()
        if assumption.on_mismatch == "do_nothing" or assumed == found:
            return
        differs = self._difference(assumed, found)
        if differs is None:
            return
        message = (
            f"the backward of {self._region.line} runs under autocast {key_name(found)}, but "
            f"backward_pass_autocast={assumption.name} assumes {key_name(assumed)}; in eager mode "
            f"{differs}. Call backward() under the assumed state, or use "
            'backward_pass_autocast="auto", which follows the state it meets'
        )
        if assumption.on_mismatch == "error":
            raise BackwardAutocastError(message)
        warnings.warn(message, BackwardAutocastWarning, stacklevel=2)

    def _difference(self, assumed: Key, found: Key) -> str | None:
        """What differs between the backwards of two states, in words; None where nothing does."""
        calls = self._traced(assumed)
        try:
            others = self._traced(found)
        except BackwardError as error:
            return f"it raises: {_reason(error.__cause__)}"
        if calls == others:
            return None
        first, *more = differing_ops(calls, others)
        return f"{first}{f' (and {len(more)} more)' if more else ''}"

    def _compiled(self, key: Key, args: list[Any]) -> Callable[..., Any]:
        """The code of the backward under `key`: the first code, where that computes the same."""
        if not key:
            return self._off
        if key in self._variants:
            return self._variants[key]
        line = self._region.line
        what = f"the backward of {line} under {key_name(key)}"
        if not self._changes(key):
            if not self._guards.conditions():
                return self._off
            return self._guards.around(self._off, self._training.backward_module(), what)
        if log.isEnabledFor(logging.INFO):
            first = differing_ops(self._traced(()), self._traced(key))[0]
            log.info("backward of %s: a variant for %s, where %s", line, key_name(key), first)
        counters()["smart_autocast"]["backward_variants"] += 1
        graph = self._graph(key)
        # None where the first one came from a cache
        compile_backward = self._compile or self._joints[()].compile_backward
        assert compile_backward is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(outside_of_modes())
            stack.enter_context(self._training.contexts())
            stack.enter_context(self._region.configs())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(own_cache_entries(nodes_of(graph)))
            inputs = self._placeholders(graph, args)
            code = _boxed(compile_backward(graph, inputs))
        self._variants[key] = self._guards.around(code, graph, what)
        return self._variants[key]

    def _changes(self, key: Key) -> bool:
        """Whether the backward under `key` is another computation than the one that was compiled.

        Raises:
            BackwardError: traced again, it cannot be compared with that.
        """
        if key and self._region.hooks is None and self._region.training_graphs == 1:
            compiled = trace_of(self._training.backward_module())
            if compiled is not None and not compiled.dynamic:
                self._traced(key)
                joint = self._joints[key]
                if compiled.is_of(joint.graph_module, joint.after_inductor):
                    return False  # That of no autocast need not be traced.
        self._check_trace(key)
        self._check_hooks(key)
        return not self._alike((), key)

    def _alike(self, one: Key, other: Key) -> bool:
        """Whether the backwards of two states are the same computation."""
        return one == other or self._traced(one) == self._traced(other)

    def _traced(self, key: Key) -> list[Call]:
        """The calls of the joint graph under `key`, traced once. Forwards are the same, so two such
        lists differ where the backwards do."""
        if not self._joints:
            self._guards = ShapeGuards(self._region.inputs)  # every variant hangs on every trace
        if key not in self._joints:
            try:
                joint = self._region.trace(key)
            except dynamo_error() as error:  # the dtypes in a body of `while_loop` do not fit, say
                raise self._cannot_follow(key, _reason(error)) from error
            self._calls[key] = calls_of(joint.graph_module)
            self._joints[key] = joint  # last: what is interrupted is done again
        return self._calls[key]

    def _graph(self, key: Key) -> fx.GraphModule:
        """The backward under `key` for what the forward that was compiled has saved.

        Raises:
            BackwardError: that forward cannot serve another backward.
        """
        graphs = self._region.training_graphs
        if graphs != 1:
            raise self._cannot_follow(key, f"the inner compiler made {graphs} graphs of it")
        partitioned = self._training.backward_module()
        try:
            return extract_backward(self._joints[key], partitioned, self._reference)
        except BackwardError as error:
            raise self._cannot_follow(key, str(error)) from None

    @functools.cached_property
    def _reference(self) -> JointGraph:
        """What tells which values the compiled forward has saved."""
        region = self._region
        nested = has_nested(region.graph_module)
        return region.trace_as_compiled() if nested else self._joints[()]

    def _check_trace(self, key: Key) -> None:
        """Refuse a graph that is another one now that it is traced again.

        Raises:
            BackwardError: its forward hangs on more than its inputs.
        """
        if not key or self._region.training_graphs != 1:
            return
        self._traced(())
        try:
            saved_nodes(self._training.backward_module(), self._reference)
        except BackwardError as error:
            # What it hangs on may be as it was at another call.
            self._joints.clear()
            self._calls.clear()
            del self._reference
            raise self._cannot_follow(key, str(error)) from None

    def _check_hooks(self, key: Key) -> None:
        """Refuse what inlined hooks unpack otherwise under `key`: they are traced with it off.

        Raises:
            BackwardError: autocast acts inside of the hook that unpacks.
        """
        hooks = self._region.hooks
        if hooks is None or not key:
            return
        unpacking = unpacking_of(self._training.backward_module())
        if unpacking is None:
            return
        self._traced(())
        state = AutocastState.of(regions(key))
        saved = saved_nodes(self._training.backward_module(), self._reference)
        for name in unpacking.results:
            if differs := unpacks_differently(hooks, saved[name].meta["val"], state):
                raise self._cannot_follow(key, f"of the hook that unpacks {name}, {differs}")

    def _cannot_follow(self, key: Key, why: str) -> BackwardError:
        return BackwardError(
            f"the backward of {self._region.line} cannot follow autocast {key_name(key)}: {why}. "
            "Call backward() outside of autocast, or pin what it may assume: "
            'options={"backward_pass_autocast": "off"}'
        )

    def _placeholders(self, graph: fx.GraphModule, args: list[Any]) -> list[Any]:
        """Fake inputs to compile a variant for, with the strides of what the forward saved."""
        if self._training.placeholders is not None:
            return self._training.placeholders
        nodes = graph.graph.find_nodes(op="placeholder")
        return [fake_like(n.meta.get("val"), real) for n, real in zip(nodes, args, strict=True)]

    @never_traced
    def _for_compiled_autograd(self, backward: fx.GraphModule) -> fx.GraphModule:
        """The backward graph that compiled autograd copies, for the state of this moment."""
        device_types = self._region.device_types
        key = found = current_key(device_types)
        with compile_session(), put_right_after_errors(), disable_autocast(), assumptions_noted():
            if self._assumed is not None:
                self._compare(found)
                key = self._assumed
            if self._changes(key):
                backward = self._graph(key)
            if key and (assumed := self._guards.conditions()):
                raise BackwardError(
                    f"the backward of {self._region.line} under {key_name(key)} assumes "
                    f"{assumed[0]}, which compiled autograd does not check. Compile with "
                    "dynamic=False, or call backward() without compiled autograd"
                )
        return for_compiled_autograd(backward, self._region.line, device_types, found)


def _with_own_entries(compile_backward: Callable[..., Any]) -> Callable[..., Any]:
    """The inner backward compiler as the first backward calls it, under whatever state it meets."""

    @never_traced
    def compile_later(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with disable_autocast(), own_cache_entries(nodes_of(graph)):
            compiled: Callable[..., Any] = compile_backward(graph, inputs)
        return compiled

    return compile_later


def _reason(error: BaseException | None) -> str:
    """The first line of an error."""
    reason, *_ = [*str(error).splitlines(), type(error).__name__]
    return reason.rstrip(".: ")


def _boxed(code: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return code if getattr(code, "_boxed_call", False) else lambda args: code(*args)
