"""Random programs: calls, nested autocast regions, graph breaks or checkpoints over a few small
tensors.

A program is a list of steps, which are played in two ways: written into graphs as Dynamo writes
them, example values included, which takes milliseconds; and as source code, for Dynamo itself.
Programs with checkpoints are source code only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from autocast_backend.state import AutocastState

SIZE = 4
INPUTS = ("x", "y", "low", "half", "double")
WEIGHTS = ("w", "v", "bias")
CACHED = (*WEIGHTS, "x", "y")
"""Leaves in float32 that require grad, whose casts eager autocast caches."""


Dtypes = tuple[torch.dtype | None, ...]
"""Of all inputs and weights; None for their own."""


def make_inputs(dtypes: Dtypes = ()) -> dict[str, torch.Tensor]:
    """Fresh square inputs and weights, the same numbers every time. `low` has no gradient."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = {name: randn(SIZE, SIZE) for name in (*INPUTS, *WEIGHTS)}
    made["low"], made["half"] = made["low"].bfloat16(), made["half"].half()
    made["double"], made["bias"] = made["double"].double(), randn(SIZE)
    for name, dtype in zip(made, dtypes, strict=bool(dtypes)):
        made[name] = made[name].to(dtype or made[name].dtype)
    return {name: t.requires_grad_(name != "low") for name, t in made.items()}


