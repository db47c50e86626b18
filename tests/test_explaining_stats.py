"""`explain(..., stats=True)`: what casts lose, and which results are not finite."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from autocast_backend import explain
from autocast_backend.options import OptionTypeError
from autocast_backend.reports.rows import GraphReport
from autocast_backend.reports.stats import CastCounts, ResultCounts

from .support import BF16, FP16, Product, needs_torch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.head.weight.fill_(0.25)
            self.head.weight[0, 0] = 1e5  # above float16's 65504
            self.head.weight[1, 0] = -1e-9  # below half of its smallest

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(x) * 2.0, x[:, :2]])


X = torch.tensor([[1.0, -7.0, torch.nan, 0.0], [2.0, 0.0, 1.0, 0.0]])


def counted(graph: GraphReport) -> dict[str, CastCounts | None]:
    casts = [cast for row in graph.rows for cast in row.casts]
    return {str(cast): graph.stats.casts.get(cast.node) for cast in casts}


def test_what_casts_lose_and_which_results_are_not_finite() -> None:
    with torch.autocast(**FP16):
        report = explain(Model(), stats=True)(X)
        plain = explain(Model())(X)
    (graph,) = report.graphs
    assert counted(graph) == {
        "x: float32 -> float16": CastCounts(8, 7.0, 0, 0, 1),
        "self.head.weight: float32 -> float16": CastCounts(8, 1e5, 1, 1, 0),
        "mul: float16 -> float32": None,  # loses nothing
        "getitem: float32 already": None,
    }
    results = {row.call: graph.stats.results[row.name] for row in graph.rows}
    assert results == {
        "linear": ResultCounts(4, 1, 2),
        "mul": ResultCounts(4, 1, 2),
        "getitem": ResultCounts(4, 0, 0),
        "cat": ResultCounts(8, 1, 2),
    }
    text = str(graph)
    assert "linear -> float16, 1 of 4 infinite, 2 of 4 NaN\n" in text
    assert "    x: float32 -> float16, largest 7, 1 of 8 NaN\n" in text
    assert "outside of the graph, largest 1e+05, 1 of 8 overflow, 1 of 8 underflow\n" in text
    assert "mul -> float16, 1 of 4 infinite, 2 of 4 NaN\n" in text  # autocast leaves it alone
    assert "getitem ->" not in text
    page = report.to_html()
    assert "<td>float16, 1 of 4 infinite, 2 of 4 NaN</td>" in page
    assert "(autocast_to_fp16.default), largest 7, 1 of 8 NaN; self.head.weight" in page
    for told in (str(plain), plain.to_html()):
        assert "largest" not in told
        assert "infinite" not in told
    assert "mul ->" not in str(plain)


def test_what_there_is_where_the_program_raises() -> None:
    """As one does that looks for infinities."""

    def product(x: Tensor) -> Tensor:
        y = x @ x.T
        torch._dynamo.graph_break()
        if y.isinf().any():
            raise ValueError("infinite")
        return y

    with torch.autocast(**FP16), pytest.raises(ValueError, match="infinite") as raised:
        explain(product, stats=True)(torch.full((4, 64), 40.0))
    (note,) = raised.value.__notes__
    assert "matmul -> float16, 16 of 16 infinite" in note


def test_all_calls_of_a_graph_are_counted() -> None:
    head = nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        return head(x)

    def forward(x: Tensor) -> Tensor:  # left to Python, and its block compiled once
        for _ in range(2):
            torch._dynamo.graph_break()
            x = block(x)
        return x

    with torch.autocast(**FP16), torch.no_grad():
        report = explain(forward, stats=True)(torch.ones(2, 4))
    casts = [counts for graph in report.graphs for counts in counted(graph).values() if counts]
    assert sum(counts.elements for counts in casts) == 2 * (16 + 4) + 8


def selective() -> Any:
    must_save = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return checkpoint.create_selective_checkpoint_contexts(must_save)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="all", marks=needs_torch(2, 13, because="a graph runs it once")),
        pytest.param({"context_fn": selective}, id="selective"),
    ],
)
def test_counting_changes_nothing_and_reaches_into_bodies(arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(3, 4)
    expected = copy.deepcopy(model)

    def step(model: nn.Module) -> None:
        y = checkpoint.checkpoint(model, x, use_reentrant=False, **arguments)
        y.float().square().sum().backward()

    with torch.autocast(**BF16):
        step(expected)
        report = explain(step, stats=True)(model)
    for actual, eagers in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(actual.grad, eagers.grad)
    (graph,) = report.graphs
    casts = counted(graph)
    # Counted twice: the checkpoint runs it again in the backward.
    assert casts["x: float32 -> bfloat16"] == CastCounts(24, x.abs().max().item(), 0, 0, 0)


def test_counting_is_not_compiled_itself() -> None:
    """The backward of a function calls back into Python, which Dynamo looks at."""
    x, w = torch.randn(3, 4), nn.Parameter(torch.randn(4, 4))

    def step() -> None:
        Product.apply(x, w).float().sum().backward()

    with torch.autocast(**BF16):
        report = explain(step, stats=True)()
    assert len(report.graphs) == 1


def test_weights_of_a_class_derived_from_parameter_are_counted() -> None:
    class OnManifold(nn.Parameter):
        pass

    w = OnManifold(torch.ones(4, 4))
    with torch.autocast(**BF16):
        (graph,) = explain(lambda x: x @ w, stats=True)(torch.ones(2, 4)).graphs
    assert CastCounts(16, 1.0, 0, 0, 0) in counted(graph).values()


def test_inside_of_transforms_nothing_is_counted() -> None:
    head = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        return torch.vmap(head)(x) + head(x)

    with torch.autocast(**BF16), torch.no_grad():
        (graph,) = explain(forward, stats=True)(torch.full((2, 4), torch.inf)).graphs
        inside, outside = (row for row in graph.rows if row.call == "linear")
    assert inside.name not in graph.stats.results
    assert graph.stats.results[outside.name]


def test_tensors_without_elements_to_look_at_are_not_counted() -> None:
    with torch.autocast(**BF16):
        rows = torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)
        (graph,) = explain(lambda x: x * 2.0, stats=True)(rows).graphs
        assert not graph.stats.results
        (graph,) = explain(Model().to("meta"), stats=True)(X.to("meta")).graphs
        assert not graph.stats.results
        (graph,) = explain(lambda x: x.to(torch.float8_e4m3fn), stats=True)(X).graphs
        assert not graph.stats.results


def test_anything_but_a_bool_is_refused() -> None:
    with pytest.raises(OptionTypeError, match="stats: expected True or False; got 1"):
        explain(Model(), stats=1)  # type: ignore[arg-type]


PROGRAM = """
import torch

@torch.compile(backend="smart_autocast", fullgraph=True)
def product(x):
    return x @ x.T

with torch.autocast("cpu", dtype=torch.float16):
    for x in torch.full((3, 4, 64), 40.0):
        print(product(x).isinf().all().item())
"""


@pytest.mark.slow
def test_the_command_counts_in_a_whole_program(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "autocast_backend.cli", "explain", "--stats", str(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("True\n" * 3 + "graph 1 (train.py:6), under cpu: float16:")
    assert "matmul -> float16, 48 of 48 infinite\n    x: float32 -> float16, largest 40\n" in (
        result.stdout
    )
