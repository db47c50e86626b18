"""Tests with tensors on the CPU and on a second device type; test_device_types.py runs them, in a
process of their own, because a device type cannot be taken back."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autocast_backend import BackwardAutocastError, BackwardAutocastWarning
from autocast_backend.backward.region import Region
from tests.backward import twin_device
from tests.backward.support import EAGER, STOCK, forget_variants, ours, same_bits, variants
from tests.support import BF16, assert_same_bits

SECOND = os.environ["SECOND_DEVICE_TYPE"]
if SECOND == twin_device.NAME:
    twin_device.make_device_type()

State = tuple[bool, bool]
STATES: list[State] = list(itertools.product([False, True], repeat=2))
"""Whether autocast is on: on the CPU, on the second device type."""
OFF, _, _, BOTH = STATES
ON_SECOND = {"device_type": SECOND, "dtype": torch.float16}


@contextlib.contextmanager
def autocast(state: State) -> Iterator[None]:
    """bfloat16 on the CPU and float16 on the second device type, or off."""
    on_cpu, on_second = state
    with torch.autocast(**BF16, enabled=on_cpu), torch.autocast(**ON_SECOND, enabled=on_second):
        yield


class OnBoth(nn.Module):
    """A product on each device type, in the state in force."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8).to(SECOND))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x).float().to(SECOND) @ self.second).float()


class Islands(OnBoth):
    """The same in float32: every two states give another backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(OFF):
            return super().forward(x)


class Checkpointed(nn.Linear):
    """Only the body of the checkpoint has tensors on the second device type."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        w = torch.full((8, 8), 1.37).to(SECOND).sin()
        with autocast(OFF):
            return ((super().forward(x) * 2.1).to(SECOND) @ w).cpu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def _x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7))


def step(model: nn.Module, run: Any, forward: State, backward: State) -> list[torch.Tensor]:
    """The output and the gradients of one step."""
    model.zero_grad()
    with autocast(forward):
        y = run(_x())
    with autocast(backward):
        y.square().sum().backward()
    return [t.detach().cpu() for t in (y, *(p.grad for p in model.parameters()))]


def steps(
    make: Callable[[], nn.Module], forward: State, **arguments: Any
) -> Iterator[list[torch.Tensor]]:
    """One compilation, and a step for each state of the backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    run = torch.compile(model, fullgraph=True, **arguments)
    return (step(model, run, forward, backward) for backward in STATES)


def test_the_second_device_type_has_an_autocast_of_its_own() -> None:
    x, w = _x(), torch.randn(8, 8)
    for on_cpu, on_second in STATES:
        with autocast((on_cpu, on_second)):
            there, here = x.to(SECOND) @ w.to(SECOND), x @ w
        assert there.device.type == SECOND
        assert there.dtype == (torch.float16 if on_second else torch.float32)
        assert here.dtype == (torch.bfloat16 if on_cpu else torch.float32)


@pytest.mark.parametrize(
    ("make", "forward"),
    [(OnBoth, (True, False)), (OnBoth, (False, True)), (Islands, BOTH), (Checkpointed, OFF)],
)
def test_each_device_type_follows_its_own_state(make: Any, forward: State) -> None:
    expected = list(steps(make, forward, **EAGER))
    forget_variants()
    assert_same_bits(list(steps(make, forward, **ours())), expected)
    assert variants() == sum(not same_bits(one, expected[0]) for one in expected)
    if make is not OnBoth:
        assert variants() == 3
        assert not any(same_bits(a, b) for a, b in itertools.combinations(expected, 2))


def test_stock_computes_the_backward_of_one_state() -> None:
    pairs = zip(steps(Islands, BOTH, **STOCK), steps(Islands, BOTH, **EAGER), strict=True)
    assert [same_bits(*pair) for pair in pairs] == [False, False, False, True]


class OnOne(nn.Module):
    """A product in float32 on one device type."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).to(device_type))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(OFF):
            return x @ self.weight


@pytest.mark.parametrize(
    ("device_type", "setting"), [("cpu", "auto"), (SECOND, "auto"), (SECOND, "off")]
)
def test_the_state_of_a_device_type_without_tensors_does_not_matter(
    device_type: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is traced for it, nothing compiled, nothing said."""
    traced = []
    trace = Region.trace

    def spy(region: Region, key: Any) -> Any:
        traced.append(key)
        return trace(region, key)

    monkeypatch.setattr(Region, "trace", spy)
    options = {"backward_pass_autocast": setting, "on_backward_autocast_mismatch": "error"}

    def backward(state: State, **arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = OnOne(device_type)
        loss = torch.compile(model, **arguments)(_x().to(device_type)).sum()
        with autocast(state):
            loss.backward()
        return model.weight.grad.cpu()

    without = (False, True) if device_type == "cpu" else (True, False)
    assert_same_bits(backward(without, **ours(**options)), backward(OFF, **EAGER))
    assert traced == []
    if setting == "auto":
        assert_same_bits(backward(BOTH, **ours()), backward(BOTH, **EAGER))
        assert len(traced) == 2
    else:
        with pytest.raises(BackwardAutocastError, match=rf"under autocast {device_type}: \w+, but"):
            backward(BOTH, **ours(**options))


def test_a_state_of_two_device_types_can_be_pinned() -> None:
    """Its backward comes out whatever is on, and every other state is told of."""
    *_, expected = steps(Islands, OFF, **EAGER)
    actual = steps(Islands, OFF, **ours(backward_pass_autocast=[BF16, ON_SECOND]))
    cpu, second = "cpu: bfloat16", f"{SECOND}: float16"
    told = dict(zip(STATES, ("off", second, cpu, f"{cpu}, {second}"), strict=True))
    for state in STATES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_same_bits(next(actual), expected)
        said = [str(w.message) for w in caught if w.category is BackwardAutocastWarning]
        assert len(said) == (state != BOTH)
        for message in said:
            assert f"runs under autocast {told[state]}, but" in message
            assert f"assumes {told[BOTH]}; in eager mode" in message
