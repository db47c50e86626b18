"""The flow of `python -m benchmarks gpu`, with stages that only pretend to run."""

import importlib
import json
import signal
import sys
import tarfile

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import TIMED_OUT, Stage


def _plan(*names):
    return [Stage(name=name, command=("do", name), limit_seconds=100) for name in names]


def _runner(exit_codes, seen):
    def run(stage, log):
        seen.append(stage)
        log.write_text(f"output of {stage.name}\n")
        return exit_codes[stage.name]

    return run


def _to(folder):
    return ["--out", str(folder), "--archive", str(folder / "gpu.tar.gz")]


def test_a_failing_stage_is_recorded_and_the_rest_still_runs(tmp_path):
    seen = []
    codes = {"build": 0, "tests": 1, "compile": 0}
    outcomes = gpu.run_all(_plan(*codes), tmp_path, runner=_runner(codes, seen), budget=1000)
    assert [stage.name for stage in seen] == list(codes)
    assert {one.name: one.exit_code for one in outcomes} == codes


def test_a_stage_gets_no_more_than_what_is_left_of_the_whole_time(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 70.0, 70.0, 150.0, 150.0, 150.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    seen = []
    codes = {"build": 0, "tests": 0, "compile": 0}
    outcomes = gpu.run_all(_plan(*codes), tmp_path, runner=_runner(codes, seen), budget=120)
    assert [stage.limit_seconds for stage in seen] == [100, 50]
    assert outcomes[-1].exit_code == TIMED_OUT, "no time was left to start it"


def test_time_that_a_stage_leaves_goes_to_those_after_it(tmp_path, monkeypatch):
    """But none that they need: the second one takes all that it gets, and the third has its own."""
    clock = iter([0.0, 0.0, 30.0, 30.0, 260.0, 260.0, 300.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    seen = []
    codes = {"build": 0, "tests": TIMED_OUT, "compile": 0}
    gpu.run_all(_plan(*codes), tmp_path, runner=_runner(codes, seen), budget=360)
    assert [stage.limit_seconds for stage in seen] == [160, 230, 100]


def test_summary_holds_machine_results_and_the_ends_of_the_logs(tmp_path):
    codes = {"build": 0, "tests": 3, "demo": TIMED_OUT}
    outcomes = gpu.run_all(_plan(*codes), tmp_path, runner=_runner(codes, []), budget=1000)
    text = gpu.write_summary(outcomes, {"gpu": "a fake one"}, tmp_path)
    assert text == (tmp_path / "summary.txt").read_text()
    for part in ("a fake one", "failed (3)", "timed out", "output of tests"):
        assert part in text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [stage["exit_code"] for stage in summary["stages"]] == [0, 3, TIMED_OUT]
    assert summary["stages"][1]["command"] == "do tests"


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (7, 1)])
def test_exit_code_tells(tmp_path, monkeypatch, code, expected):
    monkeypatch.setattr(gpu, "refusal", lambda: None)
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    monkeypatch.setattr(gpu, "run_stage", _runner({s.name: code for s in gpu.stages(tmp_path)}, []))
    assert gpu.main(_to(tmp_path / "new")) == expected
    assert (tmp_path / "new" / "summary.json").exists()


def test_only_some_stages(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(gpu, "refusal", lambda: None)
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    monkeypatch.setattr(gpu, "run_stage", _runner({"casts": 0, "fused": 0}, seen))
    assert gpu.main([*_to(tmp_path), "--only", "fused", "casts"]) == 0
    assert [stage.name for stage in seen] == ["casts", "fused"]
    with pytest.raises(SystemExit):
        gpu.main([*_to(tmp_path), "--only", "fusd"])
    assert "got ['fusd']" in capsys.readouterr().err


def test_stages_that_a_part_lacks_here_are_named(tmp_path, monkeypatch, capsys):
    """`--only checks` without compute-sanitizer was a build that had checked nothing."""
    monkeypatch.setattr(gpu, "refusal", lambda: None)
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "run_stage", _runner({"build": 0}, []))
    assert gpu.main([*_to(tmp_path), "--only", "checks"]) == 0
    message = "left out, for there is no compute-sanitizer: memcheck, racecheck"
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("part", gpu.PARTS)
def test_each_part_fits_and_all_stages_are_in_one(tmp_path, monkeypatch, capsys, part):
    monkeypatch.setattr(gpu, "refusal", lambda: None)
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    monkeypatch.setattr(gpu, "sanitized", lambda: [("memcheck", ("m",)), ("racecheck", ("r",))])
    names = {stage.name for stage in gpu.stages(tmp_path)}
    assert {name for names in gpu.PARTS.values() for name in names} == names
    seen = []
    monkeypatch.setattr(gpu, "run_stage", _runner(dict.fromkeys(names, 0), seen))
    assert gpu.main([*_to(tmp_path), "--only", part]) == 0
    assert [stage.name for stage in seen] == list(gpu.PARTS[part])
    assert "add up to" not in capsys.readouterr().out
    assert gpu.main([*_to(tmp_path)]) == 0
    assert "in parts that do: --only kernels" in capsys.readouterr().out


def test_what_was_found_is_packed_after_each_stage(tmp_path, monkeypatch):
    """Also where the process is stopped in the middle."""
    monkeypatch.setenv("OUT", str(tmp_path / "given"))
    monkeypatch.setattr(gpu, "refusal", lambda: None)
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")

    def run(stage, log):
        if stage.name == "fused":
            raise KeyboardInterrupt
        log.write_text("fast")
        (tmp_path / "results/a-gpu").mkdir(parents=True)
        (tmp_path / "results/a-gpu/casts.json").write_text("{}")
        return 0

    monkeypatch.setattr(gpu, "run_stage", run)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--out", str(tmp_path / "here"), "--only", "casts", "fused"])
    assert [path.name for path in (tmp_path / "given").iterdir()] == ["gpu.tar.gz"]
    with tarfile.open(tmp_path / "given/gpu.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"here/casts.log", "here/summary.txt", "results/a-gpu/casts.json"} <= names


def test_the_triton_tier_is_tested_too(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    (stage,) = (stage for stage in gpu.stages(tmp_path) if stage.name == "tests-triton")
    assert stage.command[:2] == ("env", "SMART_AUTOCAST_KERNELS=triton")
    assert stage.command[-3:] == ("-m", "gpu", "tests/ops")


def test_what_is_about_the_cuda_library_insists_on_it(monkeypatch, tmp_path):
    """Where it does not load, Triton's kernels would run, and memcheck find no errors in them."""
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    monkeypatch.setattr("shutil.which", lambda *_, **__: "compute-sanitizer")
    names = {"tests-native", "casts", "wider", "launch", "fused", "memcheck", "racecheck"}
    plan = {stage.name: stage.command for stage in gpu.stages(tmp_path)}
    for name, command in plan.items():
        forced = command[:2] == ("env", "SMART_AUTOCAST_KERNELS=native")
        assert forced == (name in names), name
    for name in ("memcheck", "racecheck"):
        assert any(part.endswith("::test_kernel_is_registered") for part in plan[name])


def test_questions_take_their_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    asked = [stage.command for stage in gpu.stages(tmp_path) if "benchmarks" in stage.command]
    assert len(asked) == 11
    for command in asked:
        question, *flags = command[command.index("benchmarks") + 1 :]
        module = importlib.import_module(f"benchmarks.{question}")
        assert module.parser().parse_args(flags).device == "cuda"


def test_all_tests_for_a_gpu_are_in_a_stage():
    """And those that compute-sanitizer runs are there."""
    folders = ("tests/ops", gpu.EQUALITY_TESTS, *gpu.MODEL_TESTS)
    for path in (gpu.ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.gpu" in path.read_text() and path.name != "test_gpu.py":
            assert path.relative_to(gpu.ROOT).as_posix().startswith(folders), path
    for test in {*gpu.MEMORY_TESTS, *gpu.RACE_TESTS}:
        path, name = test.split("::")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        name, _, parameters = name.partition("[")
        function = getattr(module, name)
        if parameters:
            (pairs,) = (mark.args[1] for mark in function.pytestmark if mark.name == "parametrize")
            number = int(parameters.removeprefix("source").split("-")[0])
            assert parameters == f"source{number}-target{number}]"
            assert torch.float32 in pairs[number]
    assert set(gpu.RACE_TESTS) < set(gpu.MEMORY_TESTS)


def test_stage_limits_and_names(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "machine_slug", lambda device: "a-gpu")
    plan = gpu.stages(tmp_path)
    names = [stage.name for stage in plan]
    assert names[0] == "build"
    assert len(set(names)) == len(names)
    assert gpu.WHOLE_RUN_SECONDS < 9 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_cuda_is_refused(tmp_path, capsys):
    assert gpu.main(_to(tmp_path / "none")) == 2
    assert "expected a CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert "expected torch 2.11 or newer, got 2.9.1" in gpu.refusal()


def test_a_real_stage_writes_its_log_and_is_stopped_at_its_limit(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    code = """
import os
names = "FORCE_CUDA", "TORCHINDUCTOR_COMPILE_THREADS", "PYTHONPATH"
print(*(os.environ[name].split(":")[0] for name in names))
"""
    hello = Stage(name="hello", command=(sys.executable, "-c", code), limit_seconds=60)
    assert gpu.run_stage(hello, log) == 0
    assert log.read_text() == f"1 1 {gpu.ROOT}\n"
    code = """
import time
try:
    print("began", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("what failed so far", flush=True)
    time.sleep(600)
"""
    monkeypatch.setattr(gpu, "LAST_WORDS_SECONDS", 1)
    endless = Stage(name="endless", command=(sys.executable, "-c", code), limit_seconds=2)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does with `&`
    try:
        assert gpu.run_stage(endless, log) == TIMED_OUT
    finally:
        signal.signal(signal.SIGINT, before)
    assert "what failed so far" in log.read_text()
