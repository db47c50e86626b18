"""What became of each call of a lowered graph."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import ops as _ops  # noqa: F401  (defines torch.ops.smart_autocast)
from .._torch.autocast import enter_autocast, exit_autocast, wrap_with_autocast
from .._torch.dynamo import input_name
from ..graphs import names_of
from ..regions import source_line
from .report import Report


@dataclass(frozen=True)
class Cast:
    """One tensor on its way through a smart cast.

    Attributes:
        value: what is cast: an input under its name in the user's program, or a node of the graph.
        op: the smart cast.
        source, result: dtypes, for the tensors the graph was made for; the same where the smart
            cast gives the tensor itself.
    """

    value: str
    op: str
    source: str
    result: str

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
    """

    title: str
    summary: Report
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        """The calls that autocast or the option `policies` has to do with, and the casts that they
        get."""
        reasons = {b.node: b.reason for b in self.summary.bracketed}
        places = {(w.weight, _short(w.dtype)): w.place for w in self.summary.weights}
        lines = [f"{self.title}: {self.summary}"]
        lines += [f"  {told}" for told in self.summary.passed_over]
        for row in self.rows:
            asked = self.summary.overridden.get(row.name)
            if not row.casts and not row.under and not asked:
                continue
            lines.append(f"  {row.place}  {row.call} -> {', '.join(row.results)}")
            lines += [f"    {asked}"] if asked else []
            if row.under:
                lines.append(f"    stays under {row.under}: {reasons.get(row.name, 'as its body')}")
            for cast in row.casts:
                made = places.get((cast.value, cast.result))
                lines.append(f"    {cast}" + (f", {made}" if made else ""))
        return "\n".join(lines)


def rows_of(module: fx.GraphModule, under: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The calls of a lowered graph in order, those inside of a body after the call of the body.

    Smart casts are in the rows of the calls they are made for.

    Args:
        module: from the compiler, or the `graph_module` of an exported program.
        under: the autocast state around the graph, a dtype or "off" by device type.
    """
    yield from _rows_of_graph(module, names_of(module), under or {})


def _rows_of_graph(
    module: fx.GraphModule, names: Mapping[fx.Node, str], under: Mapping[str, str]
) -> Iterator[Row]:
    open_brackets = [under]
    for node in module.graph.nodes:
        if node.target is enter_autocast:
            open_brackets.append({**open_brackets[-1], **_state(node)})
        elif node.target is exit_autocast:
            open_brackets.pop()
        elif node.op.startswith("call_") and not _is_cast(node) and not _is_item(node):
            yield from _rows_of_call(module, names, node, open_brackets[-1])


def _rows_of_call(
    module: fx.GraphModule, names: Mapping[fx.Node, str], node: fx.Node, under: Mapping[str, str]
) -> Iterator[Row]:
    inputs = node.all_input_nodes
    yield Row(
        names[node],
        _name(node.target),
        _dtypes(map(_value, inputs)),
        _dtypes([_value(node)]),
        tuple(cast for cast in map(_cast_of, inputs) if cast is not None),
        ", ".join(f"{device_type}: {dtype}" for device_type, dtype in under.items()),
        source_line(node),
    )
    if node.target is wrap_with_autocast:
        under = {**under, **_state(node)}
    for body in inputs:
        child = getattr(module, str(body.target), None) if body.op == "get_attr" else None
        if isinstance(child, fx.GraphModule):
            yield from _rows_of_graph(child, names, under)


def _is_cast(node: Any) -> bool:
    return getattr(node.target, "namespace", "") == "smart_autocast"


def _is_item(node: fx.Node) -> bool:
    """Whether a node takes one tensor out of what `promote` gives, a list."""
    return node.target is operator.getitem and _is_cast(node.args[0])


def _cast_of(node: fx.Node) -> Cast | None:
    """The smart cast a value comes from."""
    arguments: Any = node.args
    if _is_item(node):
        cast, position = arguments
        source = cast.args[0][position]
    elif _is_cast(node):
        cast, source = node, arguments[0]
    else:
        return None
    value = input_name(source) if source.op == "placeholder" else source.name
    return Cast(value, _name(cast.target), _dtype(source), _dtype(node))


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
