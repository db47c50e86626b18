"""Hooks that squeeze what a forward saves into eight bits, around a compiled region.

Ordinary hooks run on what the compiled forward saves. With AOTAutograd's default partitioner that
is what eager saves, so their rounding errors agree bit for bit; the min-cut partitioner saves other
tensors, so there ours are compared with stock's. Hooks that are graphs are inlined into forward and
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch import config
from torch.autograd.graph import saved_tensors_hooks

from autocast_backend import BackwardError
from tests.aot.harness import (
    AOT_EAGER,
    BACKWARDS,
    ORACLE,
    STOCK,
    WAYS,
    Case,
    assert_like_the_oracle,
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
    "copies": (lambda t: [t.clone()], lambda packed: packed[0]),
}


def ordinary(name: str) -> AbstractContextManager[Any]:
    return saved_tensors_hooks(*HOOKS[name])


def inlined(name: str) -> AbstractContextManager[Any]:
    return saved_tensors_hooks(*map(fx.symbolic_trace, HOOKS[name]))


def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island((x @ w).sin(), w)


def under(hooks: Callable[[str], AbstractContextManager[Any]], name: str) -> Case:
    return Case(network, around=lambda: hooks(name))


@pytest.mark.parametrize(("name", "way"), each_way(HOOKS))
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


@pytest.mark.parametrize(
    ("name", "mode", "way"),
    [("fp8", "donated", "off"), ("fp8_scaled", "no_static", "ambient"), ("fp8", "all", "region")],
)
def test_inlined_hooks_do_not_follow_the_backwards_state(name: str, way: str, mode: str) -> None:
    """The forward has packed what the backward of another state would read otherwise, so that
    backward is refused."""
    assert BACKWARDS[1]
    with config.patch(saved_tensors_hooks_filtering_mode=mode), pytest.raises(BackwardError) as e:
        results(under(inlined, name), way, **AOT_EAGER)
    assert "hooks are inlined" in str(e.value)