class Player:
    """Makes the calls of a program; this one makes them for real."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def dtype(self, value: Any) -> torch.dtype:
        return value.dtype

    def autocast(self) -> bool:
        return torch.is_autocast_enabled("cpu")

    def alike(self, *values: Any) -> list[Any]:
        """The values, cast to one dtype where the call would refuse to mix theirs: without
        autocast, and where autocast does not help, as it leaves float64 alone."""
        dtypes = {self.dtype(v) for v in values}
        hopeless = torch.float64 in dtypes or {torch.bfloat16, torch.float16} <= dtypes
        return list(values) if self.autocast() and not hopeless else self.same(*values)

    def same(self, *values: Any) -> list[Any]:
        """The values, cast to one dtype."""
        if len({self.dtype(v) for v in values}) == 1:
            return list(values)
        return [self(torch.Tensor.to, v, torch.float32) for v in values]


def _alike(target: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda call, *args: call(target, *call.alike(*args), **kwargs)


def _any(target: Any, *more: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda call, *args: call(target, *args, *more, **kwargs)


def _cat(call: Player, a: Any, b: Any) -> Any:
    return call(operator.getitem, call(torch.cat, call.alike(a, b)), slice(1, SIZE + 1))


def _stack(call: Player, a: Any, b: Any) -> Any:
    return call(torch.amax, call(torch.stack, call.alike(a, b)), 0)


def _conv1d(call: Player, a: Any, b: Any) -> Any:
    a, b = call.alike(a, b)
    a, b = call(torch.unsqueeze, a, 0), call(torch.unsqueeze, b, -1)
    return call(torch.squeeze, call(F.conv1d, a, b), 0)


def _attention(call: Player, q: Any, k: Any) -> Any:
    q, k = (
        call(torch.Tensor.view, call(torch.clone, t), 1, 1, SIZE, SIZE) for t in call.alike(q, k)
    )
    attended = call(F.scaled_dot_product_attention, q, k, k)
    return call(torch.Tensor.reshape, attended, SIZE, SIZE)


def _add_in_place(call: Player, a: Any, b: Any) -> Any:
    return call(torch.Tensor.add_, call(torch.mul, a, 2), b)


def _mm_out(call: Player, a: Any, b: Any) -> Any:
    a, b = (call(torch.Tensor.detach, call(torch.Tensor.to, t, torch.float32)) for t in (a, b))
    return call(torch.mm, a, b, out=call(torch.empty_like, a))


def _cross_entropy(call: Player, a: Any) -> Any:
    target = call(torch.arange, SIZE)
    return call(torch.mul, a, call(F.cross_entropy, a, target))


UNARY: dict[str, Callable[..., Any]] = {
    "bfloat16": _any(torch.Tensor.bfloat16),
    "cross_entropy": _cross_entropy,
    "cumsum": _any(torch.cumsum, 0),
    "detach": _any(torch.Tensor.detach),
    "double": _any(torch.Tensor.double),
    "exp": _any(torch.exp),
    "float": _any(torch.Tensor.float),
    "gelu": _any(F.gelu),
    "half": _any(torch.Tensor.half),
    "layer_norm": lambda call, a: call(F.layer_norm, call(torch.Tensor.float, a), (SIZE,)),
    "matrix_power": _any(torch.linalg.matrix_power, 3),
    "multi_dot": lambda call, a: call(torch.linalg.multi_dot, [a, a, a]),
    "pad": lambda call, a: call(
        operator.getitem, call(F.pad, a, (1, 1), "reflect"), (slice(None), slice(SIZE))
    ),
    "quantile": lambda call, a: call(
        torch.mul, a, call(torch.quantile, call(torch.Tensor.float, a), 0.5)
    ),
    "relu": _any(torch.relu),
    "softmax": _any(torch.softmax, -1),
    "sum": lambda call, a: call(torch.mul, a, call(torch.sum, a, 0, True)),
    "t": _any(torch.t),
    "view": lambda call, a: call(torch.Tensor.view, call(torch.Tensor.reshape, a, -1), SIZE, SIZE),
}
BINARY: dict[str, Callable[..., Any]] = {
    "add": _any(torch.add),
    "add_": _add_in_place,
    "attention": _attention,
    "cat": _cat,
    "cdist": lambda call, a, b: call(
        torch.cdist, *(call(torch.mul, t, 1) for t in call.alike(a, b))
    ),
    "conv1d": _conv1d,
    "einsum": lambda call, a, b: call(torch.einsum, "ij,jk->ki", *call.alike(a, b)),
    "inner": lambda call, a, b: call(torch.inner, *call.same(a, b)),
    "l1_loss": _alike(F.l1_loss, reduction="none"),
    "linear": _alike(F.linear),
    "matmul": lambda call, a, b: call(operator.matmul, *call.alike(a, b)),
    "mm": _alike(torch.mm),
    "mm_out": _mm_out,
    "mse_loss": _alike(F.mse_loss, reduction="none"),
    "mul": lambda call, a, b: call(operator.mul, a, b),
    "smooth_l1_loss": _alike(F.smooth_l1_loss, reduction="none"),
    "stack": _stack,
    "tensordot": lambda call, a, b: call(torch.tensordot, *call.same(a, b), dims=1),
    "where": lambda call, a, b: call(torch.where, call(torch.gt, a, 0), a, b),
}
TERNARY: dict[str, Callable[..., Any]] = {
    "addcmul": _alike(torch.addcmul),
    "addmm": _alike(torch.addmm),
    "linear with bias": _alike(F.linear),
}
CALLS = UNARY | BINARY | TERNARY
MATRIX_PRODUCTS = {"addmm", "linear", "linear with bias", "matmul", "mm"}
ARITY = {name: n for n, calls in enumerate((UNARY, BINARY, TERNARY), 1) for name in calls}


@dataclass(frozen=True)
class Step:
    """One step: "call" (a call, where its result goes and what it gets), "enter" (the arguments of
    `torch.autocast`), "exit", "break", or "checkpoint" and its "end" (the results inside)."""

    kind: str
    name: str = ""
    result: str = ""
    arguments: tuple[str, ...] = ()
    region: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Program:
    """Steps, the autocast state around them, and the one around the backward."""

    steps: tuple[Step, ...]
    around: tuple[tuple[str, Any], ...]
    backward: tuple[tuple[str, Any], ...]

    def source(self) -> str:
        """The program as a function of the inputs, for `torch.compile` and for reading."""
        lines, depth = [f"def program({', '.join((*INPUTS, *WEIGHTS))}):"], 1
        for step in self.steps:
            indent = "    " * depth
            if step.kind == "call":
                arguments = ", ".join(("call", *step.arguments))
                lines.append(f"{indent}{step.result} = CALLS[{step.name!r}]({arguments})")
            elif step.kind == "enter":
                arguments = ", ".join(f"{k}={v!r}" for k, v in step.region)
                lines.append(f"{indent}with torch.autocast({arguments}):")
                depth += 1
            elif step.kind == "checkpoint":
                lines.append(f"{indent}def {step.name}():")
                depth += 1
            elif step.kind == "end":
                results = ", ".join(step.arguments)
                lines.append(f"{indent}return {results},")
                depth -= 1
                lines.append(f"{indent[4:]}{results}, = checkpoint({step.name})")
            elif step.kind == "exit":
                depth -= 1
            else:
                lines.append(f"{indent}torch._dynamo.graph_break()")
        lines.append(f"    return {', '.join(self.outputs)},")
        return "\n".join(lines)

    @property
    def outputs(self) -> list[str]:
        """The results that come out: the later half of all."""
        results = [s.result for s in self.steps if s.kind == "call"]
        return results[len(results) // 2 :]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows a program that fails."""
        around = f"# around: {self.around}; around the backward: {self.backward}"
        printer.text(f"\n{self.source()}\n{around}\n")


