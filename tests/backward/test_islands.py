"""Islands of float32, `torch.autocast(enabled=False)`, in a model that runs under ambient autocast.

Eager decides the precision of each backward op by the state around `backward()`, not by the region
its forward stood in. AOTAutograd's default takes the state around the forward for it, so the island
gets a low-precision backward where forward ran inside autocast and backward outside of it, the
usual way to train (PyTorch #153044, #179804).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.backward.support import BF16, EAGER, OFF, STOCK, Steps, ours, same_bits
from tests.support import assert_same_bits

Body = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


class Island(nn.Module):
    """Linear layers under whatever is on outside, around an island of float32."""

    def __init__(self, modules: list[nn.Module], body: Body) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.inside = nn.ModuleList(modules)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        with torch.autocast("cpu", enabled=False):
            y = self.body(self.inside, y.float())
        return self.after(y)


def first(modules: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return modules[0](x)


def batch_norm(modules: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return modules[0](x.relu())  # without relu, the bias before it has no gradient but noise


def convolution(modules: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return modules[0](x.reshape(2, 4, 4, 4)).reshape(8, 16)


def attention(_: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 2, 4, 16)
    return F.scaled_dot_product_attention(q, q * 2, q + 1).view(8, 16)


def embedding(modules: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return modules[0](torch.arange(8)) + x


def three_products(modules: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    w = modules[0].weight
    return x @ w + x @ w.t() + x @ x.t() @ x


def distances(modules: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, modules[0].weight)


def dropped(modules: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(modules[0](x), 0.3)


ISLANDS: dict[str, tuple[Callable[[], list[nn.Module]], Body]] = {
    "linear": (lambda: [nn.Linear(16, 16)], first),
    "layer_norm": (lambda: [nn.LayerNorm(16)], first),
    "batch_norm": (lambda: [nn.BatchNorm1d(16)], batch_norm),
    "conv2d": (lambda: [nn.Conv2d(4, 4, 3, padding=1)], convolution),
    "attention": (list, attention),
    "relu": (list, lambda _, x: F.relu(x)),
    "gelu": (list, lambda _, x: F.gelu(x)),
    "embedding": (lambda: [nn.Embedding(10, 16)], embedding),
    "scalar": (list, lambda _, x: x * 3.1),
    "three_products": (lambda: [nn.Linear(16, 16, bias=False)], three_products),
    "cdist": (lambda: [nn.Linear(16, 16)], distances),
    "dropout": (lambda: [nn.Linear(16, 16)], dropped),
}
INSIDE, OUTSIDE = BF16, OFF
STATE = {"inside": INSIDE, "outside": OUTSIDE}


def _x() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(7))


def make(name: str) -> nn.Module:
    modules, body = ISLANDS[name]
    return Island(modules(), body)


@functools.cache
def results(name: str, forward: str, compiler: str) -> dict[str, list[Any]]:
    """One compilation, and a step for each state of the backward."""
    arguments = {"eager": EAGER, "stock": STOCK, "ours": ours()}[compiler]
    steps = Steps(functools.partial(make, name), _x, **arguments)
    return {backward: steps.step(STATE[forward], STATE[backward]) for backward in STATE}


@pytest.mark.parametrize("backward", STATE)
@pytest.mark.parametrize("forward", STATE)
@pytest.mark.parametrize("name", ISLANDS)
def test_bits(name: str, forward: str, backward: str) -> None:
    expected, actual = (results(name, forward, who)[backward] for who in ("eager", "ours"))
    assert_same_bits(actual, expected, name)


@pytest.mark.parametrize("name", ["linear", "three_products", "dropout"])
def test_stock_computes_an_islands_backward_in_low_precision(name: str) -> None:
    """The cases `test_bits` is for: if stock passed here, it could not fail."""
    stock, eager, mine = (
        results(name, "inside", who)["outside"] for who in ("stock", "eager", "ours")
    )
    assert_same_bits(stock[0], eager[0], "forward")
    assert not same_bits(stock, eager)
    assert same_bits(mine, eager)


class Archipelago(nn.Module):
    """Islands side by side in one graph: those whose backward Inductor has several kernels for."""

    def __init__(self) -> None:
        super().__init__()
        names = ("batch_norm", "attention", "three_products")
        self.islands = nn.ModuleDict({name: make(name) for name in names})

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [island(x) for island in self.islands.values()]


@functools.cache
def archipelago(inductor: bool) -> dict[str, list[Any]]:
    arguments = ours("inductor") if inductor else EAGER
    steps = Steps(Archipelago, _x, **arguments)
    return {backward: steps.step(STATE["inside"], STATE[backward]) for backward in STATE}


@pytest.mark.slow
@pytest.mark.parametrize("backward", STATE)
def test_close_with_inductor(backward: str) -> None:
    expected, actual = (archipelago(inductor)[backward] for inductor in (False, True))
    # A few roundings (2^-9 each) that eager makes and a fused kernel does not, next to the largest
    # value of each tensor.
    error = 2**-6
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            assert a.dtype == e.dtype
            assert (a.float() - e.float()).abs().max() <= error * e.float().abs().max()
