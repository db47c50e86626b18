"""What became of each call of a lowered graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch.autocast import enter_autocast, exit_autocast, wrap_with_autocast
from .._torch.dispatch import pass_autograd_keys, put_back_autograd_keys
from .._torch.dynamo_graphs import input_name
from ..graphs import names_of
from ..lowering.bodies import Bodies
from ..lowering.context import Context
from ..ops.smart_casts import SMART_CASTS
from ..regions import source_line
from .report import Report
from .stats import GraphStats, is_item_of_promote, source_of


@dataclass(frozen=True)
class Cast:
    """One tensor on its way through a smart cast.

    Attributes:
        value: what is cast: an input under its name in the user's program, or a node of the graph.
        op: the smart cast.
        source, result: dtypes, for the tensors the graph was made for; the same where the smart
            cast gives the tensor itself.
        node: the result's name in the graph; of one in a body, after the name of the body.
    """

    value: str
    op: str
    source: str
    result: str
    node: str = ""

    def __str__(self) -> str:
        if self.source == self.result:
            return f"{self.value}: {self.source} already"
        return f"{self.value}: {self.source} -> {self.result}"


@dataclass(frozen=True)
class Row:
    """One call of a lowered graph.

    Attributes:
        name, call: the node, a body's after the name of the body (`wrap_body_0.add`), and what it
            calls.
        arguments, results: dtypes, for the tensors the graph was made for.
        casts: the smart casts that its arguments come from.
        under: the autocast state that the call stays under; empty where it is off.
        line: the user's code.
    """

    name: str
    call: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    casts: tuple[Cast, ...]
    under: str
    line: str

    @property
    def place(self) -> str:
        """`line` in short: `model.py:12`, or the node where the graph knows no line."""
        found = re.match(r'File "(?:.*[/\\])?(.+)", line (\d+)', self.line)
        return f"{found[1]}:{found[2]}" if found else self.name


@dataclass(frozen=True)
class GraphReport:
    """One lowered graph.

    Attributes:
        title: which graph it is.
        summary: what was done in numbers, what stays under autocast and why, and where the casts
            of weights are made.
        rows: every call, in order.
        stats: what the calls counted, if they were to.
    """

    title: str
    summary: Report
    rows: tuple[Row, ...]
    stats: GraphStats = field(default_factory=GraphStats)

    @classmethod
    def of(cls, graph_module: fx.GraphModule, context: Context, name: str) -> GraphReport:
        """What the backend has made of one of Dynamo's graphs.

        Args:
            name: of the graph; its first line and the autocast state around it follow.
        """
        eager = context.ambient.enabled_devices if context.report.keepers else ()
        under = {d.device_type: _short(d.dtype) for d in eager}
        rows = tuple(rows_of(graph_module, under))
        at = f" ({rows[0].place})" if rows else ""
        return cls(f"{name}{at}, under {context.ambient}", context.report, rows)

    def __str__(self) -> str:
        """The calls that autocast or the option `policies` has to do with, and the casts that they
        get; and those whose results are not finite."""
        reasons = {b.node: b.reason for b in self.summary.bracketed}
        places = {weight.node: weight.place for weight in self.summary.weights}
        lines = [f"{self.title}: {self.summary}"]
        lines += [f"  {told}" for told in self.summary.passed_over]
        for row in self.rows:
            asked = self.summary.overridden.get(row.name)
            under = "" if self.summary.keepers else row.under  # said of all calls, above
            results = self.stats.results.get(row.name)
            if not (row.casts or under or asked or results):
                continue
            told = [*row.results, str(results)] if results else row.results
            lines.append(f"  {row.place}  {row.call} -> {', '.join(told)}")
            lines += [f"    {asked}"] if asked else []
            if under:
                lines.append(f"    stays under {under}: {reasons.get(row.name, 'as its body')}")
            for cast in row.casts:
                cast_told = (cast, places.get(cast.node), self.stats.casts.get(cast.node))
                lines.append("    " + ", ".join(str(part) for part in cast_told if part))
        return "\n".join(lines)


def rows_of(module: fx.GraphModule, under: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The calls of a lowered graph in order, those inside of a body after the call of the body.

    Smart casts are in the rows of the calls they are made for.

    Args:
        module: from the compiler, or the `graph_module` of an exported program.
        under: the autocast state around the graph, a dtype or "off" by device type.
    """
    yield from _rows_of_graph(module, _Names(names_of(module), {}), under or {})


