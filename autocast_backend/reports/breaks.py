"""A warning for code that options are to change, and that Dynamo does not compile."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import _logging
from .._torch.graph_breaks import GraphBreak, tell_of_breaks

log = _logging.log

_OF_THE_PROGRAM = re.compile(
    r"Skip calling `torch\.compiler\.disable|Attempted to wrap RNN|"
    r"Unsupported function call \(delayed\)"
)
_SKIPPED = re.compile(r"Attempted to (?:call|inline) function marked as skipped")
_FILE = re.compile(r"(?:in file|filename:) `([^`]+)`")
_MODULE = re.compile(r"module: (\w+)")
_CODE_OF_MODULES = os.path.join(torch.__path__[0], "nn", "modules", "")


def warn_of_breaks(backend: Callable[..., Any]) -> None:
    """From now on, log a warning for each place that Dynamo leaves to Python, in functions that are
    compiled with options of `backend` that change results.

    Not told are breaks at what computes nothing that autocast would change: branches and numbers
    that depend on data, `print` and other functions of Python's, and those of torch's own that
    Dynamo does not trace, such as `backward()` and `torch.save`.
    """
    tell_of_breaks(backend, _given, _warn)


def _given(options: Any) -> list[str] | None:
    """Which of the options there are that Python's code would not heed."""
    if not isinstance(options, Mapping):
        return None
    return [name for name in ("autocast", "policies") if options.get(name)] or None


def _warn(found: GraphBreak, given: list[str]) -> None:
    if found.whole:
        if _is_of_torch(found.file) and not found.file.startswith(_CODE_OF_MODULES):
            return
    elif not (_OF_THE_PROGRAM.match(found.why) or _is_foreign(found.why)):
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


def _is_of_torch(file: str) -> bool:
    return Path(file).is_relative_to(torch.__path__[0])


def _is_foreign(why: str) -> bool:
    """Whether a break is at a function of another package than Python and torch."""
    if not _SKIPPED.match(why):
        return False
    if file := _FILE.search(why):
        if _is_of_torch(file[1]):
            return False
        path = Path(file[1])
        installed = "site-packages" in path.parts  # below Python's own files, without a venv
        return installed or not path.is_relative_to(sysconfig.get_path("stdlib"))
    module = _MODULE.search(why)
    return module is not None and module[1] not in {"torch", "None", *sys.stdlib_module_names}
