"""What `torch._dynamo.utils.counters`, the log and PyTorch's structured trace get to know of each
graph."""

from __future__ import annotations

import itertools
import logging

from torch import fx

from .. import _logging
from .._torch.dynamo import counters
from .._torch.structured_trace import trace_artifact
from ..lowering.context import Context
from .rows import GraphReport

log = _logging.log


def tell(graph_module: fx.GraphModule, context: Context) -> None:
    """Count what was done to a graph in Dynamo's counters, and log it: in numbers, with what stays
    under autocast; at the level of debugging with its weights and the lowered graph, too."""
    report = context.report
    counted = counters()["smart_autocast"]
    counted["graphs"] += 1
    counted["lowered"] += report.lowered
    counted["untouched"] += report.untouched
    counted["bracketed"] += len(report.bracketed)
    counted["overridden"] += len(report.overridden)
    counted["casts"] += report.casts
    counted["checked"] += report.checked
    log.info("under %s: %s", context.ambient, report)
    if not report.nodes:
        return
    for _, alike in itertools.groupby(report.bracketed, lambda bracketed: bracketed.reason):
        first, *rest = alike
        also = "".join(f"; so does {bracketed.where}" for bracketed in rest)
        log.info("stays under autocast: %s%s", first, also)
    for weight in report.weights:
        log.debug("weight %s", weight)
    if log.isEnabledFor(logging.DEBUG):
        code = graph_module.print_readable(print_output=False)
        log.debug("lowered graph:\n%s", code)


def trace(graph_module: fx.GraphModule, context: Context) -> None:
    """Leave a graph as it is compiled, and what `explain` tells of it, in the structured trace; of
    one in which autocast has no part, nothing."""
    report = context.report
    if not (report.nodes or report.overridden or report.keepers):
        return
    trace_artifact(
        "smart_autocast_lowered_graph", lambda: graph_module.print_readable(print_output=False)
    )
    trace_artifact(
        "smart_autocast_casts", lambda: str(GraphReport.of(graph_module, context, "a graph"))
    )
