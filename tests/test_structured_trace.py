"""What tlparse shows of a compilation beside Dynamo's and the inner compiler's graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from autocast_backend import explain
from tests.support import BF16


class Kept(logging.Handler):
    """What was left in the trace: the artifacts of ours and the frames they were left for, and the
    frames of AOTAutograd's graphs, None for one without."""

    def __init__(self) -> None:
        super().__init__()
        self.artifacts: dict[str, str] = {}
        self.frames: set[Any] = set()
        self.frames_of_graphs: dict[str, list[Any]] = {}

    def emit(self, record: Any) -> None:
        for kind in ("aot_joint_graph", "aot_inference_graph"):
            if kind in record.metadata:
                frame = record.metadata.get("frame_id")
                self.frames_of_graphs.setdefault(kind, []).append(frame)
        name = record.metadata.get("artifact", {}).get("name", "")
        if name.startswith("smart_autocast"):
            self.artifacts[name] = record.payload
            self.frames.add(record.metadata["frame_id"])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    torch._dynamo.reset()
    handler = Kept()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [handler])
    return handler


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="smart_autocast", options={"inner": "aot_eager"})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).softmax(-1)


def test_the_lowered_graph_and_its_casts_are_in_the_trace(kept: Kept) -> None:
    model, x = Model(), torch.randn(2, 4)
    with torch.autocast(**BF16):
        (graph,) = explain(model)(x).graphs
        kept.artifacts.clear()  # of `explain`
        compiled(model)(x)
    found = kept.artifacts
    assert found.keys() == {"smart_autocast_lowered_graph", "smart_autocast_casts"}
    assert kept.frames == {0}
    assert "smart_autocast.autocast_to_bf16.default" in found["smart_autocast_lowered_graph"]
    assert found["smart_autocast_casts"] == str(graph).replace("graph 1", "a graph", 1)


def test_what_is_compiled_later_has_the_number_of_its_compilation(kept: Kept) -> None:
    """A backward under another state, and a graph with its casts outside at the second call."""
    model, x = compiled(Model()), torch.randn(2, 4)
    with torch.autocast(**BF16):
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
            model(x)
    assert kept.frames_of_graphs == {
        "aot_joint_graph": [0, 0],
        "aot_inference_graph": [0, 0],
    }


def test_a_graph_without_autocast_leaves_nothing(kept: Kept) -> None:
    compiled(Model())(torch.randn(2, 4))
    assert not kept.artifacts


@torch._dynamo.allow_in_graph
def reads_a_weight_before_it_casts_it(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (w * x).sin().sum() + (w * 2).cos().sum()
    return nn.functional.mse_loss(x @ w, x) * y + (w * 3).exp().mean()


def test_a_graph_that_is_left_to_eager_mode_is_in_the_trace(kept: Kept) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    with torch.autocast(**BF16):
        compiled(lambda x: (reads_a_weight_before_it_casts_it(x, w), x.sin() @ w))(
            torch.randn(4, 4)
        )
    assert "it runs as in eager mode" in kept.artifacts["smart_autocast_casts"]
    assert "autocast_to" not in kept.artifacts["smart_autocast_lowered_graph"]
