import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import call_cost, first_step, lowering
from benchmarks.__main__ import QUESTIONS, main
from benchmarks.first_step_worker import Case, Record
from benchmarks.harness import compare
from benchmarks.models import FORMS, MODELS, build

CASE = Case(
    model="mlp", form="ambient", layers=1, device="cpu", dtype="bfloat16", backend="aot_eager"
)


def test_questions_are_listed_with_one_line_each(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for question in QUESTIONS:
        assert sum(line.split()[:1] == [question] for line in lines) == 1


def test_unknown_question_is_refused(capsys):
    assert main(["speed"]) == 2
    assert "no question 'speed'" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_models_run_in_both_forms(name, form):
    model, x = build(name, form, layers=1, device="cpu", dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "ambient"):
        out = model(x)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_both_forms_of_a_model_compute_the_same():
    outs = []
    for form in FORMS:
        model, x = build("vit", form, layers=1, device="cpu", dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "ambient"):
            outs.append(model(x))
    assert torch.equal(*outs)


def test_cold_processes_start_from_an_empty_cache_and_warm_ones_from_a_filled_one(
    tmp_path, monkeypatch
):
    seen = []

    def worker(case, cache):
        seen.append((case.backend, cache.exists()))
        cache.mkdir(exist_ok=True)
        return Record(
            seconds=float(len(seen)),
            cpu_seconds=2.0 * len(seen),
            load_seconds=0.0,
            backend_seconds=0.0,
            stages={"lowering": 0.25 * len(seen)},
            aot_cache={"miss": 1},
            loss=0.0,
        )

    monkeypatch.setattr(first_step, "run_worker", worker)
    phases = first_step.measure(CASE, rounds=2, warm_rounds=1, seed=0, scratch=tmp_path)
    assert sorted(seen[:4]) == [("inductor", False)] * 2 + [("smart_autocast", False)] * 2
    assert sorted(seen[4:]) == [("inductor", True), ("smart_autocast", True)]
    assert [row.name for row in phases["cold"].rows] == ["stock", "ours"]
    assert len(phases["cold"].records["ours"]) == 2
    seconds = [record.seconds for record in phases["cold"].records["ours"]]
    assert phases["cold"].cpu_rows[1].samples == [2 * one for one in seconds]
    assert phases["cold"].stage_seconds() == {"lowering": 0.25 * sum(seconds) / 2}


def test_both_modes_of_validation_are_measured_and_judged(tmp_path, monkeypatch, capsys):
    validation = {"dtype": 0.5, "strict": 2.0}

    def worker(case, cache):
        assert not cache.exists()
        cache.mkdir()
        return Record(
            seconds=20.0,
            cpu_seconds=30.0,
            load_seconds=0.0,
            backend_seconds=0.0,
            stages={"validation": validation[case.validate]} if case.validate else {},
            aot_cache={},
            loss=0.0,
        )

    monkeypatch.setattr(first_step, "run_worker", worker)
    question = ["validation", "--models", "mlp", "--forms", "ambient"]
    assert main([*question, "--rounds", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "dtype: 500.0 ms, 2.50% of stock's cold first step" in printed
    assert "strict: 2000.0 ms, 10.00% of stock's cold first step" in printed
    verdicts = {
        t["name"][:19]: t["verdict"]
        for t in json.loads((tmp_path / "validation.json").read_text())["targets"]
    }
    assert verdicts == {"validation 'dtype' ": "met", "validation 'strict'": "missed"}


def test_all_stages_before_the_inner_compiler_are_judged(tmp_path, monkeypatch):
    stages = {"regions": 0.1, "validation": 0.1, "lowering": 0.1, "weights": 0.3, "inner": 5.0}

    def worker(case, cache):
        return Record(
            seconds=10.0,
            cpu_seconds=10.0,
            load_seconds=0.0,
            backend_seconds=0.0,
            stages=stages if case.backend == "smart_autocast" else {},
            aot_cache={},
            loss=0.0,
        )

    monkeypatch.setattr(first_step, "run_worker", worker)
    part = ["--only", "first-step", "--models", "mlp", "--forms", "ambient"]
    assert main(["compile", *part, "--out", str(tmp_path)]) == 0
    target = json.loads((tmp_path / "compile.json").read_text())["targets"][0]
    assert (target["measured"], target["verdict"]) == ("6.00%", "missed")


@pytest.mark.slow
def test_a_worker_process_says_what_validation_takes(tmp_path):
    case = replace(CASE, backend="smart_autocast", validate="dtype")
    assert first_step.run_worker(case, tmp_path).stages["validation"] > 0


@pytest.mark.slow
def test_a_worker_process_reports_its_first_step(tmp_path):
    record = first_step.run_worker(CASE, tmp_path)
    assert record.seconds > record.backend_seconds > 0
    assert record.cpu_seconds > 0
    assert record.stages == {}
    assert torch.isfinite(torch.tensor(record.loss))


@pytest.mark.slow
def test_a_failing_worker_says_why(tmp_path):
    broken = Case(
        model="mlp", form="ambient", layers=1, device="cpu", dtype="bfloat16", backend="no_such"
    )
    with pytest.raises(RuntimeError, match="no_such"):
        first_step.run_worker(broken, tmp_path)


def test_chain_has_the_asked_size_and_eager_autocast_values():
    graph = lowering.chain(99, distinct=True).graph
    assert 90 <= len(graph.nodes) <= 110
    linears = [node for node in graph.nodes if node.target is F.linear]
    assert {node.meta["example_value"].dtype for node in linears} == {torch.bfloat16}
    assert len({node.meta["example_value"].shape for node in linears}) == len(linears)
    same = [n for n in lowering.chain(99, distinct=False).graph.nodes if n.target is F.linear]
    assert len({node.meta["example_value"].shape for node in same}) == 1


@pytest.mark.slow
def test_lowering_validates_few_calls_all_calls_or_none():
    checked = {}
    for kind in lowering.KINDS:
        _, graphs = lowering.measure(kind, sizes=[40, 80], rounds=1, seed=0)
        checked[kind] = [graph.checked for graph in graphs]
    assert checked["same"] == [5, 5]  # the first linear's input differs from the others'
    assert checked["distinct"] == [5 * 4, 10 * 4]
    assert checked["known"] == [0, 0]


@pytest.mark.parametrize("power", [1, 2])
def test_exponent_of_a_power_law(power):
    sizes = [100, 1000, 5000]
    assert lowering.exponent(sizes, [3e-6 * n**power for n in sizes]) == pytest.approx(power)


def test_fresh_copies_share_no_compiled_code():
    def f(x):
        return x + 1

    one, two = call_cost.fresh_copy(f, "one"), call_cost.fresh_copy(f, "two")
    assert one.__code__ is not two.__code__
    assert torch.equal(one(torch.ones(2)), two(torch.ones(2)))


def test_call_cost_and_its_noise():
    comparisons = [
        compare({"stock": [1.0], "control": [1.0 + n], "ours": [1.5]}, baseline="stock")
        for n in (0.0, 0.125, -0.25)
    ]
    assert call_cost.cost(comparisons[0]) == 0.5
    assert call_cost.noise(comparisons) == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("autocast", call_cost.AUTOCAST)
def test_each_setting_of_the_calls_runs(autocast):
    setting = call_cost.Setting(autocast=autocast, mode="training", inner="aot_eager", device="cpu")
    rows = call_cost.measure(setting, rounds=2, seed=0)
    assert [row.name for row in rows] == ["stock", "control", "ours"]
    assert all(value > 0 for row in rows for value in row.samples)
