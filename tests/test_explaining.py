"""`explain` and `smart-autocast explain`: what became of each call."""

from __future__ import annotations

import html
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autocast_backend import (
    autocast_to_bf16,
    cast_with_stats,
    explain,
    multi_cast,
    unscale_cast,
)
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


def casts_of(report: Any) -> list[str]:
    """The lines of a printed report that are about casts."""
    return [line.strip() for line in str(report).splitlines() if line.startswith("    ")]


def test_casts_that_the_program_calls_are_calls_like_others() -> None:
    """Beside the smart casts, the package has ops with other arguments and results."""

    def steps(x: torch.Tensor, scale: torch.Tensor) -> Any:
        (first, second), found = unscale_cast([x, x * 2], scale, torch.float32)
        y, stats = cast_with_stats(first, torch.float16)
        (z,) = multi_cast([second], torch.bfloat16)
        return y, stats, found + 1, z @ z, autocast_to_bf16(x)

    with torch.autocast(**BF16):
        report = explain(steps)(torch.ones(2, 2, dtype=torch.float16), torch.ones(()))
    (graph,) = report.graphs
    calls = [row.call for row in graph.rows]
    for name in ("unscale_cast", "cast_with_stats", "multi_cast", "autocast_to_bf16"):
        assert any(call.startswith(name) for call in calls), calls
    product = next(row for row in graph.rows if row.call == "matmul")
    assert product.arguments == ("bfloat16", "bfloat16")
    assert casts_of(report) == ["z: bfloat16 already"] * 2
    assert report.to_html().count("<tr class=") == len(graph.rows)


def test_a_place_is_that_of_the_cast_not_of_its_name() -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x @ w, torch.einsum("ij,jk->ik", x, w)

    def hidden(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = x @ w
        w = torch.relu(h.float())
        return w @ x.t()

    x, w = torch.randn(2, 2), nn.Parameter(torch.randn(2, 2))
    outside = "w: float32 -> bfloat16, outside of the graph"
    inside = "w: float32 -> bfloat16, in the graph: eager autocast does not cache it"
    with torch.autocast(**BF16):
        assert [c for c in casts_of(explain(twice)(x, w)) if c[0] == "w"] == [outside, inside]
        of_hidden = [c for c in casts_of(explain(hidden)(x, w)) if c[0] == "w"]
    assert of_hidden == [outside, "w: float32 -> bfloat16"]


def test_weights_of_a_body_and_of_calls_without_gradients() -> None:
    model, x = Model(), torch.randn(3, 4)

    def in_body(x: torch.Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False)

    weight = "model.head.weight: float32 -> bfloat16"
    with torch.autocast(**BF16):
        body = casts_of(explain(in_body)(x))
        with torch.no_grad():
            (first, *_) = casts_of(explain(lambda x: model.head(x).sin())(x))[1:]
    assert f"{weight}, in the graph: the body of tag_activation_checkpoint casts it" in body
    assert first == f"{weight}, outside of the graph from the second call in a context on"


def test_a_graph_that_is_left_to_eager_mode_is_under_its_autocast() -> None:
    cell, w = nn.GRUCell(3, 3), nn.Parameter(torch.randn(3, 3))
    with torch.autocast(**BF16):
        report = explain(lambda x, w: (cell(w, w), x @ w))(torch.randn(3, 3), w)
    (graph,) = report.graphs
    assert graph.summary.keepers
    assert {row.under for row in graph.rows} == {"cpu: bfloat16"}
    assert str(report).count("\n") == 0  # it says so once, of all calls


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


def test_what_lowering_writes_into_a_bracketed_body_is_no_call_of_the_program() -> None:
    head = nn.Linear(4, 4)

    def branches(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, head, lambda x: head(-x), (x,))

    with torch.autocast(**BF16):
        (graph,) = explain(branches)(torch.ones(2, 4)).graphs
    assert [row.call for row in graph.rows if row.under] == ["cond", "linear", "neg", "linear"]


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


def test_breaks_are_found_whatever_the_program_does_to_logging() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    log = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    try:
        logging.disable(logging.CRITICAL)
        log.disabled = True
        with collecting() as report:
            torch._dynamo.reset()
            torch.compile(broken, backend="smart_autocast", options={"inner": "aot_eager"})(
                torch.ones(2)
            )
        assert len(report.graph_breaks) == 1
        assert not log.isEnabledFor(logging.DEBUG)
    finally:
        logging.disable(logging.NOTSET)
        log.disabled = False


def test_functions_that_are_compiled_too_often_are_named() -> None:
    """The calls after that run in eager mode, without the options of the backend."""

    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    torch._dynamo.reset()
    limited = torch._dynamo.config.patch(recompile_limit=2, specialize_float=True)
    with limited, collecting() as report:
        compiled = torch.compile(scaled, backend="smart_autocast", options={"inner": "aot_eager"})
        for factor in (2.0, 3.0, 4.0, 5.0):
            compiled(torch.ones(2), factor)
    assert len(report.graphs) == 2
    (found,) = report.graph_breaks
    assert re.match(
        r"test_explaining.py:\d+, in a function that runs in eager mode from some call on: "
        r"'scaled' was compiled as often as recompile_limit \(2\) allows",
        found,
    )


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


@pytest.mark.slow
def test_the_command_runs_a_program_and_ends_as_it_does(tmp_path: Path) -> None:
    program, page = tmp_path / "train.py", tmp_path / "casts.html"
    program.write_text(PROGRAM)
    done = run("--report", str(page), str(program), "--epochs", "1")
    assert done.returncode == 3, done.stderr
    assert "the arguments: ['--epochs', '1']" in done.stdout
    assert "graph 1 (linear), under cpu: bfloat16: 1 node lowered" in done.stdout
    assert "<title>Casts of train.py</title>" in page.read_text()


def test_the_command_finds_what_lies_beside_a_program_that_a_link_leads_to(tmp_path: Path) -> None:
    """As Python does."""
    (tmp_path / "beside.py").write_text("print('found')\n")
    (tmp_path / "train.py").write_text("import beside\n")
    link = tmp_path / "bin" / "train"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "train.py")
    done = run(str(link))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("found\n")


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


