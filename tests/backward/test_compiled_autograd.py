"""Compiled autograd copies backward graphs instead of calling compiled backwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from autocast_backend import BackwardError
from autocast_backend.state import contexts_entered
from tests.support import BF16, assert_same_bits

CAPTURES_UNDER_AUTOCAST = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="Dynamo fails on compiled autograd under autocast (seen on 2.11)",
)


class Island(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.b(x.float()).relu()


def gradients(
    forward_on: bool, backwards_on: Sequence[bool], captured: bool, **compile_arguments: Any
) -> list[Any]:
    """The gradients of one step for each state of the backward, with or without compiled
    autograd."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Island()
    compiled = torch.compile(model, **compile_arguments)
    compiler = torch.compile(backend="aot_eager")
    found = []
    for backward_on in backwards_on:
        model.zero_grad()
        with torch.autocast(**BF16, enabled=forward_on):
            loss = compiled(torch.ones(4, 8)).float().square().sum()
        with torch.autocast(**BF16, enabled=backward_on):
            if captured:
                with torch._dynamo.compiled_autograd._enable(compiler):
                    loss.backward()
            else:
                loss.backward()
        found += [p.grad for p in model.parameters()]
    return found


OURS: dict[str, Any] = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}


@pytest.mark.parametrize("forward_on", [False, True], ids=["forward_off", "forward_on"])
@pytest.mark.parametrize(
    "backward_on",
    [
        pytest.param(False, id="backward_off"),
        pytest.param(True, id="backward_on", marks=CAPTURES_UNDER_AUTOCAST),
    ],
)
def test_the_copied_backward_is_the_one_of_the_state(forward_on: bool, backward_on: bool) -> None:
    expected = gradients(forward_on, [backward_on], captured=False, backend="eager")
    assert_same_bits(gradients(forward_on, [backward_on], captured=True, **OURS), expected)


def test_stock_is_wrong_there() -> None:
    expected = gradients(True, [False], captured=False, backend="eager")
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(gradients(True, [False], captured=True, backend="aot_eager"), expected)


@CAPTURES_UNDER_AUTOCAST
@pytest.mark.parametrize("forward_on", [False, True], ids=["forward_off", "forward_on"])
def test_each_state_is_captured_once(forward_on: bool) -> None:
    """Compiled autograd keeps what it captures for the next call, without looking at autocast."""
    states = (False, True, True, False)
    counted = torch._dynamo.utils.counters["compiled_autograd"]
    counted.clear()
    actual = gradients(forward_on, states, captured=True, **OURS)
    assert counted["captures"] == 2
    expected = gradients(forward_on, states, captured=False, backend="eager")
    assert_same_bits(actual, expected)
    assert not torch.equal(expected[0], expected[4])


@CAPTURES_UNDER_AUTOCAST
@pytest.mark.parametrize("states", [(False, True), (True, False)])
def test_a_copy_is_not_used_in_another_state(
    states: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a capture be used again in another state nevertheless, it refuses to run."""
    monkeypatch.setattr("autocast_backend._torch.aot._capturing_each_state", nullcontext)
    with pytest.raises(BackwardError, match=r"captured the backward of .*test_compiled_autograd"):
        gradients(True, states, captured=True, **OURS)


@CAPTURES_UNDER_AUTOCAST
@pytest.mark.parametrize(
    "pinned",
    [{}, {"backward_pass_autocast": "off", "on_backward_autocast_mismatch": "do_nothing"}],
    ids=["auto", "off"],
)
def test_hooks_run_under_the_state_that_is_met(pinned: dict[str, Any]) -> None:
    """Those that Dynamo traces, which it does for compiled autograd alone."""

    def run(captured: bool, **arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
        seen: list[torch.Tensor] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            made = gradient @ w
            seen.append(made)
            return made.to(gradient.dtype)

        def function(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            y.register_hook(hook)
            return y @ w

        around = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        with around if captured else nullcontext():
            result = torch.compile(function, **arguments)(x)
            with torch.autocast(**BF16):
                result.square().sum().backward()
        assert x.grad is not None
        return [*seen, x.grad]

    options = {**OURS["options"], **pinned}
    hooked, gradient = run(captured=True, backend="smart_autocast", options=options)
    expected = run(captured=False, backend="eager")
    assert (hooked.dtype, expected[0].dtype) == (torch.bfloat16, torch.bfloat16)
    if not pinned:
        assert_same_bits([hooked, gradient], expected)


@CAPTURES_UNDER_AUTOCAST
@pytest.mark.parametrize("hooked", ["a weight", "a weight that has its gradient", "a result"])
def test_hooks_outside_of_graphs_run_under_the_state_that_is_met(hooked: str) -> None:
    """Compiled autograd moves them to where the gradients are made."""

    def run(captured: bool, **arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w, v = (torch.randn(8, 8) for _ in range(3))
        w.requires_grad_()
        seen: list[torch.Tensor] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(gradient @ x)
            return seen[-1].to(gradient.dtype)

        def hook_on_leaf(weight: torch.Tensor) -> None:
            assert weight.grad is not None
            seen.append(weight.grad @ x)

        if hooked == "a weight":
            w.register_hook(hook)
        elif hooked == "a weight that has its gradient":
            w.register_post_accumulate_grad_hook(hook_on_leaf)
        function = torch.compile(lambda x, y: (x @ y).sin(), **arguments)
        around = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        with around if captured else nullcontext():
            between = function(x, w)
            if hooked == "a result":
                between.register_hook(hook)
            loss = function(between, v).square().sum()
            with torch.autocast(**BF16):
                loss.backward()
        assert w.grad is not None
        return [*seen, w.grad]

    expected = run(captured=False, backend="eager")
    assert expected[0].dtype is torch.bfloat16
    assert_same_bits(run(captured=True, **OURS), expected)


@CAPTURES_UNDER_AUTOCAST
def test_a_hook_that_raises_leaves_autocast_as_it_was() -> None:
    """A context that nobody exits would keep autocast from ever clearing its cache."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the hook")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(hook)
        return y @ x

    before = contexts_entered()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        result = torch.compile(function, **OURS)(torch.randn(8, 8, requires_grad=True))
        with torch.autocast(**BF16), pytest.raises(ValueError, match="of the hook"):
            result.sum().backward()
    assert contexts_entered() == before


@CAPTURES_UNDER_AUTOCAST
def test_dynamo_leaves_the_making_of_a_copy_alone() -> None:
    """Where a compiled function calls `loss.backward()`, Dynamo would compile our functions."""

    def run(**arguments: Any) -> tuple[list[torch.Tensor | None], set[str]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Island()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).float().square().sum()
            loss.backward()
            return loss.detach()

        compiled = torch.compile(step, **arguments)
        breaks = torch._dynamo.utils.counters["graph_break"]
        breaks.clear()
        found = []
        for on in (True, False, True):
            model.zero_grad()
            with torch.autocast(**BF16, enabled=on):
                found += [compiled(torch.ones(4, 8)), *(p.grad for p in model.parameters())]
        return found, set(breaks)

    expected, _ = run(backend="eager")
    with torch._dynamo.config.patch(compiled_autograd=True):
        _, stock_breaks = run(backend="aot_eager")
        actual, breaks = run(**OURS)
    assert_same_bits(actual, expected)
    assert breaks == stock_breaks