_REGION = st.builds(
    lambda dtype, enabled, cache: (
        *(("device_type", "cpu"), ("dtype", dtype)),
        *(("enabled", enabled), ("cache_enabled", cache)),
    ),
    st.sampled_from([torch.bfloat16, torch.float16, torch.bfloat16, None]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from([None, None, False]),
)
_NOWHERE: tuple[tuple[str, Any], ...] = ()


@st.composite
def programs(draw: Callable[[Any], Any], checkpoints: bool = False) -> Program:
    """Programs of up to sixteen steps, with graph breaks or with checkpoints.

    Two things are left out. A weight under two dtypes before the outermost region ends: eager's
    cache does not tell them apart (tests/test_edge_semantics.py). And, where a region is around the
    program, a weight on both sides of a graph break: graphs that are lowered one by one share no
    cast (the option `weight_cache` sees to that).
    """
    around = draw(st.one_of(st.just(_NOWHERE), _REGION))
    backward = draw(st.one_of(st.just(_NOWHERE), st.just(_NOWHERE), _REGION))
    states = [AutocastState.off().inside([dict(around)] if around else [])]
    opened: list[Step] = []
    scope: dict[str, Any] = {}
    # With checkpoints, few values and calls: what they share is what shows.
    values, steps = ["w", "x"] if checkpoints else [*WEIGHTS[:2], *INPUTS], []
    calls = st.sampled_from(sorted(CALLS if not checkpoints else MATRIX_PRODUCTS | {"exp", "add"}))
    more = ["checkpoint", "checkpoint", "exit"] if checkpoints else ["break"]
    kinds = st.sampled_from(["call"] * 6 + ["enter", "enter", "exit", *more])
    count = draw(st.integers(4, 16))
    while len(steps) < count or opened:
        kind = draw(kinds) if len(steps) < count else "exit"
        if kind in ("enter", "checkpoint") and len(opened) < 3:
            region = draw(_REGION) if kind == "enter" else _NOWHERE
            states.append(states[-1].enter(**dict(region)) if region else states[-1])
            opened.append(Step(kind, f"body{len(steps)}", region=region))
            steps.append(opened[-1])
            steps.append(_a_call(draw, calls, values, states[-1], scope, len(steps)))
        elif kind == "exit" and opened:
            states.pop()
            first = opened.pop()
            if first.kind == "enter":
                steps.append(Step("exit"))
            else:
                inside = steps[steps.index(first) :]
                results = tuple(s.result for s in inside if s.kind == "call")
                steps.append(Step("end", first.name, arguments=results))
        elif kind == "break":
            steps.append(Step("break"))
            scope = dict.fromkeys(scope, "another graph's") if around else scope
        else:
            steps.append(_a_call(draw, calls, values, states[-1], scope, len(steps)))
        if not around and all(step.kind == "checkpoint" for step in opened):
            scope.clear()
    if all(step.kind == "break" for step in steps):
        steps.append(_a_call(draw, calls, values, states[-1], scope, len(steps)))
    return Program(tuple(steps), around, backward)


def _a_call(
    draw: Callable[[Any], Any],
    calls: st.SearchStrategy[str],
    values: list[str],
    state: AutocastState,
    scope: dict[str, Any],
    position: int,
) -> Step:
    name = draw(calls)
    picks = [draw(st.integers(0, len(values) - 1)) for _ in range(ARITY[name])]
    arguments = [values[i] for i in picks]
    if name == "linear with bias":
        arguments[2] = "bias"
    cpu = state.device("cpu")
    for i, argument in enumerate(arguments):
        if argument in CACHED and scope.setdefault(argument, cpu.dtype) != cpu.dtype:
            arguments[i] = "low"
    values.append(f"v{position}")
    return Step("call", name, values[-1], tuple(arguments))


@dataclass
class Piece:
    """One graph of a program, and the names of what goes in and comes out."""

    module: fx.GraphModule
    inputs: list[str]
    outputs: list[str]


class Writer(Player):
    """Writes calls into graphs, as Dynamo does: calls of functions and methods with example values,
    regions as enter and exit nodes, and at a graph break a new graph that enters them again."""

    def __init__(self, program: Program) -> None:
        self.pieces: list[Piece] = []
        self._mode = FakeTensorMode()
        self._fake = {n: self._mode.from_tensor(t) for n, t in make_inputs().items()}
        around = [dict(program.around)] if program.around else []
        self._states = [AutocastState.off().inside(around)]
        self._regions: list[tuple[Any, ...]] = []
        self._begin()
        for step in program.steps:
            self._play(step)
        self._end()

    def _begin(self) -> None:
        self._graph, self._nodes = fx.Graph(), dict[str, fx.Node]()
        self._inputs: list[str] = []
        self._open = [self._graph.call_function(_enter_autocast, r) for r in self._regions]

    def _end(self) -> None:
        for enter in reversed(self._open):
            self._graph.call_function(_exit_autocast, (enter,))
        results = [name for name in self._nodes if name not in self._inputs]
        self._graph.output(tuple(self._nodes[name] for name in results))
        module = fx.GraphModule(nn.Module(), self._graph)
        self.pieces.append(Piece(module, self._inputs, results))

    def _play(self, step: Step) -> None:
        if step.kind == "call":
            value = CALLS[step.name](self, *map(self._node, step.arguments))
            self._nodes[step.result] = value
            self._fake[step.result] = value.meta["example_value"]
        elif step.kind == "enter":
            region = dict(step.region)
            self._states.append(self._states[-1].enter(**region))
            names = ("device_type", "dtype", "enabled", "cache_enabled")
            self._regions.append(tuple(region[name] for name in names))
            self._open.append(self._graph.call_function(_enter_autocast, self._regions[-1]))
        elif step.kind == "exit":
            self._states.pop()
            self._regions.pop()
            self._graph.call_function(_exit_autocast, (self._open.pop(),))
        else:
            self._end()
            self._begin()

    def _node(self, name: str) -> fx.Node:
        if name not in self._nodes:
            with self._graph.inserting_before():  # in front of everything
                node = self._graph.placeholder(name)
            node.meta["example_value"] = self._fake[name]
            self._nodes[name] = node
            self._inputs.insert(0, name)
        return self._nodes[name]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        name = getattr(target, "__name__", "")
        if getattr(torch.Tensor, name, None) is target:
            node = self._graph.call_method(name, args, kwargs)
        else:
            node = self._graph.call_function(target, args, kwargs)
        given = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with self._mode, self._states[-1].applied():
            node.meta["example_value"] = target(*given[0], **given[1])
        return node

    def dtype(self, value: fx.Node) -> torch.dtype:
        return value.meta["example_value"].dtype

    def autocast(self) -> bool:
        return self._states[-1].device("cpu").enabled
