"""Dropout inside a checkpoint: its mask is drawn again in the backward, from the state of the
generator that the forward has saved - in a variant, too.

Compared with plain eager mode: the Dynamo graph, run by torch.compile(backend="eager"), draws
another mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autocast_backend import BackwardError
from tests.backward.support import STATES, forget_variants, ours, variants
from tests.support import assert_same_bits


class Checkpointed(nn.Module):
    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.twice = twice

    def block(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = F.dropout(self.a(x.float()).relu(), 0.4)
            if self.twice:
                x = x.sin() * F.dropout(x, 0.3) + F.dropout(x, 0.3)
            return self.ends_in(self.b(x).sin())

    @staticmethod
    def ends_in(x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(checkpoint(self.block, x, use_reentrant=False))


def step(forward: str, backward: str, *, compiled: bool, twice: bool = False) -> list[Any]:
    """The output and the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Checkpointed(twice=twice)
    x = torch.randn(8, 16, requires_grad=True)
    function = torch.compile(model, **ours()) if compiled else model
    torch.manual_seed(1)
    with torch.autocast(**STATES[forward]):
        out = function(x)
    with torch.autocast(**STATES[backward]):
        out.float().square().sum().backward()
    return [out, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("forward", STATES)
@pytest.mark.parametrize("backward", STATES)
def test_the_mask_is_that_of_the_forward(forward: str, backward: str) -> None:
    forget_variants()
    actual = step(forward, backward, compiled=True)
    assert_same_bits(actual, step(forward, backward, compiled=False))
    assert variants() == (backward != "off")


@pytest.mark.parametrize("backward", STATES)
def test_the_same_draw_twice(backward: str) -> None:
    """The same dropout of the same values twice: the saved states tell which is which, by the order
    of their names."""
    for forward in ("off", "bf16"):
        actual = step(forward, backward, compiled=True, twice=True)
        assert_same_bits(actual, step(forward, backward, compiled=False, twice=True))


def test_the_same_draw_twice_beside_one_outside_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not drawn again, and so has no state: what the backward reads of it is saved."""
    inside = Checkpointed.forward
    monkeypatch.setattr(Checkpointed, "forward", lambda self, x: inside(self, F.dropout(x, 0.3)))
    for backward in ("off", "bf16"):
        actual = step("bf16", backward, compiled=True, twice=True)
        assert_same_bits(actual, step("bf16", backward, compiled=False, twice=True))


def test_the_same_draw_twice_where_a_state_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third draw that the backward does not read: whose the saved states are is not known."""
    monkeypatch.setattr(Checkpointed, "ends_in", staticmethod(lambda x: x + torch.rand_like(x)))
    assert_same_bits(
        step("bf16", "off", compiled=True, twice=True),
        step("bf16", "off", compiled=False, twice=True),
    )
    with pytest.raises(BackwardError, match="did not save native_dropout"):
        step("bf16", "bf16", compiled=True, twice=True)
