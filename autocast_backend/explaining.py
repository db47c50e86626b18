"""`explain`: every cast of a function, in the line that it is made for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from . import backend
from ._torch.dynamo import uncompiled
from ._torch.graph_breaks import graph_breaks
from .lowering.context import Context
from .options import OptionTypeError, parse_options
from .reports.page import to_html
from .reports.rows import GraphReport


@dataclass
class CastReport:
    """What `explain` found. `print` shows it.

    Attributes:
        graphs: the graphs Dynamo made, in the order in which they were compiled.
        graph_breaks: why there is more than one, or none: `train.py:12: `, and Dynamo's reason with
            its hints. `print` shows the reason alone.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [str(graph) for graph in self.graphs] or [
            'no graph was compiled with backend="smart_autocast"'
        ]
        summaries = [graph.summary for graph in self.graphs]
        named = {asked for summary in summaries for asked in summary.overridden.values()}
        for entry in dict.fromkeys(entry for summary in summaries for entry in summary.entries):
            parts += [] if entry in named else [f"{entry} names no call"]
        for reason in self.graph_breaks:
            first, *rest = reason.splitlines()
            parts.append(f"graph break in {first}")
            parts += [f"  {line.strip()}" for line in rest if "Explanation: " in line][:1]
        return "\n".join(parts)

    def to_html(self, title: str = "Casts") -> str:
        """The same as a page that needs no other file, with every call of every graph, and Dynamo's
        hints about graph breaks."""
        return to_html(title, self.graphs, self.graph_breaks)


@contextlib.contextmanager
def collecting(*, stats: bool = False) -> Iterator[CastReport]:
    """Report on each graph that `backend="smart_autocast"` lowers in a `with` block, in any thread.

    What was compiled before is not compiled again, and so not reported.

    Args:
        stats: whether the graphs count what becomes of values. They run op by op then.
    """
    report = CastReport()

    def add(graph_module: fx.GraphModule, context: Context) -> backend.Inner | None:
        graph = GraphReport.of(graph_module, context, f"graph {len(report.graphs) + 1}")
        report.graphs.append(graph)
        if not stats:
            return None
        graph.stats.count_in(graph_module)
        return _run_as_it_is

    backend.listeners.append(add)
    try:
        with graph_breaks() as report.graph_breaks:
            yield report
    finally:
        backend.listeners.remove(add)


def explain(
    fn: Callable[..., Any], *arguments: Any, stats: bool = False, **options: Any
) -> Callable[..., CastReport]:
    """What `torch.compile(fn, backend="smart_autocast", options=options)` does to each call.

        with torch.autocast("cpu", dtype=torch.bfloat16):
            print(explain(model)(x))

    Calling what it returns runs `fn` once, with all that `fn` changes, as `torch._dynamo.explain`
    does: lowered and validated, but compiled no further. Like it, it makes `torch.compile` forget
    what this process has compiled before.

    Args:
        fn: a function or module, compiled already or not.
        arguments: none; those of `fn` go to what this returns.
        stats: also count, while `fn` runs, what each cast loses and which results of calls are not
            finite. Casts inside of calls that stay under autocast, and what runs inside of a
            `torch.func` transform, are not counted; what a checkpoint runs again is so twice.
        options: those of the backend, as keyword arguments. `inner` and `inductor` are checked,
            and change nothing.

    Returns:
        A function of `fn`'s arguments that returns a `CastReport` for the autocast state, the grad
        mode and the arguments that it is called with. Where `fn` raises, its exception has what
        there is of the report as a note.

    Raises:
        TypeError: `fn` cannot be called, there are `arguments`, or `stats` is no bool.
        OptionValueError, OptionTypeError: options that cannot be, before `fn` runs.
    """
    if not callable(fn):
        raise OptionTypeError(f"fn: expected a function or a module; got {type(fn).__name__}")
    if arguments:
        raise OptionTypeError(
            f"explain: expected a function or a module alone; got {len(arguments)} more: call what "
            "it returns with them, as explain(model)(x)"
        )
    if not isinstance(stats, bool):
        raise OptionTypeError(f"stats: expected True or False; got {stats!r}")
    for name in ("options", "mode", "backend"):
        if name in options:
            raise OptionTypeError(
                f'explain takes no {name!r}: it takes the options of backend="smart_autocast" as '
                'keyword arguments, such as explain(model, validate="dtype")'
            )
    parse_options(options, mode=None)
    options = {k: v for k, v in options.items() if k != "inductor"} | {"inner": _run_as_it_is}

    def run(*args: Any, **kwargs: Any) -> CastReport:
        torch.compiler.reset()
        try:
            with collecting(stats=stats) as report:
                compiled = torch.compile(
                    uncompiled(fn), backend=backend.smart_autocast, options=options
                )
                try:
                    compiled(*args, **kwargs)
                except Exception as error:
                    if report.graphs:
                        error.add_note(f"Until then, of what autocast does:\n{report}")
                    raise
        finally:
            torch.compiler.reset()
        return report

    return run


def _run_as_it_is(graph_module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return graph_module.forward