ENDS = {
    "unicode": "import torch\nclass schicht_ü(torch.nn.Linear): pass\nm = schicht_ü(2, 2)\n"
    "class Net(torch.nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.schicht_ü = m\n"
    "    def forward(self, x):\n        return self.schicht_ü(x)\n"
    "f = torch.compile(Net(), backend='smart_autocast', options={'inner': 'aot_eager'})\n"
    "with torch.autocast('cpu'): f(torch.ones(2, 2))\n",
    "closed": "import sys\nsys.stdout.close()\n",
    "none": "import sys\nsys.stdout = None\n",
}


@pytest.mark.parametrize(("end", "status"), [("unicode", 7), ("closed", 7), ("none", 0)])
def test_what_becomes_of_the_output_changes_neither_the_page_nor_the_status(
    end: str, status: int, tmp_path: Path
) -> None:
    program, page = tmp_path / "train.py", tmp_path / "casts.html"
    ending = f"raise SystemExit({status})\n" if status else ""
    program.write_text(ENDS[end] + ending, encoding="utf-8")
    command = [sys.executable, "-m", "autocast_backend.cli", "explain", "--report", str(page)]
    done = subprocess.run(
        [*command, str(program)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert page.is_file()
    assert ("self.schicht_\\xfc.weight" in done.stdout) == (end == "unicode")
    assert ("cannot be printed" in done.stderr) == (end == "closed")


def test_a_reader_of_the_report_who_leaves(tmp_path: Path) -> None:
    program, page = tmp_path / "train.py", tmp_path / "casts.html"
    program.write_text("raise SystemExit(7)\n")
    command = [sys.executable, "-m", "autocast_backend.cli", "explain", "--report", str(page)]
    done = subprocess.Popen([*command, str(program)], stdout=subprocess.PIPE)
    assert done.stdout is not None
    done.stdout.close()
    assert done.wait() == 7
    assert page.is_file()


def test_a_broken_pipe_of_the_program_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("raise BrokenPipeError('of a socket')\n")
    done = run(str(program))
    assert done.returncode == 1
    assert "BrokenPipeError: of a socket" in done.stderr
    assert "no graph was compiled" in done.stdout


def test_a_page_that_cannot_be_written_does_not_cost_the_report(tmp_path: Path) -> None:
    program, folder = tmp_path / "train.py", tmp_path / "pages"
    folder.mkdir()
    program.write_text(f"import os\nos.rmdir({str(folder)!r})\n")
    command = [sys.executable, "-m", "autocast_backend.cli", "explain", "--report"]
    done = subprocess.run(
        [*command, str(folder / "casts.html"), str(program)], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "FileNotFoundError" in done.stderr
    assert "no graph was compiled" in done.stdout


def test_messages_that_are_heard_keep_their_place() -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    places: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: places.append(record.filename)  # type: ignore[method-assign]
    log = logging.getLogger("torch._dynamo.convert_frame")
    log.addHandler(handler)
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(recompile_limit=1, specialize_float=True), collecting():
            compiled = torch.compile(scaled, backend="eager")
            for factor in (2.0, 3.0):
                compiled(torch.ones(2), factor)
    finally:
        log.removeHandler(handler)
    assert places == ["convert_frame.py"]
