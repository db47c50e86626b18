"""What the tests of the weight plan share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autocast_backend import weight_cache_info
from tests.support import BF16

EAGER = {"backend": "eager"}
STOCK = {"backend": "aot_eager"}


def ours(**options: Any) -> dict[str, Any]:
    """The arguments of `torch.compile` for this package, with a fast inner compiler."""
    return {"backend": "smart_autocast", "options": {"inner": "aot_eager", **options}}


def bf16(**arguments: Any) -> AbstractContextManager[Any]:
    return torch.autocast(**BF16, **arguments)


class Net(nn.Module):
    """Two layers, the first used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) + self.first(x))


class Plain(nn.Module):
    """Two layers, each used once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def make(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    """A module with the same numbers every time."""
    torch.manual_seed(0)
    return kind()


def data(*sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*sizes, generator=generator)


def casts_made(call: Callable[[], Any]) -> int:
    """How many casts of weights a call makes outside of graphs."""
    before = weight_cache_info().casts
    call()
    return weight_cache_info().casts - before
