"""`explain` and `smart-autocast explain`: what became of each call."""

from __future__ import annotations

import html
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autocast_backend import explain
from autocast_backend._torch.dynamo import counters
from autocast_backend.explaining import collecting
from autocast_backend.options import OptionTypeError, OptionValueError

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, broken: bool = False) -> torch.Tensor:
        y = self.head(x)
        if broken:
            torch._dynamo.graph_break()
        return torch.cat([y, x[:, :2]])  # bfloat16 and float32


def test_every_cast_is_in_the_line_that_it_is_made_for() -> None:
    with torch.autocast(**BF16):
        report = explain(Model())(torch.randn(3, 4))
    (graph,) = report.graphs
    assert (graph.summary.lowered, graph.summary.casts) == (2, 4)
    calls = {row.call: row for row in graph.rows}
    assert list(calls) == ["linear", "getitem", "cat"]
    assert [str(cast) for cast in calls["linear"].casts] == [
        "x: float32 -> bfloat16",
        "self.head.weight: float32 -> bfloat16",
        "self.head.bias: float32 -> bfloat16",
    ]
    assert [str(cast) for cast in calls["cat"].casts] == [
        "y: bfloat16 -> float32",
        "getitem: float32 already",
    ]
    assert calls["cat"].place.startswith("test_explaining.py:")

    text = str(report)
    assert text.startswith("graph 1 (test_explaining.py:"), text
    assert "under cpu: bfloat16: 2 nodes lowered, 1 untouched, 0 bracketed" in text
    assert "self.head.weight: float32 -> bfloat16, outside of the graph" in text
    assert "getitem ->" not in text  # autocast has nothing to do with it
    assert report.to_html().count("<tr class=") == 3


def test_a_call_with_another_policy_names_the_entry_that_asked_for_it() -> None:
    for asked, words in (("fp32", "(fp32)"), ("off", "(off)")):
        with torch.autocast(**BF16):
            report = explain(Model(), policies={"module": {"head": asked}})(torch.randn(3, 4))
        (graph,) = report.graphs
        entry = f"option 'policies': module 'head' {words}"
        assert graph.summary.overridden == {"y": entry}
        assert f"linear -> float32\n    {entry}\n" in f"{report}\n"
        assert f"<code>y: {html.escape(entry)}</code>" in report.to_html()


