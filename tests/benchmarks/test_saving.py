"""What a question has measured is in its file, also where it does not get to its end."""

from types import SimpleNamespace

import pytest

from benchmarks import (
    call_cost,
    casts,
    compile,
    decode,
    first_step,
    fused,
    launch,
    lowering,
    memory,
    threshold,
    training,
    validation,
    weights,
)
from benchmarks.answer import Answer
from benchmarks.first_step_worker import Record
from benchmarks.harness import compare
from benchmarks.models import GPT

NAMES = (
    *("stock", "control", "limit", "eager", "inside", "outside", "ours"),
    *("ours, scope", "ours, version", "ours, off", "ours, not rounded"),
)
ROWS = compare({name: [1.0] for name in NAMES}, baseline="stock")
RECORD = Record(
    seconds=1.0,
    cpu_seconds=1.0,
    load_seconds=0.0,
    backend_seconds=0.0,
    stages={"validation": 0.1},
    aot_cache={},
    loss=0.0,
)


def _until_stopped(result, calls):
    """A function that gives `result` so many times; then the time is up."""
    left = iter([result] * calls)

    def measure(*arguments, **settings):
        for one in left:
            return one
        raise KeyboardInterrupt

    return measure


def _kept(question, arguments, folder):
    with pytest.raises(KeyboardInterrupt):
        question.main([*arguments, "--out", str(folder)])
    (file,) = folder.iterdir()
    answer = Answer.load(file)
    assert not answer.complete
    return answer


@pytest.mark.parametrize(
    ("question", "result", "targets"),
    [
        (training, ROWS, [3, 6]),
        (decode, (ROWS, 1), [4]),
        (weights, (ROWS, 1), [0, 0]),
        (threshold, ROWS, [0, 0]),
        (memory, {name: (1, []) for name in NAMES}, [2]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_section_is_kept(question, result, targets, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "count", lambda *_: {})
    monkeypatch.setattr(threshold, "both", lambda model: {})
    monkeypatch.setattr(threshold, "model_of", lambda quick: (GPT(1, width=32, heads=2), 1024))
    for number, expected in enumerate(targets, 1):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(question, "measure", _until_stopped(result, number))
            answer = _kept(question, ["--quick"], folder)
        assert len(answer.sections) == number
        assert len(answer.targets) == expected


@pytest.mark.parametrize("question", [casts, fused, launch])
def test_each_comparison_of_casts_is_kept(question, tmp_path, monkeypatch):
    monkeypatch.setattr(question, "wait_until_quiet", _until_stopped(None, 1))
    assert len(_kept(question, ["--quick", "--rounds", "1"], tmp_path).sections) == 1


def _phase(*names):
    rows = compare({name: [1.0] for name in names}, baseline="stock")
    return first_step.Phase(rows=rows, cpu_rows=rows, records={name: [RECORD] for name in names})


def test_each_first_step_of_validation_is_kept(tmp_path, monkeypatch):
    measure = _until_stopped(_phase("stock", *first_step.MODES), 1)
    monkeypatch.setattr(first_step, "measure_validation", measure)
    answer = _kept(validation, [], tmp_path)
    assert [*answer.sections] == ["cold first step, mlp, ambient"]
    assert len(answer.targets) == 2


GRAPHS = [SimpleNamespace(nodes=n, checked=0, stages=[]) for n in (1000, 2000)]
SECONDS = compare({"1000 nodes": [1.0], "2000 nodes": [2.0]})


@pytest.mark.parametrize(
    ("part", "measured", "result", "sections"),
    [
        ("calls", call_cost, ROWS, ["call, off, inference, aot_eager"]),
        ("lowering", lowering, (SECONDS, GRAPHS), ["lowering, same"]),
        (
            "first-step",
            first_step,
            {phase: _phase("stock", "ours") for phase in ("cold", "warm")},
            [f"{phase} first step, mlp, ambient" for phase in ("cold", "warm")],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_section_of_compile_is_kept(part, measured, result, sections, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "measure", _until_stopped(result, 1))
    answer = _kept(compile, ["--only", part], tmp_path)
    assert [*answer.sections] == sections
