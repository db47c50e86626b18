"""What a training step holds at its peak."""

from __future__ import annotations

import weakref

import pytest
import torch

from autocast_backend.weights.cache import all_casts
from benchmarks.memory import Tower, measure

from .support import Plain, bf16, data, make, ours


def peaks(calls: int) -> dict[str, float]:
    """Bytes a parameter at the peak of a step, by candidate."""
    torch.manual_seed(0)
    model = Tower(4, 256)
    parameters = sum(p.numel() for p in model.parameters())
    found = measure(model, torch.randn(4, 256), calls, inner="aot_eager")
    return {name: peak / parameters for name, (peak, _) in found.items()}


@pytest.mark.slow
def test_one_call_holds_no_more_than_eager() -> None:
    peak = peaks(1)
    assert 4 < peak["eager"] < 5.5  # gradients, and the last layer's cast
    assert peak["ours, scope"] <= 1.05 * peak["eager"]


@pytest.mark.slow
def test_calls_that_share_casts_hold_them_once() -> None:
    """Stock saves the casts of each call for the backward."""
    peak = peaks(4)
    assert peak["stock"] > 10
    assert peak["ours, scope"] < 6.5  # the casts, their gradients of one call and the sum of all
    assert peak["ours, version"] < peak["ours, scope"]  # its casts were there before


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_no_graph_keeps_a_cast_that_was_made_again(lifetime: str) -> None:
    """Not one that has read it either, and is not called any more."""
    model, x = make(Plain), data(3, 8)
    training, evaluating = (torch.compile(f, **ours(weight_cache=lifetime)) for f in (model, model))
    with bf16():
        pending = training(x)  # its backward reads a cast: that one cannot be written over
        with torch.no_grad():
            for _ in range(2):
                evaluating(x)
        old = [weakref.ref(cast.memory.cast) for _, cast in all_casts()]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        again = training(x)
        del pending
        held = [id(cast.memory.cast) for _, cast in all_casts()]
        assert [tensor() is None or id(tensor()) in held for tensor in old] == [True] * 4
        assert None in [tensor() for tensor in old]
    del again
