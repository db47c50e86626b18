"""A warning for code that options are to change, and that Dynamo does not compile."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .. import _logging
from .._torch.graph_breaks import GraphBreak, tell_of_breaks

log = _logging.log

_COMPUTES_NOTHING = re.compile(
    r"Data-dependent branching|Unsupported Tensor\.item|Call to `torch\._dynamo\.graph_break|"
    r".*builtin operator `print`",
    re.DOTALL,
)


def warn_of_breaks(backend: Callable[..., Any]) -> None:
    """From now on, log a warning for each place that Dynamo leaves to Python, in functions that are
    compiled with options of `backend` that change results."""
    tell_of_breaks(backend, _given, _warn)


def _given(options: Any) -> list[str] | None:
    """Which of the options there are that Python's code would not heed."""
    if not isinstance(options, Mapping):
        return None
    return [name for name in ("autocast", "policies") if options.get(name)] or None


def _warn(found: GraphBreak, given: list[str]) -> None:
    if _COMPUTES_NOTHING.match(found.why) and not found.whole:
        return
    log.warning(
        "%s: Dynamo leaves %s to Python, where the options %s do not apply: %s. "
        "If it computes what they are to change, have it compiled (fullgraph=True makes an error "
        "of this), or write the regions into the code",
        found.place,
        "the function around this line" if found.whole else "what this line calls",
        given,
        found.why.splitlines()[0],
    )
