"""What `torch._dynamo.utils.counters` and the log get to know of each graph."""

from __future__ import annotations

import itertools
import logging

from torch import fx

from .. import _logging
from .._torch.dynamo import counters
from ..lowering.context import Context

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
