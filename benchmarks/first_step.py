"""Seconds of the first training step, cold and warm: ours against stock, in fresh processes.

Cold: an empty cache folder. Warm: a new process with the folder that a cold one has filled.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.first_step_worker import Case, Record
from benchmarks.harness import Row, compare, interleave, percentile

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"stock": "inductor", "ours": "smart_autocast"}
MODES = ("dtype", "strict")
"""Of validation."""
PROCESS_LIMIT_SECONDS = 600


@dataclass
class Process:
    """A sampler: one fresh process per sample, with `cache` as its compile caches.

    Attributes:
        case: what the process compiles.
        cache: folder of all compile caches, Inductor's, AOTAutograd's, Triton's and ours.
        empty: whether to empty the folder before each sample.
        records: what each process reported.
    """

    case: Case
    cache: Path
    empty: bool
    records: list[Record] = field(default_factory=list)

    def __call__(self) -> float:
        if self.empty:
            shutil.rmtree(self.cache, ignore_errors=True)
        record = run_worker(self.case, self.cache)
        self.records.append(record)
        return record.seconds


def run_worker(case: Case, cache: Path) -> Record:
    """Run one `first_step_worker` process and return its record.

    Raises:
        RuntimeError: the process failed; with the end of what it wrote.
    """
    command = [sys.executable, "-m", "benchmarks.first_step_worker", json.dumps(asdict(case))]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"first step of {case} failed:\n{done.stderr[-2000:]}")
    return Record(**json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The samples of one phase (`cold` or `warm`) and the records behind them, by candidate.

    Attributes:
        rows: elapsed seconds.
        cpu_rows: processor seconds.
        records: what each process reported, in the order of the samples.
    """

    rows: list[Row]
    cpu_rows: list[Row]
    records: dict[str, list[Record]]

    def stage_seconds(self, name: str = "ours") -> dict[str, float]:
        """Median seconds of each stage of our compiler, for one candidate."""
        stages = [record.stages for record in self.records[name]]
        return {
            name: percentile([one.get(name, 0.0) for one in stages], 50)
            for name in dict.fromkeys(name for one in stages for name in one)
        }


def measure(
    case: Case, *, rounds: int, warm_rounds: int, seed: int, scratch: Path
) -> dict[str, Phase]:
    """Both phases of `case`, whose `backend` is replaced by each candidate's."""
    # As pip does for an installed package, torch for one.
    compileall.compile_dir(ROOT / "autocast_backend", quiet=1)
    phases = {}
    for phase, count in (("cold", rounds), ("warm", warm_rounds)):
        processes = {
            name: Process(replace(case, backend=backend), scratch / name, empty=phase == "cold")
            for name, backend in BACKENDS.items()
        }
        samples = interleave(processes, rounds=count, seed=seed)
        records = {name: process.records for name, process in processes.items()}
        cpu = {name: [one.cpu_seconds for one in some] for name, some in records.items()}
        phases[phase] = Phase(
            rows=compare(samples, baseline="stock"),
            cpu_rows=compare(cpu, baseline="stock"),
            records=records,
        )
    return phases


def measure_validation(case: Case, *, rounds: int, seed: int, scratch: Path) -> Phase:
    """Cold first steps of `case` by stock, and by ours in either mode of validation."""
    candidates: dict[str, tuple[str, str | None]] = {"stock": ("inductor", None)}
    candidates |= {mode: ("smart_autocast", mode) for mode in MODES}
    processes = {
        name: Process(
            replace(case, backend=backend, validate=mode), cache=scratch / name, empty=True
        )
        for name, (backend, mode) in candidates.items()
    }
    samples = interleave(processes, rounds=rounds, seed=seed)
    records = {name: process.records for name, process in processes.items()}
    cpu = {name: [one.cpu_seconds for one in some] for name, some in records.items()}
    return Phase(
        rows=compare(samples, baseline="stock"),
        cpu_rows=compare(cpu, baseline="stock"),
        records=records,
    )
