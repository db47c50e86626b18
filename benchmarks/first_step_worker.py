"""Times the first training step of a compiled model, in a process of its own.

    python -m benchmarks.first_step_worker '<a Case as JSON>'

prints a `Record` as its last line. The step is one forward and one backward; importing torch and
building the model are not part of it, loading the compiler is.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.models import build


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to compile: a model of benchmarks/models.py in a form, on a device, by a backend, ours
    with a mode of validation (None: the default)."""

    model: str
    form: str
    layers: int
    device: str
    dtype: str
    backend: str
    validate: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one process saw.

    Attributes:
        seconds: the whole first step.
        cpu_seconds: processor time of the step, of this process and of the compilers it started; on
            a machine that others use too it is the steadier number.
        load_seconds: the part of it that looked up and imported the backend, once Dynamo was there.
        backend_seconds: the part of it that Dynamo spent in its backend, forward and backward.
        stages: seconds of each stage of our compiler; empty for another backend.
        aot_cache: what AOTAutograd's cache did (`hit`, `miss`, `bypass`, `saved`, ...), as counts.
        loss: the step's loss, to see that two backends computed the same thing.
    """

    seconds: float
    cpu_seconds: float
    load_seconds: float
    backend_seconds: float
    stages: dict[str, float]
    aot_cache: dict[str, int]
    loss: float


def first_step(case: Case) -> Record:
    """Compile and run one forward and backward step of `case`, here and now."""
    dtype = getattr(torch, case.dtype)
    model, x = build(case.model, case.form, layers=case.layers, device=case.device, dtype=dtype)
    ambient = torch.autocast(case.device, dtype=dtype, enabled=case.form == "ambient")
    stages: dict[str, float] = {}
    _synchronize(case.device)
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    load_seconds = _load(case.backend, stages)
    options = {"validate": case.validate} if case.validate else None
    compiled = torch.compile(model, backend=case.backend, options=options)
    with ambient:
        loss = compiled(x).float().square().mean()
    loss.backward()
    _synchronize(case.device)
    seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu_start

    from torch._dynamo.utils import compilation_time_metrics, counters

    backend = ("OutputGraph.call_user_compiler", "backward._backward_impl")
    return Record(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        load_seconds=load_seconds,
        backend_seconds=sum(sum(compilation_time_metrics.get(name, [])) for name in backend),
        stages=stages,
        aot_cache={
            name.removeprefix("autograd_cache_"): count
            for name, count in counters["aot_autograd"].items()
            if name.startswith("autograd_cache_")
        },
        loss=loss.item(),
    )


def _load(backend: str, stages: dict[str, float]) -> float:
    """Look the backend up as `torch.compile` does; the seconds it took."""
    from torch._dynamo.backends.registry import lookup_backend

    start = time.perf_counter()
    lookup_backend(backend)
    seconds = time.perf_counter() - start
    if backend == "smart_autocast":
        _record_stages(stages)
    return seconds


def _record_stages(stages: dict[str, float]) -> None:
    """Add up the stage times that our compiler writes into its reports, over all graphs."""
    from autocast_backend.reports.report import Report

    timed = Report.timed

    @contextlib.contextmanager
    def recording(self: Any, stage: str) -> Iterator[None]:
        before = self.seconds.get(stage, 0.0)
        with timed(self, stage):
            yield
        stages[stage] = stages.get(stage, 0.0) + self.seconds[stage] - before

    Report.timed = recording  # type: ignore[method-assign]


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(asdict(first_step(Case(**json.loads(sys.argv[1]))))))
