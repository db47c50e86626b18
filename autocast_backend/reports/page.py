"""Reports as an HTML page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Iterable

from .rows import GraphReport, Row
from .stats import CastCounts, ResultCounts

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.2em 0.8em; }}
td {{ border-top: 1px solid #ccc; }}
tr.lowered td {{ background: #eef6ee; }}
tr.kept td {{ background: #fbeeee; }}
code {{ white-space: pre-wrap; }}
</style>
<h1>{title}</h1>
<p>Dtypes are those of the tensors that the graph was made for.</p>
{sections}
</html>
"""

_SECTION = """<h2>{title}</h2>
<p>{summary}</p>
{kept}{asked}{weights}<table>
<tr><th>call</th><th>of</th><th>arguments</th><th>results</th><th>casts</th><th>autocast</th>
<th>line</th></tr>
{rows}
</table>
"""


def to_html(title: str, graphs: Iterable[GraphReport], graph_breaks: Iterable[str] = ()) -> str:
    """One page: for each graph what was done in numbers, what stays under autocast and why, where
    each weight is cast, and every call with the casts of its arguments; then the graph breaks."""
    sections = [*map(_section, graphs), _list("Graph breaks", graph_breaks)]
    return _PAGE.format(title=html.escape(title), sections="\n".join(sections))


def _section(graph: GraphReport) -> str:
    return _SECTION.format(
        title=html.escape(graph.title),
        summary=html.escape(str(graph.summary)),
        kept=_list("Stays under autocast", graph.summary.bracketed),
        asked=_list("Other policies", (f"{n}: {o}" for n, o in graph.summary.overridden.items()))
        + _list("Not named", graph.summary.passed_over),
        weights=_list("Casts of weights", graph.summary.weights),
        rows="\n".join(_row(graph, row) for row in graph.rows),
    )


def _list(title: str, items: Iterable[object]) -> str:
    lines = "".join(f"<li><code>{html.escape(str(item))}</code></li>\n" for item in items)
    return f"<h3>{title}</h3>\n<ul>\n{lines}</ul>\n" if lines else ""


def _row(graph: GraphReport, row: Row) -> str:
    stats = graph.stats
    casts = (_told(f"{cast} ({cast.op})", stats.casts.get(cast.node)) for cast in row.casts)
    results = _told(", ".join(row.results), stats.results.get(row.name))
    kind = "kept" if row.under else "lowered" if row.casts else "untouched"
    cells = (row.name, row.call, ", ".join(row.arguments), results, "; ".join(casts))
    texts = (*cells, row.under or "off", row.line)
    return f'<tr class="{kind}">' + "".join(f"<td>{html.escape(t)}</td>" for t in texts) + "</tr>"


def _told(what: str, counts: CastCounts | ResultCounts | None) -> str:
    return f"{what}, {counts}" if counts else what
