"""Everything on a machine with a GPU: build, GPU tests, demo, benchmarks; JSON and a summary.

No network is used: torch (2.11 or newer, with CUDA) and what the tests and the demo import must be
installed. Each stage is a process with a time limit; one that fails is recorded and the others
still run. The exit code is 0 only if all succeeded.

All stages together may take longer than the time they get, and come in the order of their value.
Where commands have a limit of their own, run them in parts, each of which fits: `--only kernels`,
`--only tests`, `--only checks`, `--only models`, `--only training`, `--only rounding`, `--only
rest`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from autocast_backend._native import TIER_VARIABLE
from benchmarks.answer import RESULTS, text_table
from benchmarks.flags import no_cuda
from benchmarks.machine import machine_facts, machine_slug

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = "2.11"
WHOLE_RUN_SECONDS = 530  # with margin under 9 minutes
LAST_WORDS_SECONDS = 5
TIMED_OUT = 124
PYTEST = ("-v", "--tb=short", "--durations=10")
"""With the name of each test before it runs: it may be the last."""

PARTS = {
    "kernels": ("build", "info", "tests-native", "casts", "wider", "launch", "fused", "roofline"),
    "tests": ("build", "tests-equality", "tests-triton", "tests-models"),
    "checks": ("build", "memcheck", "racecheck"),
    "models": ("build", "demo-bf16", "decode", "decode-graphs", "memory"),
    "training": ("build", "training"),
    "rounding": ("build", "rounding"),
    "rest": ("build", "demo-fp16", "compile"),
}
"""What `--only` takes beside the names of stages: the limits of each fit in the whole time."""

WIDER = ("--source", "bfloat16", "--dtype", "float32")

EQUALITY_TESTS = "tests/test_equality_cuda.py"
MODEL_TESTS = ("tests/weights", "tests/backward", "tests/examples", "tests/benchmarks")
"""Where other tests for a GPU are, beside tests/ops; the rest needs packages that may be absent."""
_CAST, _OTHERS = "tests/ops/test_multi_cast_cuda.py", "tests/ops/test_list_casts_cuda.py"
_TIER = f"{_CAST}::test_kernel_is_registered"
RACE_TESTS = (_TIER, f"{_OTHERS}::test_cast_with_stats")
MEMORY_TESTS = (
    # float32 to bfloat16 and float8, and back: vectors of all widths.
    *(f"{_CAST}::test_sizes_and_alignment[source{i}-target{i}]" for i in (9, 10, 19)),
    f"{_CAST}::test_mixtures",
    f"{_CAST}::test_tables_of_every_size",
    f"{_CAST}::test_large_and_small_tensors_in_one_list",
    f"{_OTHERS}::test_unscale_cast",
    f"{_OTHERS}::test_stochastic_cast_has_the_bits_of_the_cpu",
    *RACE_TESTS,
)
"""Every kernel, without the captures: these need the caching allocator."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process of the run: its name, command and the seconds it may take."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended: its exit code (124: stopped at its time limit) and how long it ran."""

    name: str
    command: str
    exit_code: int
    seconds: float


StageRunner = Callable[[Stage, Path], int]
"""Runs a stage, writes its output to the given file, and returns its exit code."""


def stages(out: Path) -> list[Stage]:
    """The stages by their value. What they make goes to `out`, JSON to this machine's results."""
    python = sys.executable
    build = ("setup.py", "--quiet", "build_ext", "--inplace", "egg_info")  # installs nothing
    # Where the CUDA library does not load, others would take its place, and have its names.
    native, triton = (("env", f"{TIER_VARIABLE}={tier}") for tier in ("native", "triton"))
    # What a broken kernel leaves behind fails every test after it.
    test = (python, "-m", "pytest", *PYTEST, "--maxfail=25", "-m", "gpu")
    demo = (python, "examples/train_digits.py", "--device", "cuda", "--out")
    results = str(RESULTS / machine_slug("cuda"))

    def ask(question: str, *flags: str) -> tuple[str, ...]:
        return (python, "-m", "benchmarks", question, "--device", "cuda", *flags, "--out", results)

    plan: list[tuple[str, tuple[str, ...], float]] = [
        ("build", (python, *build), 120),
        ("info", (python, "-m", "autocast_backend.cli", "info"), 20),
        ("tests-native", (*native, *test, "tests/ops"), 110),
        ("casts", (*native, *ask("casts", "--rounds", "12")), 60),
        ("wider", (*native, *ask("casts", "--rounds", "8", *WIDER)), 60),
        ("launch", (*native, *ask("launch", "--rounds", "10")), 80),
        ("fused", (*native, *ask("fused", "--rounds", "10")), 45),
        ("roofline", ask("roofline"), 20),
        ("tests-equality", (*test, EQUALITY_TESTS), 90),
        # Triton compiles some 150 variants, and Inductor whole models.
        ("tests-triton", (*triton, *test, "tests/ops"), 150),
        ("tests-models", (*test, *MODEL_TESTS), 170),
        *((tool, command, 180) for tool, command in sanitized()),
        ("demo-bf16", (*demo, str(out / "demo-bf16"), "--dtype", "bfloat16"), 150),
        ("decode", ask("decode", "--rounds", "5"), 100),
        ("decode-graphs", ask("decode", "--graphs"), 100),
        ("memory", ask("memory"), 60),
        ("training", ask("training", "--trials", "1", "--rounds", "11"), 400),
        ("rounding", ask("rounding"), 240),
        ("demo-fp16", (*demo, str(out / "demo-fp16"), "--dtype", "float16"), 150),
        ("compile", ask("compile", "--quick"), 240),
    ]
    return [Stage(name=name, command=command, limit_seconds=limit) for name, command, limit in plan]