class Checkpoints(nn.Module):
    """Two bodies whose calls have one name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        def one(x: torch.Tensor) -> Any:
            y = self.first(x)
            return y.relu()

        def other(x: torch.Tensor) -> Any:
            y = self.second(x)
            return y.relu()

        return checkpoint(other, checkpoint(one, x, use_reentrant=False), use_reentrant=False)


@pytest.mark.parametrize("modules", [["first"], ["first", "second"]])
def test_calls_of_two_bodies_are_told_apart(modules: list[str]) -> None:
    policies = {"module": dict.fromkeys(modules, "off")}
    with torch.autocast(**BF16):
        report = explain(Checkpoints(), policies=policies)(torch.randn(3, 4, requires_grad=True))
    (graph,) = report.graphs
    assert graph.summary.overridden == {
        f"wrap_body_{i}.y": f"option 'policies': module '{name}' (off)"
        for i, name in enumerate(modules)
    }
    counted = {1: "1 call", 2: "2 calls"}[len(modules)]
    assert f"; {counted} overridden" in str(graph)
    for name in modules:
        assert str(report).count(f"module '{name}' (off)") == 1
    assert len({row.name for row in graph.rows}) == len(graph.rows)


def test_without_autocast_the_report_says_so() -> None:
    report = explain(Model())(torch.randn(3, 4))
    assert str(report).endswith("under off: no call stands inside of an autocast region")


def test_what_stays_under_autocast_says_why() -> None:
    with torch.autocast(**BF16):
        (graph,) = explain(lambda x: torch.linalg.matrix_power(x, 2))(torch.eye(2)).graphs
    (row,) = graph.rows
    assert (row.call, row.under, row.casts) == ("linalg_matrix_power", "cpu: bfloat16", ())
    (kept,) = graph.summary.bracketed
    assert f"stays under cpu: bfloat16: {kept.reason}" in str(graph)
    assert "stays under" in str(graph)


def test_a_bracket_is_under_the_states_of_all_device_types() -> None:
    both = [BF16, {"device_type": "xpu", "dtype": torch.float16}]
    (graph,) = explain(lambda x: torch.linalg.matrix_power(x, 2), autocast=both)(
        torch.eye(2)
    ).graphs
    assert [row.under for row in graph.rows] == ["cpu: bfloat16, xpu: float16"]


def test_graph_breaks_and_regions_in_the_code() -> None:
    def region(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return model(x)

    report = explain(region)(Model(), torch.randn(3, 4))
    (graph,) = report.graphs
    assert graph.summary.lowered == 2
    assert not report.graph_breaks
    assert "under off: 2 nodes lowered" in str(report)

    with torch.autocast(**BF16):
        report = explain(Model())(torch.randn(3, 4), broken=True)
    assert len(report.graphs) == 2
    assert len(report.graph_breaks) == 1
    words = r"graph break in test_explaining.py:\d+: Call to `torch._dynamo.graph_break\(\)`"
    assert re.search(words, str(report))
    assert "torch._dynamo.graph_break" in report.to_html()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_breaks_that_dynamo_counts_elsewhere() -> None:
    """At a branch that depends on data; and in a loop, where the function runs in eager mode."""

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x @ x
            torch._dynamo.graph_break()
        return x

    here = r"test_explaining.py:\d+"
    log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    before = (log.level, log.propagate, list(log.handlers))
    (found,) = explain(branch)(torch.ones(2, 2)).graph_breaks
    assert re.match(f"{here}: Data-dependent branching\n  Explanation: ", found)
    report = explain(loop)(torch.ones(2, 2))
    assert not report.graphs
    (found,) = report.graph_breaks
    assert re.match(f"{here}, in a function that runs in eager mode: Call to `torch", found)
    none, line, why = str(report).splitlines()
    assert none == 'no graph was compiled with backend="smart_autocast"'
    assert re.match(f"graph break in {here}, in a function that runs in eager mode: Call to ", line)
    assert why.startswith("  Explanation: ")
    assert (log.level, log.propagate, log.handlers) == before


def test_a_report_within_a_report_and_a_log_that_is_on() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    logged = Listener()
    logging.getLogger("torch._dynamo").addHandler(logged)
    try:
        for on in (False, True):
            torch._logging.set_logs(graph_breaks=on)
            logged.count = 0
            with collecting() as around:
                assert len(explain(broken)(torch.ones(2)).graph_breaks) == 1
            assert len(around.graph_breaks) == 1
            assert (logged.count > 0) == on
            assert log.isEnabledFor(logging.DEBUG) == on
    finally:
        logging.getLogger("torch._dynamo").removeHandler(logged)
        torch._logging.set_logs()


class Listener(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "Graph break in user code" in record.getMessage()


def test_the_options_are_those_of_the_backend() -> None:
    x = torch.randn(3, 4)
    assert not explain(Model())(x).graphs[0].summary.casts
    assert explain(Model(), autocast=BF16)(x).graphs[0].summary.casts == 4
    off = {"module": {"head": "off"}}
    (graph,) = explain(Model(), autocast=BF16, policies=off)(x).graphs
    assert [row.call for row in graph.rows if row.casts] == ["cat"]
    places = explain(Model(), autocast=BF16, weight_cache="off")(x)
    assert "outside of the graph" not in str(places)


def test_bad_arguments_are_refused_before_anything_runs() -> None:
    with pytest.raises(OptionValueError, match="unknown option 'validat'; expected 'validate'"):
        explain(Model(), validat="off")
    with pytest.raises(OptionTypeError, match="fn: expected a function or a module; got Tensor"):
        explain(torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match=r"explain takes no 'options': .* keyword arguments"):
        explain(Model(), options={"validate": "off"})
    with pytest.raises(OptionTypeError, match=r"alone; got 1 more: .* explain\(model\)\(x\)"):
        explain(Model(), torch.randn(2, 4))


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_what_is_compiled_already_is_explained_and_compiled_again_by_its_next_call(
    how: str,
) -> None:
    model, x = Model(), torch.randn(3, 4)
    options = {"inner": "aot_eager"}
    compiled = model
    if how == "torch.compile":
        compiled = torch.compile(model, backend="smart_autocast", options=options)
    else:
        model.compile(backend="smart_autocast", options=options)
    with torch.autocast(**BF16):
        before = compiled(x)
        assert len(explain(compiled)(x).graphs) == 1
        counters().clear()
        assert torch.equal(compiled(x), before)
    assert counters()["smart_autocast"]["graphs"] == 1


PROGRAM = """
import sys, torch

model = torch.compile(torch.nn.Linear(4, 4), backend="smart_autocast", options={"inner": "eager"})
with torch.autocast("cpu", dtype=torch.bfloat16):
    model(torch.randn(2, 4))
print("the arguments:", sys.argv[1:])
sys.exit(3)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autocast_backend.cli", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_runs_a_program_and_ends_as_it_does(tmp_path: Path) -> None:
    program, page = tmp_path / "train.py", tmp_path / "casts.html"
    program.write_text(PROGRAM)
    done = run("--report", str(page), str(program), "--epochs", "1")
    assert done.returncode == 3, done.stderr
    assert "the arguments: ['--epochs', '1']" in done.stdout
    assert "graph 1 (linear), under cpu: bfloat16: 1 node lowered" in done.stdout
    assert "<title>Casts of train.py</title>" in page.read_text()


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    from autocast_backend import cli

    assert cli.main(["explain", str(tmp_path / "none.py")]) == 2
    program = tmp_path / "train.py"
    program.write_text("raise AssertionError('must not run')")
    assert cli.main(["explain", "--report", str(tmp_path / "no" / "x.html"), str(program)]) == 2
    assert cli.main(["explain", "--report", str(tmp_path), str(program)]) == 2
    assert cli.main(["explain", "--report", str(program), str(program)]) == 2
    assert program.read_text() == "raise AssertionError('must not run')"


def test_the_report_is_where_it_was_asked_for_when_the_program_changes_the_folder(
    tmp_path: Path,
) -> None:
    program, elsewhere = tmp_path / "train.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    program.write_text(f"import os\nos.chdir({str(elsewhere)!r})\n")
    command = [sys.executable, "-m", "autocast_backend.cli", "explain", "--report", "casts.html"]
    subprocess.run([*command, str(program)], cwd=tmp_path, check=True)
    assert (tmp_path / "casts.html").is_file()
    assert not list(elsewhere.iterdir())
