"""A variant that was compiled for an assumption about a dynamic size is not used without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autocast_backend.guards import ShapeGuards


def dynamic_graph() -> tuple[fx.GraphModule, torch.Tensor]:
    """A graph of one input, whose first size is dynamic, and that input."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    real = torch.empty(6, 3)
    torch._dynamo.mark_dynamic(real, 0)
    fake = mode.from_tensor(real)
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = fake
    graph.output(node)
    return fx.GraphModule(torch.nn.Module(), graph), fake


def run(args: list[Any]) -> Any:
    return args[0].shape[0]


def test_without_a_new_assumption_the_code_is_left_alone() -> None:
    module, x = dynamic_graph()
    assert x.shape[0] > 3  # known before
    assert ShapeGuards([x]).around(run, module, "it") is run


@pytest.mark.parametrize("specialise", [False, True], ids=["range", "one_value"])
def test_an_assumption_made_meanwhile_is_checked_at_every_call(specialise: bool) -> None:
    module, x = dynamic_graph()
    guards = ShapeGuards([x])
    assert x.shape[0] == 6 if specialise else x.shape[0] > 4
    checked = guards.around(run, module, "the backward of model.py")
    assert checked([torch.empty(6, 3)]) == 6
    if not specialise:
        assert checked([torch.empty(5, 3)]) == 5
    with pytest.raises(RuntimeError, match=r"backward of model\.py was compiled for .* = 4"):
        checked([torch.empty(4, 3)])


def test_static_inputs_need_no_check() -> None:
    module, _ = dynamic_graph()
    assert ShapeGuards([torch.empty(2)]).around(run, module, "it") is run
