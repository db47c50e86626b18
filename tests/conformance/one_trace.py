"""One Dynamo trace, compiled and run in several ways: tracing is the most of what a check costs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

from autocast_backend._torch.autocast import disable_autocast, enter_autocast
from autocast_backend._torch.dynamo import lookup_backend
from autocast_backend.backend import smart_autocast
from autocast_backend.graphs import copy_graph, nodes_of
from autocast_backend.lowering.context import Context
from autocast_backend.lowering.propagate import propagate
from autocast_backend.state import AutocastState
from tests.support import DEVICE, assert_same_bits

Graph = fx.GraphModule
Backend = Callable[[Graph, Sequence[Any]], Callable[..., Any]]


def ours(graph_module: Graph, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Lowered, with gradients by AOTAutograd."""
    return smart_autocast(graph_module, inputs, options={"inner": "aot_eager"})


RUNS_OF_EAGER_MODE = 5
"""On a GPU, where sums whose order is left open have the same bits now and then."""

WAYS: Mapping[str, Backend] = {
    "eager": lookup_backend("eager"),
    "ours": ours,
    "stock": lookup_backend("aot_eager"),
}


class OneTrace:
    """A backend of torch.compile: every graph is compiled in each way at once, and runs in the one
    that is chosen when it is called.

    Args:
        ways: which of `WAYS`; the first one is chosen in the beginning.
        dtypes: of the regions. A graph is traced with the first one, and copied for the others;
            ours is compiled again for these where autocast acts in it.

    Attributes:
        acts: whether autocast does in a graph, as we lower it.
    """

    def __init__(self, ways: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
        self._ways, self._dtypes = ways, dtypes
        self._chosen = (ways[0], dtypes[0])
        self.acts = False

    @contextlib.contextmanager
    def chosen(self, way: str, dtype: torch.dtype) -> Iterator[None]:
        """Calls inside run in this way, with regions of this dtype."""
        before, self._chosen = self._chosen, (way, dtype)
        yield
        self._chosen = before

    def __call__(self, graph_module: Graph, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: dict[Any, Callable[..., Any]] = {}
        first, acted = self._dtypes[0], _calls_with_casts()
        for dtype in self._dtypes:
            graph = graph_module if dtype is first else with_regions_of(dtype, graph_module)
            for way in self._ways:
                if way == "ours" and dtype is not first and _calls_with_casts() == acted:
                    compiled[way, dtype] = compiled[way, first]
                else:
                    compiled[way, dtype] = WAYS[way](copy_graph(graph), inputs)
        self.acts |= _calls_with_casts() > acted
        return lambda *args: compiled[self._chosen](*args)


def _calls_with_casts() -> int:
    """How many calls our backend has found so far that autocast does something to."""
    counted = counters["smart_autocast"]
    return counted["lowered"] + counted["bracketed"] + counted["left_eager"]


def with_regions_of(dtype: torch.dtype, graph_module: Graph) -> Graph:
    """A copy of a graph whose regions are of another dtype, with the example values it then has."""
    copy = copy_graph(graph_module)
    for node in nodes_of(copy):
        if node.target is enter_autocast:
            device_type, _, *rest = node.args
            node.args = (device_type, dtype, *rest)
    copy.recompile()
    with disable_autocast():
        return propagate(copy, Context(ambient=AutocastState.off()))


def may_be_stocks(name: str, known: Collection[str]) -> bool:
    """Whether ours may have the bits of stock where eager mode's are others: for what is known to
    differ on the CPU, and for all on a GPU."""
    return DEVICE != "cpu" or name in known


def same_bits_or_why_not(
    outcome: Callable[[str], Any], expected: Any, name: str, known: Collection[str]
) -> str | None:
    """Ours must have the bits of eager mode, `expected`, or may have stock's (`may_be_stocks`).

    On a GPU, where it is not eager mode's bits, the reason: stock's, or what eager mode gives
    changes from run to run.
    """
    actual = outcome("ours")
    try:
        assert_same_bits(actual, expected, name)
        return None
    except AssertionError:
        for _ in range(RUNS_OF_EAGER_MODE if DEVICE != "cpu" else 0):
            try:
                assert_same_bits(outcome("eager"), expected, name)
            except AssertionError as error:
                return f"eager mode's bits change from run to run: {error}"
        assert may_be_stocks(name, known)
        assert_same_bits(actual, outcome("stock"), name)
        return None if DEVICE == "cpu" else "stock's bits, not eager mode's"


def skip_for(reasons: Sequence[str | None]) -> None:
    """Skip a test for the reasons that some of its parts gave, after all of them have run."""
    if any(reasons):
        pytest.skip("; ".join(reason for reason in reasons if reason))