@dataclass(frozen=True)
class _Names:
    """What nodes are called.

    Attributes:
        nodes: in the graph.
        inputs: in the user's program, those of bodies.
    """

    nodes: Mapping[fx.Node, str]
    inputs: Mapping[fx.Node, str]

    def value(self, node: fx.Node) -> str:
        """In the user's program, where that is known."""
        if node.op != "placeholder":
            return node.name
        return self.inputs[node] if node in self.inputs else input_name(node)

    def in_body(self, operands: Mapping[fx.Node, fx.Node]) -> _Names:
        """Those of a body, whose inputs are called what they are around it."""
        return replace(self, inputs={i: self.value(o) for i, o in operands.items()})


def _rows_of_graph(
    module: fx.GraphModule, names: _Names, under: Mapping[str, str]
) -> Iterator[Row]:
    open_brackets = [under]
    bodies = Bodies(module)
    for node in module.graph.nodes:
        if node.target is enter_autocast:
            open_brackets.append({**open_brackets[-1], **_state(node)})
        elif node.target is exit_autocast:
            open_brackets.pop()
        elif node.op.startswith("call_") and not _is_of_a_call(node):
            yield _row(node, names, open_brackets[-1])
            yield from _rows_of_bodies(module, bodies, names, node, open_brackets[-1])


def _row(node: fx.Node, names: _Names, under: Mapping[str, str]) -> Row:
    return Row(
        names.nodes[node],
        _name(node.target),
        _dtypes(map(_value, _arguments(node))),
        _dtypes([_value(node)]),
        tuple(cast for i in node.all_input_nodes if (cast := _cast_of(i, names)) is not None),
        ", ".join(f"{device_type}: {dtype}" for device_type, dtype in under.items()),
        source_line(node),
    )


def _rows_of_bodies(
    module: fx.GraphModule, bodies: Bodies, names: _Names, node: fx.Node, under: Mapping[str, str]
) -> Iterator[Row]:
    if node.target is wrap_with_autocast:
        under = {**under, **_state(node)}
    names = names.in_body(bodies.operands(node))
    for body in node.all_input_nodes:
        child = getattr(module, str(body.target), None) if body.op == "get_attr" else None
        if isinstance(child, fx.GraphModule):
            yield from _rows_of_graph(child, names, under)


_OF_CALLS = {*SMART_CASTS, torch.ops.smart_autocast.full_precision_dtype.default}
"""What lowering writes beside a call, for its arguments."""

_OF_BODIES = {pass_autograd_keys, put_back_autograd_keys}
"""What stands around the calls of a body that stays under autocast."""


def _is_of_a_call(node: fx.Node) -> bool:
    """Whether a node is written for other calls, and has no row of its own. A smart cast that the
    user calls, and whose result no call reads, has one."""
    if node.target in _OF_BODIES:
        return True
    if node.target not in _OF_CALLS and not is_item_of_promote(node):
        return False
    return any(user.op != "output" for user in node.users)


def _cast_of(node: fx.Node, names: _Names) -> Cast | None:
    """The smart cast a value comes from."""
    source = source_of(node)
    if source is None:
        return None
    cast: Any = node.args[0] if is_item_of_promote(node) else node
    return Cast(
        names.value(source), _name(cast.target), _dtype(source), _dtype(node), names.nodes[node]
    )


def _arguments(node: fx.Node) -> list[fx.Node]:
    """The values that a call reads, each as often as it reads it."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _dtypes(values: Any) -> tuple[str, ...]:
    leaves = pytree.tree_leaves(list(values))
    return tuple(_short(v.dtype) for v in leaves if isinstance(v, torch.Tensor))


def _dtype(node: fx.Node) -> str:
    """Inside of a `torch.func` transform, a cast has no example value."""
    return "".join(_dtypes([_value(node)])) or "a tensor"


def _state(node: fx.Node) -> dict[str, str]:
    """What a node that enters autocast says."""
    device_type, dtype, enabled = node.args[:3]
    return {str(device_type): _short(dtype) if enabled else "off"}


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
