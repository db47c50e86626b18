"""Everything on a machine with a GPU: build, GPU tests, demo, benchmarks; JSON and a summary.

No network is used: torch (2.11 or newer, with CUDA) and what the tests and the demo import must be
installed. Each stage is a process with a time limit; one that fails is recorded and the others
still run. The exit code is 0 only if all succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from benchmarks.answer import RESULTS, text_table
from benchmarks.machine import machine_facts, machine_slug

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = "2.11"
WHOLE_RUN_SECONDS = 530  # with margin under 9 minutes
TIMED_OUT = 124


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
    """The stages in order; what they produce goes to `out`."""
    python = sys.executable
    build = ("setup.py", "--quiet", "build_ext", "--inplace", "egg_info")  # installs nothing
    triton = ("env", "SMART_AUTOCAST_KERNELS=triton")
    demo = (python, "examples/train_digits.py", "--device", "cuda", "--out")

    def asking(question: str) -> tuple[str, ...]:
        return ("-m", "benchmarks", question, "--device", "cuda")

    compiling = (*asking("compile"), "--quick")
    casting = (*asking("casts"), "--rounds", "12")
    results = str(RESULTS / machine_slug("cuda"))
    plan: list[tuple[str, tuple[str, ...], float]] = [
        ("build", (python, *build), 150),
        ("info", (python, "-m", "autocast_backend.cli", "info"), 30),
        ("tests", (python, "-m", "pytest", "-m", "gpu", "tests"), 120),
        ("tests-triton", (*triton, python, "-m", "pytest", "-m", "gpu", "tests/ops"), 120),
        ("demo-bf16", (*demo, str(out / "demo-bf16"), "--dtype", "bfloat16"), 90),
        ("demo-fp16", (*demo, str(out / "demo-fp16"), "--dtype", "float16"), 90),
        ("casts", (python, *casting, "--out", results), 120),
        ("roofline", (python, *asking("roofline"), "--out", results), 30),
        ("launch", (python, *asking("launch"), "--rounds", "10", "--out", results), 60),
        ("fused", (python, *asking("fused"), "--rounds", "10", "--out", results), 90),
        ("decode", (python, *asking("decode"), "--rounds", "5", "--out", results), 150),
        ("memory", (python, *asking("memory"), "--out", results), 60),
        ("compile", (python, *compiling, "--out", results), 150),
    ]
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is not None:
        kernels = (python, "-m", "pytest", "-m", "gpu and not slow", "tests/ops", "-k", "cuda")
        for tool in ("memcheck", "racecheck"):
            checked = (sanitizer, "--tool", tool, "--error-exitcode", "1", *kernels)
            plan.append((tool, checked, 120))
    return [Stage(name=name, command=command, limit_seconds=limit) for name, command, limit in plan]


def run_stage(stage: Stage, log: Path) -> int:
    """Run one stage's process, and stop it with all its children at the time limit.

    The package is taken from this tree, installed or not, and its build must make the CUDA library.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "FORCE_CUDA": "1"}
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
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return TIMED_OUT


def run_all(
    plan: Sequence[Stage], out: Path, *, runner: StageRunner, budget: float
) -> list[Outcome]:
    """Run every stage, each within its own limit and what is left of `budget` seconds."""
    outcomes = []
    deadline = time.monotonic() + budget
    for stage in plan:
        start = time.monotonic()
        limit = min(stage.limit_seconds, deadline - start)
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
    text = "\n\n".join(parts) + "\n"
    (out / "summary.txt").write_text(text)
    return text


def refusal() -> str | None:
    """Why this machine cannot answer, or None."""
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        return f"expected torch {OLDEST_TORCH} or newer, got {torch.__version__}; update it"
    if not torch.cuda.is_available():
        return (
            f"expected a CUDA device; got none: torch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}, sees no GPU; run this where there is an NVIDIA GPU and a "
            "torch built with CUDA"
        )
    return None


def main(arguments: Sequence[str]) -> int:
    """Run all stages; 0 if all succeeded, 1 if some failed, 2 where there is no GPU."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    default = Path(os.environ.get("OUT", "gpu-out"))
    parse.add_argument("--out", type=Path, default=default, help="default: $OUT, or gpu-out")
    parse.add_argument("--only", nargs="+", help="stages by their names; default: all that fit")
    flags = parse.parse_args(arguments)
    reason = refusal()
    if reason is not None:
        print(f"benchmarks gpu: {reason}", file=sys.stderr)
        return 2
    out = flags.out.resolve()
    plan = stages(out)
    if flags.only is not None:
        names = [stage.name for stage in plan]
        if unknown := set(flags.only).difference(names):
            parse.error(f"--only: expected some of {names}, got {sorted(unknown)}")
        plan = [stage for stage in plan if stage.name in flags.only]
    out.mkdir(parents=True, exist_ok=True)
    machine = machine_facts()
    outcomes = run_all(plan, out, runner=run_stage, budget=WHOLE_RUN_SECONDS)
    print("\n" + write_summary(outcomes, machine, out))
    return int(any(outcome.exit_code != 0 for outcome in outcomes))
