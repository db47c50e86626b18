"""Values a forward computes twice, which the min-cut partitioner merges before it decides what to
save: the backward of another state must find them under the one name that is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.aot.harness import WAYS, Case, assert_like_the_oracle, island


def one_product_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin() + x @ w + island(x, w)


def two_states_of_one_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        full = x.cos() @ w.t()
    return (x.cos() @ w).sin() + full


def a_weight_turned_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(F.linear(F.linear(x, w), w), w.t())


def one_island_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(w, w) + island(x, w)


def two_zeros(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Which stock merges."""
    y = x @ w
    return island(torch.copysign(y, 0.0), w) + torch.copysign(y, -0.0)


CASES = {
    f.__name__: Case(f)
    for f in (
        one_product_twice,
        two_states_of_one_product,
        a_weight_turned_twice,
        one_island_twice,
        two_zeros,
    )
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_values_that_are_merged(name: str, way: str) -> None:
    assert_like_the_oracle(CASES[name], way)
