"""Graphs that switch autograd on and off: what it records is not what the mode around says."""

from __future__ import annotations

import pytest
import torch

from tests.aot.harness import Case, assert_like_the_oracle, each_way


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its backward multiplies products by numbers, where a forgotten cast back to float32 shows."""
    with torch.autocast("cpu", enabled=False):
        island = (x.float() * 2.1) @ (w.float() * 1.3)
    return island + x @ w


def recorded_all_the_same(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return scaled(x, w)


def recorded_in_part(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = scaled(x, w)
    with torch.enable_grad():
        return y, y * scaled(x, w)


def casts_a_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Under ambient autocast the cast of `w` is made outside of the graph."""
    with torch.enable_grad():
        y = x.sin() @ w
        with torch.autocast("cpu", enabled=False):
            return y.float() @ y.float().t()


def not_recorded_in_part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = scaled(x, w)
        with torch.enable_grad():
            z = scaled(x.cos(), w)
    return y * z


CASES = {
    "recorded_all_the_same": Case(recorded_all_the_same, around=torch.no_grad),
    "recorded_in_part": Case(recorded_in_part, around=torch.no_grad),
    "casts_a_weight": Case(casts_a_weight, around=torch.no_grad),
    "not_recorded_in_part": Case(not_recorded_in_part),
}


@pytest.mark.parametrize(("name", "way"), each_way(CASES))
def test_grad_modes(name: str, way: str) -> None:
    assert_like_the_oracle(CASES[name], way)
