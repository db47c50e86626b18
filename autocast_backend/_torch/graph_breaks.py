"""Graph breaks: where Dynamo leaves code to Python, as its log says."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

_GRAPH_BREAK = re.compile(
    r"in user code at (?P<file>[^\n]+):(?P<line>\d+)\n"
    r"Graph Break Reason: (?:(?P<how>[^\n]+):\n\n)?(?P<why>.+?)"
    r"(?=\n\nStack variable source attribution:|\n\nUser code traceback:|\Z)",
    re.DOTALL,
)

_RECOMPILE_LIMIT = re.compile(
    r"torch\._dynamo hit config\.(?P<limit>\w+ \(\d+\))\n"
    r"   function: (?P<function>'[^']+') \((?:.*[/\\])?(?P<place>[^\n]+:\d+)\)"
)

_BREAKS_LOG = "torch._dynamo.symbolic_convert.__graph_breaks"


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo breaks a graph.

    Attributes:
        file: the path of the code.
        line: its line.
        whole: whether the whole function runs in Python, and not only what stands there.
        why: Dynamo's reason, with its hints.
    """

    file: str
    line: int
    whole: bool
    why: str

    @property
    def place(self) -> str:
        """File and line, such as `train.py:12`."""
        return f"{Path(self.file).name}:{self.line}"

    @staticmethod
    def of(text: str) -> GraphBreak | None:
        """What Dynamo has logged, if it is a graph break."""
        match = _GRAPH_BREAK.search(text)
        if match is None:
            return None
        whole = "falling back to eager" in (match["how"] or "")
        return GraphBreak(match["file"], int(match["line"]), whole, match["why"].strip())


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Collect where, and why, Dynamo breaks graphs in a `with` block, in any thread, and which
    functions it leaves to eager mode for that, or because it has compiled them too often.

    From its log: its counters do not have the breaks at a branch that depends on a tensor's value,
    nor those in a loop.
    """
    found: list[str] = []

    def note(text: str) -> None:
        if text not in found:  # logged once more where Dynamo resumes after another break
            found.append(text)

    def note_break(text: str) -> None:
        if one := GraphBreak.of(text):
            of = ", in a function that runs in eager mode" if one.whole else ""
            text = f"{one.place}{of}: {one.why}"
        note(text)

    def note_limit(text: str) -> None:
        if match := _RECOMPILE_LIMIT.search(text):
            note(
                f"{match['place']}, in a function that runs in eager mode from some call on: "
                f"{match['function']} was compiled as often as {match['limit']} allows"
            )

    limits = "torch._dynamo.convert_frame"
    with _heard(_BREAKS_LOG, "debug", note_break), _heard(limits, "warning", note_limit):
        yield found


def tell_of_breaks(
    backend: Callable[..., Any],
    wanted: Callable[[Any], _T | None],
    note: Callable[[GraphBreak, _T], None],
) -> None:
    """From now on, call `note` for each graph break of `torch.compile(backend=backend)`, in any
    thread.

    Args:
        backend: a function, as it is registered.
        wanted: what `note` is to get besides, given the options of `torch.compile`; None where
            it is not to be called.
    """
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.symbolic_convert import InstructionTranslator

    def now() -> _T | None:
        try:
            compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
        except AttributeError:  # no translation on this thread
            return None
        compiler = innermost_backend(compiler)
        if getattr(compiler, "compiler_fn", None) is not backend:
            return None
        return wanted(compiler.kwargs.get("options"))

    def note_break(text: str) -> None:
        found, given = GraphBreak.of(text), now()
        if found is not None and given is not None:
            note(found, given)

    _hear(_BREAKS_LOG, "debug", _Hearer(note_break, lambda: now() is not None))


class _Hearer(NamedTuple):
    """Who is told what is logged.

    Attributes:
        note: gets the text.
        listens: whether the text of this moment is wanted, should the log be off.
    """

    note: Callable[[str], None]
    listens: Callable[[], bool] = lambda: True


_hearers: dict[str, list[_Hearer]] = {}
_hearing = threading.Lock()


@contextlib.contextmanager
def _heard(name: str, method: str, note: Callable[[str], None]) -> Iterator[None]:
    """Have `note` hear a logger in a `with` block."""
    hearer = _Hearer(note)
    _hear(name, method, hearer)
    try:
        yield
    finally:
        with _hearing:
            _hearers[name].remove(hearer)
            if not _hearers[name]:
                del _hearers[name]
                log = logging.getLogger(name)
                delattr(log, method)
                if method == "debug":
                    del log.isEnabledFor


def _hear(name: str, method: str, hearer: _Hearer) -> None:
    """Tell what is logged by one method of a logger, whatever becomes of it then: levels, filters
    and handlers are the program's, which may set them at any time."""
    with _hearing:
        if name not in _hearers:
            _hearers[name] = []
            _let_hear(logging.getLogger(name), method, _hearers[name])
        _hearers[name].append(hearer)


def _let_hear(log: Any, method: str, hearers: list[_Hearer]) -> None:
    def is_on(level: int) -> bool:
        return type(log).isEnabledFor(log, level)

    def hear(message: str, *args: Any, **kwargs: Any) -> None:
        for hearer in list(hearers):
            hearer.note(message % args if args else message)
        if is_on(getattr(logging, method.upper())):
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's place, not ours
            getattr(type(log), method)(log, message, *args, **kwargs)

    setattr(log, method, hear)
    if method == "debug":  # PyTorch asks before it writes one
        log.isEnabledFor = lambda level: is_on(level) or any(h.listens() for h in list(hearers))
