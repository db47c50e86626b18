"""Seconds, bytes and page faults of casting a list of tensors in every way there is.

Candidates of one comparison, all in the same rounds:

- `copy`: the limit. One copy that reads and writes as many bytes as the casts do, into memory that
  has been written before;
- `.to`: `[x.to(dtype) for x in xs]`, into new tensors; `multi_cast`: the same in one call;
- `foreach out`: `torch._foreach_copy_` into tensors that are used again; `multi_cast out`: as well;
- `.to grad`, `multi_cast grad`: as the first two, where every tensor requires grad;
- `compiled`: `.to` under `torch.compile`, into new tensors (only where asked for).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autocast_backend import multi_cast
from benchmarks.cast_sets import CastSet
from benchmarks.harness import (
    L2Flush,
    Row,
    Sampler,
    compare,
    cuda_sampler,
    host_sampler,
    interleave,
    percentile,
)

SAMPLE_SECONDS = 2e-3  # a sample takes at least that long: several calls of what takes less
MOST_CALLS = 200


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of one set.

    Attributes:
        rows: seconds per call of each candidate, compared with `.to`.
        to_copy: the same, compared with `copy`.
        faults: page faults per call of each candidate, the median over its samples.
        bytes: read and written by one call, together.
    """

    rows: list[Row]
    to_copy: list[Row]
    faults: dict[str, float]
    bytes: int


def page_faults() -> int:
    """Of this process so far, those that read nothing from a disk: new memory, mostly."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def candidates(
    cast_set: CastSet, dtype: torch.dtype, *, device: str, compiled: bool
) -> dict[str, Callable[[], object]]:
    """A function for each candidate, over tensors of its own."""
    generator = torch.Generator(device).manual_seed(0)
    xs = [torch.randn(shape, generator=generator, device=device) for shape in cast_set.shapes]
    with_grad = [x.detach().requires_grad_() for x in xs]
    out = [torch.empty_like(x, dtype=dtype) for x in xs]
    size = total_bytes(cast_set, dtype) // 2
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def to(tensors: list[Tensor]) -> list[Tensor]:
        return [x.to(dtype) for x in tensors]

    found: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        ".to": lambda: to(xs),
        "multi_cast": lambda: multi_cast(xs, dtype),
        "foreach out": lambda: torch._foreach_copy_(out, xs),
        "multi_cast out": lambda: multi_cast(xs, dtype, out=out),
        ".to grad": lambda: to(with_grad),
        "multi_cast grad": lambda: multi_cast(with_grad, dtype),
    }
    if compiled:
        torch.compiler.reset()
        function = torch.compile(to, fullgraph=True, dynamic=False)
        found["compiled"] = lambda: function(xs)
    return found


def total_bytes(cast_set: CastSet, dtype: torch.dtype) -> int:
    """Read as float32 and written as `dtype`."""
    return cast_set.elements * (4 + dtype.itemsize)


def measure(
    cast_set: CastSet,
    dtype: torch.dtype,
    *,
    device: str,
    rounds: int,
    seed: int,
    compiled: bool = False,
) -> Measurement:
    """All candidates on one set. On a GPU every call finds its L2 cache flushed."""
    functions = candidates(cast_set, dtype, device=device, compiled=compiled)
    flush = L2Flush() if device == "cuda" else None
    faults: dict[str, list[float]] = {name: [] for name in functions}
    samplers = {}
    for name, function in functions.items():
        function()  # compiles, and touches new memory
        calls = calls_per_sample(function)
        one: Sampler = (
            host_sampler(function, calls=calls)
            if flush is None
            else cuda_sampler(function, calls=min(calls, 20), flush=flush)
        )
        samplers[name] = _counting_faults(one, calls, faults[name])
    samples = interleave(samplers, rounds=rounds, warmup=1, seed=seed)
    return Measurement(
        rows=compare(samples, baseline=".to"),
        to_copy=compare(samples, baseline="copy"),
        faults={name: percentile(some[1:], 50) for name, some in faults.items()},
        bytes=total_bytes(cast_set, dtype),
    )


def calls_per_sample(function: Callable[[], object]) -> int:
    """How many calls fill a sample, by the quickest of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / min(seconds))))


def _counting_faults(sampler: Sampler, calls: int, faults: list[float]) -> Sampler:
    def sample() -> float:
        before = page_faults()
        seconds = sampler()
        faults.append((page_faults() - before) / calls)
        return seconds

    return sample
