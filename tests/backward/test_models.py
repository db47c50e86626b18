"""The small models of tests/test_equality.py, with a backward in every state: checkpoints, custom
functions, views, weights used twice, graph breaks, losses, attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.backward.support import EAGER, OFF, STATES, ours
from tests.support import BF16, assert_same_bits, tensors
from tests.test_equality import MODULES, Ambient

Maker = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]
MODELS: dict[str, Maker] = {**MODULES, "Ambient": (Ambient, MODULES["Nested"][1])}
FORWARD: dict[str, dict[str, Any]] = dict.fromkeys(MODULES, OFF) | {"Ambient": BF16}

pytestmark = pytest.mark.slow


@functools.cache
def gradients(name: str, compiler: str) -> dict[str, list[Any]]:
    """One compilation, and a forward and a backward for each state of the backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, make_input = MODELS[name]
    model = make()
    compiled = torch.compile(model, **(EAGER if compiler == "eager" else ours()))
    found = {}
    for state in STATES:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast(**FORWARD[name]):
            outputs = [t for t in tensors(compiled(make_input())) if t.requires_grad]
        loss = torch.stack([t.float().square().mean() for t in outputs]).sum()
        with torch.autocast(**STATES[state]):
            loss.backward()
        found[state] = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, state: str) -> None:
    assert_same_bits(gradients(name, "ours")[state], gradients(name, "eager")[state], name)
