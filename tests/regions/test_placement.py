"""The regions pass: which node stands under which autocast state."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autocast_backend._torch.autocast import enter_autocast, exit_autocast
from autocast_backend.regions import AMBIENT, Placement, RegionError, find_regions
from autocast_backend.state import AutocastState
from tests.support import BF16

OFF = AutocastState.off()


def graph_of(*steps: str) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A graph from steps: a name is a call; `+a` enters region a (`-cpu`: switched off), `-a`
    leaves it, `!` clears the weight cache, `?` sets a dtype by hand."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    opened: dict[str, fx.Node] = {}
    calls: dict[str, fx.Node] = {}
    for step in steps:
        kind, name = step[0], step[1:]
        if kind == "+":
            enabled = not name.startswith("off")
            arguments = ("cpu", torch.float16 if enabled else None, enabled, None)
            opened[name] = graph.call_function(enter_autocast, arguments)
        elif kind == "-":
            graph.call_function(exit_autocast, (opened.get(name, x),))
        elif kind == "!":
            graph.call_function(torch.clear_autocast_cache)
        elif kind == "?":
            graph.call_function(torch.set_autocast_dtype, ("cpu", torch.bfloat16))
        else:
            calls[step] = graph.call_function(torch.sin, (x,))
    graph.output(x)
    return graph, calls


def test_regions_nest() -> None:
    graph, calls = graph_of("a", "+r", "b", "+off", "c", "-off", "d", "-r", "e")
    states = {name: find_regions(graph, Placement(OFF, None))[n].state for name, n in calls.items()}
    half = OFF.enter("cpu", torch.float16)
    off = half.enter("cpu", enabled=False)
    assert states == {"a": OFF, "b": half, "c": off, "d": half, "e": OFF}


def test_the_weight_cache_lives_until_the_outermost_exit() -> None:
    graph, calls = graph_of("+r", "a", "+s", "b", "-s", "c", "-r", "d", "+t", "e", "-t")
    scopes = {name: find_regions(graph, Placement(OFF, None))[n].scope for name, n in calls.items()}
    assert scopes["a"] == scopes["b"] == scopes["c"] is not None
    assert scopes["d"] is None
    assert scopes["e"] not in (None, scopes["a"])


def test_under_an_ambient_region_there_is_one_scope() -> None:
    ambient = AutocastState.of(BF16)
    graph, calls = graph_of("a", "+r", "b", "-r", "c")
    places = find_regions(graph, Placement(ambient, AMBIENT))
    assert {places[n].scope for n in calls.values()} == {AMBIENT}
    assert places[calls["a"]].state == ambient


def test_clearing_the_cache_begins_a_new_scope_in_all_open_regions() -> None:
    graph, calls = graph_of("+r", "a", "+s", "b", "!", "c", "-s", "d", "-r", "e")
    places = find_regions(graph, Placement(OFF, None))
    scopes = {name: places[n].scope for name, n in calls.items()}
    assert scopes["a"] == scopes["b"] != scopes["c"] == scopes["d"]
    assert scopes["e"] is None


def test_clearing_the_cache_where_no_region_is_open_begins_no_scope() -> None:
    graph, calls = graph_of("!", "a", "+r", "b", "-r", "c", "+s", "d", "-s")
    places = find_regions(graph, Placement(OFF, None))
    scopes = {name: places[n].scope for name, n in calls.items()}
    assert scopes["a"] is scopes["c"] is None
    assert None is not scopes["b"] != scopes["d"] is not None


def test_other_changes_of_the_state_begin_no_scope() -> None:
    graph, calls = graph_of("+r", "a", "?", "b", "-r")
    places = find_regions(graph, Placement(OFF, None))
    assert places[calls["a"]].scope is places[calls["b"]].scope
    assert places[calls["a"]].state != places[calls["b"]].state


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (["+r", "a"], "never closes"),
        (["a", "-r"], "no open region"),
        (["+r", "+s", "a", "-r", "-s"], "must nest"),
    ],
)
def test_what_does_not_nest_is_refused(steps: list[str], words: str) -> None:
    graph, _ = graph_of(*steps)
    with pytest.raises(RegionError, match=words):
        find_regions(graph, Placement(OFF, None))
