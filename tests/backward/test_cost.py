"""What following the state costs: nothing where no state can change the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autocast_backend.backward.region import Backward, Region
from tests.backward.support import ours
from tests.support import BF16, assert_same_bits


@pytest.mark.parametrize(
    ("function", "wrapped"),
    [
        (lambda x: (x.relu() * 2).sin(), 0),
        (lambda x: torch.nn.functional.max_pool2d(x[None], 2).exp(), 0),
        (lambda x: x @ x, 1),
    ],
    ids=["pointwise", "pooling", "product"],
)
def test_the_compiled_backward_is_left_alone_where_autocast_cannot_change_it(
    function: Callable[[torch.Tensor], torch.Tensor],
    wrapped: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    take_over = Backward.take_over

    def spy(backward: Backward) -> None:
        calls.append(backward)
        take_over(backward)

    monkeypatch.setattr(Backward, "take_over", spy)
    torch._dynamo.reset()
    x = torch.randn(4, 4, requires_grad=True)
    torch.compile(function, **ours())(x).sum().backward()
    assert len(calls) == wrapped


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + torch.tensor([1.0, 2.0, 3.0, 4.0])


def island(x: torch.Tensor) -> torch.Tensor:
    """A product in float32, whose backward autocast makes one in bfloat16."""
    with torch.autocast("cpu", enabled=False):
        return x @ x


@pytest.mark.parametrize(
    ("function", "dynamic", "traces"),
    [
        (lambda x: (x @ x).relu() @ x, False, 1),
        (lambda x: (x @ x).relu() @ x, True, 2),
        (lambda x: x @ x + torch.tensor([1.0, 2.0, 3.0, 4.0]), False, 2),
        (lambda x: torch.cond(x.sum() < torch.inf, shifted, torch.exp2, (x,)) @ x, False, 2),
        (lambda x: island(x) @ x, False, 2),
    ],
    ids=["products", "symbols", "constants", "constants in a body", "changed"],
)
def test_a_backward_that_autocast_does_not_change_is_traced_once(
    function: Callable[[torch.Tensor], torch.Tensor],
    dynamic: bool,
    traces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under the state that it runs in: that is the graph which was compiled. Where that is not so,
    or cannot be told, once more."""
    keys = []
    trace = Region.trace
    monkeypatch.setattr(Region, "trace", lambda self, key: keys.append(key) or trace(self, key))
    torch._dynamo.reset()
    found = []
    for call in (function, torch.compile(function, dynamic=dynamic, **ours())):
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        with torch.autocast(**BF16):
            call(x).float().sum().backward()
        found.append([x.grad])
    assert_same_bits(*found)
    assert len(keys) == traces
