"""What a training step holds at its peak."""

from __future__ import annotations

import torch

from benchmarks.memory import Tower, measure


def peaks(calls: int) -> dict[str, float]:
    """Bytes a parameter at the peak of a step, by candidate."""
    torch.manual_seed(0)
    model = Tower(4, 256)
    parameters = sum(p.numel() for p in model.parameters())
    found = measure(model, torch.randn(4, 256), calls, inner="aot_eager")
    return {name: peak / parameters for name, (peak, _) in found.items()}


def test_one_call_holds_no_more_than_eager() -> None:
    peak = peaks(1)
    assert 4 < peak["eager"] < 5.5  # gradients, and the last layer's cast
    assert peak["ours, scope"] <= 1.05 * peak["eager"]


def test_calls_that_share_casts_hold_them_once() -> None:
    """Stock saves the casts of each call for the backward."""
    peak = peaks(4)
    assert peak["stock"] > 10
    assert peak["ours, scope"] < 6.5  # the casts, their gradients of one call and the sum of all
    assert peak["ours, version"] < peak["ours, scope"]  # its casts were there before
