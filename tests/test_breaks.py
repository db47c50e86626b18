"""What Dynamo leaves to Python, where options that change results do not apply: a warning."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import BF16

WEIGHT = torch.ones(2, 2)
TIMES: list[float] = []
LEAF = torch.ones(2, requires_grad=True)
OPTIMIZER = torch.optim.SGD([LEAF], lr=0.1)
SCALER = torch.amp.GradScaler("cpu")
POLICIES = {"op": {"aten::linear": "fp32"}}


@torch.compiler.disable
def hidden(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, WEIGHT)


def called_in_the_midst(x: torch.Tensor) -> torch.Tensor:
    return hidden(x.sin()).cos()


def called_first(x: torch.Tensor) -> torch.Tensor:
    return hidden(x)


def inner(x: torch.Tensor) -> torch.Tensor:
    return hidden(x)


def called_further_inside(x: torch.Tensor) -> torch.Tensor:
    return inner(x.sin())


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = nn.functional.linear(x, WEIGHT)
        torch._dynamo.graph_break()
    return x


def of_another_package(x: torch.Tensor) -> torch.Tensor:
    from markupsafe._speedups import _escape_inner  # in C; torch needs the package

    _escape_inner("")
    return x.sin()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lstm(x.sin())[0]
        return y


def printed(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    print("between", end="")
    return x.cos()


def read(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.sum().item()


def asked(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum() > 0 else x


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def logged(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    logging.getLogger("of this test").info("between")
    return x.cos()


def timed(x: torch.Tensor) -> torch.Tensor:
    start = time.time()
    x = x.sin()
    TIMES.append(time.time() - start)
    return x.cos()


def drawn(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x.sin() * random.random()


def stepped(x: torch.Tensor) -> torch.Tensor:
    loss = SCALER.scale((LEAF * x).sum())
    loss.backward()
    SCALER.step(OPTIMIZER)
    SCALER.update()
    OPTIMIZER.zero_grad()
    return loss


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    def warnings(fn: Callable[..., Any], **arguments: Any) -> list[str]:
        torch._dynamo.reset()
        caplog.clear()
        options = {"inner": "aot_eager", **arguments}
        torch.compile(fn, backend="smart_autocast", options=options)(torch.ones(2, 2))
        told = [r for r in caplog.records if r.name == "autocast_backend"]
        return [record.getMessage() for record in told if record.levelno >= logging.WARNING]

    return warnings


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (called_in_the_midst, "leaves what this line calls to Python"),
        (called_first, "leaves what this line calls to Python"),
        (called_further_inside, "leaves what this line calls to Python"),
        (of_another_package, "leaves what this line calls to Python"),
        (in_a_loop, "leaves the function around this line to Python"),
        (Recurrent(), "to Python"),
    ],
    ids=["in_the_midst", "first", "further_inside", "of_another_package", "loop", "lstm"],
)
def test_each_place_is_named(
    fn: Callable[..., Any], words: str, warnings: Callable[..., list[str]]
) -> None:
    for given in ({"autocast": BF16}, {"policies": POLICIES}):
        told = warnings(fn, **given)
        assert told
        for message in told:
            assert re.match(rf"test_breaks\.py:\d+: Dynamo .*{words}", message)
            assert re.search(re.escape(f"the options {list(given)} do not apply: "), message)
    assert not warnings(fn)


@pytest.mark.parametrize("fn", [printed, read, asked, broken, logged, timed, drawn, stepped])
def test_no_word_of_breaks_that_compute_nothing(
    fn: Callable[..., Any], warnings: Callable[..., list[str]]
) -> None:
    assert not warnings(fn, autocast=BF16)


def test_no_word_of_an_optimizer_with_a_hook(warnings: Callable[..., list[str]]) -> None:
    """As all have one, once a weight was cast: Dynamo leaves torch's function that calls it."""
    hook = OPTIMIZER.register_step_post_hook(torch.compiler.disable(lambda *_: None))
    try:
        assert not warnings(stepped, autocast=BF16)
    finally:
        hook.remove()


def test_other_backends_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    enabled = []

    def backend(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        enabled.append(log.isEnabledFor(logging.DEBUG))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(called_in_the_midst, backend=backend)(torch.ones(2, 2))
    assert enabled == [False, False]
    assert not [r for r in caplog.records if r.name == "autocast_backend"]
