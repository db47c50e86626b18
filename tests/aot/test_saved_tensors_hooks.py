"""Hooks that squeeze what a forward saves into eight bits, around a compiled region.

Ordinary hooks run on what the compiled forward saves. With AOTAutograd's default partitioner that
is what eager saves, so their rounding errors agree bit for bit; the min-cut partitioner saves other
tensors, so there ours are compared with stock's. Hooks that are graphs are inlined into forward and
backward.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd.aot_autograd_result import serialize_graph_module
from torch.autograd.graph import saved_tensors_hooks

from autocast_backend import BackwardError
from autocast_backend.backward.joint import extract_backward
from tests.aot.harness import (
    AOT_EAGER,
    ORACLE,
    STOCK,
    WAYS,
    Case,
    assert_like_the_oracle,
    differences,
    each_way,
    island,
    results,
    same_bits,
)
from tests.support import assert_same_bits

Hook = Callable[[Any], Any]
DEFAULT_PARTITIONER = {
    "backend": "smart_autocast",
    "options": {"inner": "aot_eager_default_partitioner"},
}


def pack(t: torch.Tensor) -> Any:
    return t.dtype, t.to(torch.float8_e5m2)


def unpack(packed: Any) -> torch.Tensor:
    return packed[1].to(packed[0])


def pack_scaled(t: torch.Tensor) -> Any:
    scale = t.abs().amax().float() / 448
    return t.dtype, (t / scale).to(torch.float8_e4m3fn), scale


def unpack_scaled(packed: Any) -> torch.Tensor:
    return (packed[1].float() * packed[2]).to(packed[0])


HOOKS: dict[str, tuple[Hook, Hook]] = {
    "fp8": (pack, unpack),
    "fp8_scaled": (pack_scaled, unpack_scaled),
    "negated": (lambda t: [-t], lambda packed: -packed[0]),
    "copies": (lambda t: [t.clone()], lambda packed: packed[0]),
}


def ordinary(name: str) -> AbstractContextManager[Any]:
    return saved_tensors_hooks(*HOOKS[name])


@functools.cache
def traced(hook: Hook) -> fx.GraphModule:
    """One graph for each hook: Dynamo compiles again for another one."""
    return fx.symbolic_trace(hook)


def inlined(name: str) -> AbstractContextManager[Any]:
    return saved_tensors_hooks(*map(traced, HOOKS[name]))


def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island((x @ w).sin(), w)


def under(hooks: Callable[[str], AbstractContextManager[Any]], name: str) -> Case:
    return Case(network, around=lambda: hooks(name))


@pytest.mark.parametrize(("name", "way"), each_way(["fp8", "fp8_scaled", "copies"]))
def test_ordinary_hooks(name: str, way: str) -> None:
    assert_like_the_oracle(under(ordinary, name), way, **DEFAULT_PARTITIONER)


@pytest.mark.parametrize("way", WAYS)
def test_ordinary_hooks_without_loss_and_the_min_cut_partitioner(way: str) -> None:
    assert_like_the_oracle(under(ordinary, "copies"), way)


@pytest.mark.parametrize("hooks", [ordinary, inlined])
@pytest.mark.parametrize("way", ["off", "region"])
@pytest.mark.parametrize("name", ["fp8", "fp8_scaled"])
def test_eight_bits_of_what_the_min_cut_partitioner_saves(
    name: str, way: str, hooks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward outside of autocast: ours are stock's, and the hooks do act."""
    monkeypatch.setattr("tests.aot.harness.BACKWARDS", (False, False))
    case = under(hooks, name)
    ours, stock = (results(case, way, **arguments) for arguments in (AOT_EAGER, STOCK))
    assert_same_bits([o["gradients"] for o in ours], [s["gradients"] for s in stock])
    exact = results(replace(case, around=Case.around), way, **ORACLE)
    assert not same_bits(ours[0]["gradients"], exact[0]["gradients"])


@pytest.mark.parametrize(("name", "way"), each_way(HOOKS))
def test_inlined_hooks_in_every_state(name: str, way: str) -> None:
    """Where AOTAutograd is told to squeeze all that is saved, it squeezes what eager does."""
    with config.patch(saved_tensors_hooks_filtering_mode="all"):
        ours = results(under(inlined, name), way, **DEFAULT_PARTITIONER)
    expected = results(under(ordinary, name), way, **ORACLE)
    assert not same_bits(expected[0]["gradients"], expected[1]["gradients"])
    found = list(differences(ours, expected))
    assert not found, found


def test_a_hook_that_autocast_acts_inside_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inlined hooks are traced with autocast off; eager unpacks in the state of the backward."""
    hooks = (lambda t: [t.clone()]), (lambda packed: packed[0] @ packed[0].sin())
    monkeypatch.setitem(HOOKS, "product", hooks)
    with (
        config.patch(saved_tensors_hooks_filtering_mode="all"),
        pytest.raises(BackwardError, match=r"of the hook that unpacks .* autocast gives"),
    ):
        results(under(inlined, "product"), "off", **DEFAULT_PARTITIONER)


@pytest.mark.parametrize(
    ("mode", "way"), [("donated", "ambient"), ("no_static", "region"), ("all", "off")]
)
def test_inlined_hooks_without_loss_and_the_min_cut_partitioner(mode: str, way: str) -> None:
    """A variant unpacks whatever the partitioner has saved: a forgotten minus sign would show."""
    with config.patch(saved_tensors_hooks_filtering_mode=mode):
        ours = results(under(inlined, "negated"), way, **AOT_EAGER)
    found = list(differences(ours, results(Case(network), way, **ORACLE)))
    assert not found, found


def test_inlined_hooks_and_a_backward_out_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """How to unpack is written to AOTAutograd's cache together with the backward, and read again.
    (Of these hooks: it takes no calls of methods.)"""

    def from_cache(joint: Any, partitioned: Any, reference: Any) -> Any:
        written = pickle.dumps(serialize_graph_module(partitioned))
        return extract_backward(joint, pickle.loads(written).deserialize(), reference)

    monkeypatch.setattr("autocast_backend.backward.region.extract_backward", from_cache)
    ours = results(under(inlined, "negated"), "off", **AOT_EAGER)
    found = list(differences(ours, results(Case(network), "off", **ORACLE)))
    assert not found, found