def sanitized() -> list[tuple[str, tuple[str, ...]]]:
    """compute-sanitizer's tools by name, with their commands, where it is there.

    Without PyTorch's caching allocator each tensor is an allocation of its own, and what is written
    beyond its end is seen; with it, only what is written beyond the many MiB that tensors share.
    Only one kernel has shared memory, and so could have races in it.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    sanitizer = shutil.which("compute-sanitizer", path=path)
    if sanitizer is None:
        return []
    # Our kernels alone: the others take their time, and may have findings of their own, as has what
    # PyTorch asks the driver, which refuses some of it.
    options = ("--kernel-name", "kns=smart_autocast", "--report-api-errors", "no")
    # A run that finds none of them has no errors either: their tier is forced, and tested.
    environment = ("env", f"{TIER_VARIABLE}=native", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
    uncached = (*environment, sanitizer, "--error-exitcode", "1")
    test = (sys.executable, "-m", "pytest", *PYTEST, "-m", "gpu")
    return [
        ("memcheck", (*uncached, "--tool", "memcheck", *options, *test, *MEMORY_TESTS)),
        ("racecheck", (*uncached, "--tool", "racecheck", *options, *test, *RACE_TESTS)),
    ]


def run_stage(stage: Stage, log: Path) -> int:
    """Run one stage's process, and stop it with all its children at the time limit: as by Ctrl-C,
    when pytest says what has failed so far, and then without mercy.

    The package is taken from this tree, installed or not, and its build must make the CUDA library.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        # A process waits 300 s for Inductor's compile workers at its end (torch 2.11, Python 3.12)
        # where these have had nothing to do since they started, or were started anew. They start
        # with the first graph on a GPU, TORCH_WARM_POOL=0 or not; with one thread there are none.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
        "PYTHONPATH": path,
        "FORCE_CUDA": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # What a shell has in the background ignores Ctrl-C, and so would all that is started from it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as output:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=stage.limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=LAST_WORDS_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # None of them is left.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return TIMED_OUT


def run_all(
    plan: Sequence[Stage],
    out: Path,
    *,
    runner: StageRunner,
    budget: float,
    after: Callable[[Sequence[Outcome]], object] = lambda outcomes: None,
) -> list[Outcome]:
    """Run every stage, each within its own limit and what is left of `budget` seconds.

    What stages before it have left of theirs is added to its limit, where the limits of those after
    it fit all the same.

    `after` is called with the outcomes so far when a stage has ended.
    """
    outcomes = []
    deadline = time.monotonic() + budget
    for number, stage in enumerate(plan):
        start = time.monotonic()
        left, later = deadline - start, sum(one.limit_seconds for one in plan[number + 1 :])
        limit = min(left, max(stage.limit_seconds, left - later))
        log = out / f"{stage.name}.log"
        exit_code = TIMED_OUT if limit <= 0 else runner(replace(stage, limit_seconds=limit), log)
        outcome = Outcome(
            name=stage.name,
            command=" ".join(stage.command),
            exit_code=exit_code,
            seconds=round(time.monotonic() - start, 1),
        )
        print(f"{outcome.name:<12} {describe(outcome)} in {outcome.seconds} s ({log})", flush=True)
        outcomes.append(outcome)
        after(outcomes)
    return outcomes


