"""Training steps that are compiled whole: Dynamo breaks the graph at `backward()`, and would then
trace every Python function that autograd and the optimizer come to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.support import BF16, assert_same_bits
from tests.weights.support import STOCK, ours


class Island(nn.Module):
    """Its backward is another computation under autocast than outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.first(x)
        return self.second(x)


def steps(inside: bool, **arguments: Any) -> tuple[Any, Counter[str], int]:
    """Three steps, the backward `inside` of autocast or not: losses and weights, graph breaks, and
    how many functions Dynamo traced."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Island()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            loss = model(x).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, **arguments)
    losses = [compiled(torch.ones(2, 4) * i) for i in range(3)]
    return [losses, *model.parameters()], counters["graph_break"], counters["frames"]["total"]


@pytest.mark.parametrize("inside", [False, True])
def test_dynamo_traces_nothing_of_ours(inside: bool) -> None:
    expected, _, _ = steps(inside, backend="eager")
    _, stocks_breaks, stocks_frames = steps(inside, **STOCK)
    actual, breaks, frames = steps(inside, **ours())
    assert_same_bits(actual, expected)
    assert set(breaks) == set(stocks_breaks)
    assert frames <= stocks_frames + 1  # what comes after our hook of the optimizer
