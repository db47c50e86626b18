"""What the compiler did to one graph, for logs, tests and benchmarks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .._torch.ops import OpOverload
from ..state import AutocastState


@dataclass(frozen=True)
class Bracketed:
    """One node that stays under real autocast, and why.

    Attributes:
        node: its name in the graph.
        call: what it calls.
        reason: what could not be proved.
        line: the user's code, where the graph knows it.
    """

    node: str
    call: str
    reason: str
    line: str = ""

    @property
    def where(self) -> str:
        """The call, and its line."""
        return f"{self.node} = {self.call}" + (f" [{self.line}]" if self.line else "")

    def __str__(self) -> str:
        return f"{self.node} = {self.call}: {self.reason}" + (
            f" [{self.line}]" if self.line else ""
        )


@dataclass(frozen=True)
class WeightCast:
    """One cast of a weight, and where it is made.

    Attributes:
        weight: what the weight is called in the user's program.
        dtype: what it is cast to.
        inside: why the cast stays in the graph; None where it is made outside.
        node: the cast's name in the lowered graph.
        from_second_call: whether the first call in a context makes it in the graph all the same.
    """

    weight: str
    dtype: torch.dtype
    inside: str | None = None
    node: str = ""
    from_second_call: bool = False

    @property
    def place(self) -> str:
        """Where the cast is made, and why there."""
        if self.inside is not None:
            return f"in the graph: {self.inside}"
        later = " from the second call in a context on" if self.from_second_call else ""
        return f"outside of the graph{later}"

    def __str__(self) -> str:
        return f"{self.weight} -> {str(self.dtype)[6:]}, {self.place}"


@dataclass
class Report:
    """Counts and reasons of one compilation.

    Attributes:
        lowered: nodes whose policy became smart casts.
        untouched: nodes inside a region that autocast leaves alone.
        bracketed: nodes that stay under real autocast.
        overridden: nodes that the option `policies` names and autocast would treat otherwise, and
            the entry that names each; most are among the lowered ones, those that are "off" are in
            no other count.
        entries: all entries of the option.
        passed_over: what some of them seem to name, and do not.
        casts: smart cast nodes added (weights shared by several readers count once), those of what
            is in their dtype already among them. What bracketed calls cast is not.
        weights: the casts of weights among them, and where each is made.
        opaque: custom ops without an autocast rule, and the state that they stand under.
        keepers: calls of a graph that is left to eager autocast, and so not lowered at all: casts
            that they make of weights could not be shared with other calls, or they are mistraced.
        mistraced: calls of which AOTAutograd's trace would give another dtype than eager autocast.
        checked: distinct calls that were validated in this compilation; the others were known.
        seconds: time by stage.
    """

    lowered: int = 0
    untouched: int = 0
    bracketed: list[Bracketed] = field(default_factory=list)
    overridden: dict[str, str] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    casts: int = 0
    weights: list[WeightCast] = field(default_factory=list)
    opaque: dict[OpOverload, AutocastState] = field(default_factory=dict)
    keepers: list[str] = field(default_factory=list)
    mistraced: list[str] = field(default_factory=list)
    checked: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        """How many calls stand inside a region."""
        return self.lowered + self.untouched + len(self.bracketed)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a `with` block to `seconds[stage]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        if self.keepers:
            return f"not compiled because of {', '.join(self.keepers)}: it runs as in eager mode"
        if not self.nodes and not self.overridden:
            return "no call stands inside of an autocast region"
        return (
            f"{_counted(self.lowered, 'node')} lowered, {self.untouched} untouched, "
            f"{len(self.bracketed)} bracketed; {_counted(self.casts, 'smart cast')}, "
            f"{sum(w.inside is None for w in self.weights)} of weights that may leave the graph"
            + (f"; {_counted(len(self.overridden), 'call')} overridden" if self.overridden else "")
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