def describe(outcome: Outcome) -> str:
    """`ok`, `timed out`, or `failed` with the exit code."""
    if outcome.exit_code == 0:
        return "ok"
    return "timed out" if outcome.exit_code == TIMED_OUT else f"failed ({outcome.exit_code})"


def write_summary(outcomes: Sequence[Outcome], machine: dict[str, object], out: Path) -> str:
    """Write `summary.json` and `summary.txt`, the ends of the logs with the latter; its text."""
    content = {"machine": machine, "stages": [asdict(outcome) for outcome in outcomes]}
    (out / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    body = [[one.name, describe(one), f"{one.seconds:.1f}"] for one in outcomes]
    parts = [
        "\n".join(f"{name}: {fact}" for name, fact in machine.items()),
        text_table(["stage", "result", "seconds"], body),
    ]
    for one in outcomes:
        log = out / f"{one.name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        parts.append("\n".join([f"--- {one.name}: {one.command}", *lines[-60:]]))
    parts.append(parts[1])  # where only the end of what is printed is seen
    text = "\n\n".join(parts) + "\n"
    (out / "summary.txt").write_text(text)
    return text


def pack(out: Path, results: Path, archive: Path) -> None:
    """All that is in `out`, and the JSON in `results`, as one file, which replaces an older one."""
    new = archive.with_name(f"{archive.name}.new")
    with tarfile.open(new, "w:gz") as file:
        file.add(out, out.name, filter=lambda one: None if "gpu.tar.gz" in one.name else one)
        if results.is_dir():
            file.add(results, f"results/{results.name}")
    new.replace(archive)


def refusal() -> str | None:
    """Why this machine cannot answer, or None."""
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        return f"expected torch {OLDEST_TORCH} or newer, got {torch.__version__}; update it"
    return no_cuda()


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    folder = Path(os.environ.get("OUT", "gpu-out"))
    parse.add_argument("--out", type=Path, default=Path("gpu-out"), help="default: gpu-out")
    parse.add_argument(
        "--archive", type=Path, default=folder / "gpu.tar.gz", help="default: in $OUT"
    )
    only = f"stages by their names, or {', '.join(PARTS)}; default: all that fit"
    parse.add_argument("--only", nargs="+", help=only)
    parse.add_argument("--seconds", type=float, default=WHOLE_RUN_SECONDS, help="for all of it")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Run the stages; 0 if all succeeded, 1 if some failed, 2 where there is no GPU.

    Logs and the summary come to `--out`; with the JSON of this machine's results they are packed
    into `--archive` after every stage: whatever ends this process, what was found is there.
    """
    parse = parser()
    flags = parse.parse_args(arguments)
    reason = refusal()
    if reason is not None:
        print(f"benchmarks gpu: {reason}", file=sys.stderr)
        return 2
    out = flags.out.resolve()
    plan = stages(out)
    if flags.only is not None:
        names = [stage.name for stage in plan]
        if unknown := set(flags.only).difference(names, PARTS):
            parse.error(f"--only: expected some of {[*names, *PARTS]}, got {sorted(unknown)}")
        chosen = {name for one in flags.only for name in PARTS.get(one, (one,))}
        plan = [stage for stage in plan if stage.name in chosen]
        if absent := chosen.difference(names):
            print(f"left out, for there is no compute-sanitizer: {', '.join(sorted(absent))}")
    limits = sum(stage.limit_seconds for stage in plan)
    if limits > flags.seconds:
        parts = ", ".join(f"--only {part}" for part in PARTS)
        print(
            f"the limits of these stages add up to {limits:.0f} s, of {flags.seconds:.0f} s: the "
            f"last may get no time; in parts that do: {parts}"
        )
    out.mkdir(parents=True, exist_ok=True)
    flags.archive.parent.mkdir(parents=True, exist_ok=True)
    machine, results = machine_facts(), RESULTS / machine_slug("cuda")

    def keep(outcomes: Sequence[Outcome]) -> None:
        write_summary(outcomes, machine, out)
        pack(out, results, flags.archive.resolve())

    outcomes = run_all(plan, out, runner=run_stage, budget=flags.seconds, after=keep)
    print("\n" + write_summary(outcomes, machine, out))
    return int(any(outcome.exit_code != 0 for outcome in outcomes))
