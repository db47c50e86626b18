"""Random models of all kinds of blocks, trained in random ways, have eager mode's bits: outputs,
gradients, parameters and buffers.

    make test ARGS="tests/models --programs 1000"

tries more of them, and others each time. A plan that fails is made smaller before it is shown. Of
many hundreds some fail for a reason that the end of DESIGN.md names.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autocast_backend
from tests.support import DEVICE, autocast_put_right

from .plans import Plan, random_plan, shrunk
from .surroundings import OnDevice
from .trainings import Computed, Training, difference

IN_CI = 6


@pytest.fixture(autouse=True)
def small_buckets(one_process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DDP bucket for each block or two: Dynamo cuts graphs where buckets end."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 300)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Dynamo and DDP warn of much that random models do."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def played(plan: Plan, compile: Callable[[Any], Any], *, oracle: bool) -> Computed | Exception:
    """What a training computes, or raises."""
    torch._dynamo.reset()
    autocast_backend.clear_weight_cache()
    twice = any("twice" in step for step in plan.steps)
    with (
        autocast_put_right(),
        torch._dynamo.config.patch(
            recompile_limit=64,
            capture_scalar_outputs=plan.captures,
            capture_dynamic_output_shape_ops=plan.captures,
            compiled_autograd=plan.compiled_autograd,
        ),
        torch._functorch.config.patch(
            donated_buffer=not twice, activation_memory_budget=plan.memory_budget
        ),
    ):
        try:
            return Training(plan, compile, oracle=oracle).play()
        except Exception as error:
            return error


def problem_with(plan: Plan) -> str | None:
    """How ours differs from eager mode, and from its own graphs under real autocast, which Dynamo
    sometimes traces in another way; None also where eager mode raises, or stock does as well."""
    eager = played(plan, lambda code: code, oracle=True)
    if isinstance(eager, Exception):
        return None
    ours = played(plan, lambda code: torch.compile(code, **plan.arguments()), oracle=False)
    found = _difference(ours, eager)
    if found is None:
        return None

    def explained_by(backend: str) -> bool:
        others = played(
            plan,
            lambda code: torch.compile(code, backend=backend, dynamic=plan.dynamic),
            oracle=True,
        )
        return isinstance(others, Exception) or not _difference(ours, others)

    if DEVICE != "cpu":
        again = played(plan, lambda code: code, oracle=True)
        if isinstance(again, Exception) or difference(again, eager):
            return None  # its bits change from run to run
        if explained_by("aot_eager"):
            return None  # AOTAutograd decomposes more ops that have other bits then
    return None if explained_by("aot_eager" if isinstance(ours, Exception) else "eager") else found


def _difference(ours: Computed | Exception, expected: Computed) -> str | None:
    if isinstance(ours, Exception):
        return f"{type(ours).__name__}: {ours}"
    return difference(ours, expected)


@pytest.mark.slow
def test_random_models(request: pytest.FixtureRequest) -> None:
    programs = request.config.getoption("--programs")
    first = random.randrange(10**9) if programs else 0
    for seed in range(first, first + (programs or IN_CI)):
        plan = random_plan(seed)
        problem = problem_with(plan)
        if problem:
            small = shrunk(plan, lambda smaller: problem_with(smaller) is not None)
            pytest.fail(f"seed {seed}: {problem}\n{plan}\n\n{small}: {problem_with(small)}")


def test_a_difference_is_found_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock casts a weight at each of its uses, and their gradients add up in float32."""
    monkeypatch.setattr(Plan, "arguments", lambda _: {"backend": "aot_eager"})
    steps = (("train", [(2, 3)], "outside", False), ("evaluate", [(2, 3)], "no_grad"))
    plan = Plan((("tied", ()), ("softmax", (OnDevice,))), steps, optimizer="AdamW")
    problem = problem_with(plan)
    assert problem is not None
    assert "blocks.0.inner.table.grad: differs by" in problem
    small = shrunk(plan, lambda smaller: problem_with(smaller) is not None)
    assert small == Plan((("tied", ()),), steps[:1])
