"""What became of each call of a program, as an HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from .. import ops as _ops  # noqa: F401  (defines torch.ops.smart_autocast)
from .._torch.autocast import wrap_with_autocast
from ..regions import source_line
from ..report import Report


@dataclass(frozen=True)
class Row:
    """One call of a lowered program.

    Attributes:
        name, call: the node, and what it calls.
        arguments, results: dtypes, for the inputs the program was exported with.
        casts: the smart casts that its arguments come from.
        under: the autocast state that the call stays under; empty where it is off.
        line: the user's code.
    """

    name: str
    call: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    casts: tuple[str, ...]
    under: str
    line: str


def rows_of(program: ExportedProgram) -> list[Row]:
    """The calls of a lowered program in order, those inside of bodies after the calls of the
    bodies. Smart casts are in the rows of the calls they are made for."""
    return list(_rows(program.graph_module, ""))


def _rows(module: fx.GraphModule, under: str) -> Iterator[Row]:
    for node in module.graph.nodes:
        if node.op != "call_function" or _is_cast(node):
            continue
        inputs = node.all_input_nodes
        yield Row(
            node.name,
            _name(node.target),
            _dtypes(n.meta.get("val") for n in inputs),
            _dtypes([node.meta.get("val")]),
            tuple(_name(cast.target) for cast in map(_cast_of, inputs) if cast is not None),
            under,
            source_line(node),
        )
        inside = under
        if node.target is wrap_with_autocast:
            device_type, dtype, enabled = node.args[:3]
            inside = f"{device_type}: {_short(dtype) if enabled else 'off'}"
        for body in inputs:
            child = getattr(module, str(body.target), None) if body.op == "get_attr" else None
            if isinstance(child, fx.GraphModule):
                yield from _rows(child, inside)


def _is_cast(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "smart_autocast"


def _cast_of(node: fx.Node) -> fx.Node | None:
    """The smart cast a value comes from; `promote` gives a list, of which `getitem` takes one."""
    if _is_cast(node):
        return node
    sources = [n for n in node.all_input_nodes if _is_cast(n)]
    return sources[0] if _name(node.target) == "getitem" and sources else None


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _dtypes(values: Any) -> tuple[str, ...]:
    leaves = pytree.tree_leaves(list(values))
    return tuple(_short(v.dtype) for v in leaves if isinstance(v, torch.Tensor))


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Casts of {title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.2em 0.8em; }}
td {{ border-top: 1px solid #ccc; }}
tr.lowered td {{ background: #eef6ee; }}
tr.kept td {{ background: #fbeeee; }}
code {{ white-space: pre-wrap; }}
</style>
<h1>Casts of {title}</h1>
<p>{summary}. Dtypes are those of the inputs the program was exported with.</p>
{kept}
<table>
<tr><th>call</th><th>of</th><th>arguments</th><th>results</th><th>casts</th><th>autocast</th>
<th>line</th></tr>
{rows}
</table>
</html>
"""


def to_html(program: ExportedProgram, report: Report, title: str) -> str:
    """One page: what was done in numbers, what stays under autocast and why, and every call with
    the casts of its arguments."""
    kept = "".join(f"<li><code>{html.escape(str(b))}</code></li>\n" for b in report.bracketed)
    return _PAGE.format(
        title=html.escape(title),
        summary=html.escape(str(report)),
        kept=f"<h2>Stays under autocast</h2>\n<ul>\n{kept}</ul>" if kept else "",
        rows="\n".join(map(_to_html, rows_of(program))),
    )


def _to_html(row: Row) -> str:
    cells = (row.name, row.call, *map(", ".join, (row.arguments, row.results, row.casts)))
    kind = "kept" if row.under else "lowered" if row.casts else "untouched"
    texts = (*cells, row.under or "off", row.line)
    return f'<tr class="{kind}">' + "".join(f"<td>{html.escape(t)}</td>" for t in texts) + "</tr>"
