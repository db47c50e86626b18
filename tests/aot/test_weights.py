"""Weights with more than one use: tied, reused, recurrent, in packed sequences; with and without
autocast's cache of their casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.aot.harness import (
    AOT_EAGER,
    BACKWARDS,
    ORACLE,
    backward_inside,
    differences,
    each_way,
    inside_region,
    island,
    loss_of,
    same_bits,
)
from tests.support import BF16, assert_same_bits


class TiedWeights(nn.Module):
    """The embedding is the head, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.embedding(x.argmax(-1)))
        return self.head(y) + island(x, self.middle.bias.diag())


class ReusedWeight(nn.Module):
    """One layer three times: in the state in force and, once, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.layer(x).sin())
        with torch.autocast("cpu", enabled=False):
            return self.layer(y.float())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.start = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.start
        for row in x:
            state = torch.tanh(self.layer(row) + self.layer(state))
        return island(state[None], self.layer.weight)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        lengths = torch.tensor([2, 1])
        packed = pack_padded_sequence(x.view(2, 2, 8), lengths, batch_first=True)
        out, (hidden, _) = self.lstm(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return island(padded.flatten(0, 1), self.head.weight), hidden


MODELS = (TiedWeights, ReusedWeight, Recurrent, Sequences)


def steps(
    make: Callable[[], nn.Module], way: str, *, cache: bool = True, **arguments: Any
) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(inside_region(model) if way == "region" else model, **arguments)
    found = []
    for inside in BACKWARDS:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(7)).requires_grad_()
        model.zero_grad()
        with torch.autocast(**BF16, enabled=way == "ambient", cache_enabled=cache):
            outputs = compiled(x)
        backward_inside(loss_of(outputs), inside)
        gradients = [x.grad, *(p.grad for p in model.parameters())]
        found.append({"outputs": outputs, "gradients": gradients})
    return found


@pytest.mark.parametrize(("make", "way"), each_way(MODELS))
def test_weights_with_several_uses(make: Callable[[], nn.Module], way: str) -> None:
    expected = steps(make, way, **ORACLE)
    assert not same_bits(expected[0]["gradients"], expected[1]["gradients"])
    assert not list(differences(steps(make, way, **AOT_EAGER), expected))


@pytest.mark.parametrize("make", [ReusedWeight, Recurrent])
def test_without_the_cache_of_casts(make: Callable[[], nn.Module]) -> None:
    """Each use then has its own cast, and gradients add up in float32."""
    expected = steps(make, "ambient", cache=False, **ORACLE)
    cached = steps(make, "ambient", **ORACLE)
    assert not same_bits(expected[0]["gradients"], cached[0]["gradients"])
    assert not list(differences(steps(make, "ambient", cache=False, **AOT_EAGER), expected))


def test_a_function_compiled_with_the_cache_is_not_used_without_it() -> None:
    """Whether autocast caches is part of the state a graph was compiled for."""

    def gradients(cache: bool, **arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ReusedWeight()
        compiled = torch.compile(model, **arguments)
        found = []
        for cached in (cache, not cache):
            model.zero_grad()
            with torch.autocast(**BF16, cache_enabled=cached):
                loss = loss_of(compiled(torch.ones(4, 8)))
            loss.backward()
            found.append([p.grad for p in model.parameters()])
        return found

    for cache in (True, False):
        expected = gradients(cache, **ORACLE)
        assert not same_bits(*expected)
        assert_same_bits(gradients(cache, **AOT_EAGER), expected)
