"""Seconds and page faults per call of functions that cast, sampled in turns."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Mapping

from benchmarks.harness import (
    L2Flush,
    Sampler,
    device_sampler,
    host_sampler,
    interleave,
    percentile,
)

SAMPLE_SECONDS = 2e-3  # a sample takes at least that long: several calls of what takes less
MOST_CALLS = 200
MOST_CUDA_CALLS = 20
"""All calls of a sample are queued before the first is waited for. In SAMPLE_SECONDS, by the host's
clock, a host queues less than 1,000 launches, which is what a GPU's queue holds."""


def sample_calls(
    functions: Mapping[str, Callable[[], object]], *, device: str, rounds: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per call of each function, and the page faults of a call, the median over samples.

    Each is called once before: that compiles, and touches new memory. On a CPU, samples find caches
    and heap in one state, not in that which another function has left: those of several calls as a
    loop of such calls leaves them; those of one call, where the heap has no free memory. On a GPU
    they are the device's seconds, without the host's, and every call finds the L2 cache flushed.
    """
    flush = L2Flush() if device == "cuda" else None
    faults: dict[str, list[float]] = {name: [] for name in functions}
    samplers = {}
    for name, function in functions.items():
        function()
        calls = min(calls_per_sample(function), MOST_CALLS if flush is None else MOST_CUDA_CALLS)
        one: Sampler = (
            host_sampler(function, calls=calls)
            if flush is None
            else device_sampler(function, calls=calls, flush=flush)
        )
        before = _nothing if flush is not None else function if calls > 1 else _empty_heap
        samplers[name] = _counting_faults(one, calls, faults[name], before=before)
    samples = interleave(samplers, rounds=rounds, warmup=1, seed=seed)
    return samples, {name: percentile(some[1:], 50) for name, some in faults.items()}


def page_faults() -> int:
    """Of this process so far, those that read nothing from a disk: new memory, mostly."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def calls_per_sample(function: Callable[[], object]) -> int:
    """How many calls fill a sample, by the quickest of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / min(seconds))))


def _nothing() -> None:
    pass


def _empty_heap() -> None:
    """Give the heap's free memory back to the system, where the C library is glibc. Whether it does
    so itself depends on what happens to lie above that memory, and is worth a factor of two."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _counting_faults(
    sampler: Sampler, calls: int, faults: list[float], *, before: Callable[[], object]
) -> Sampler:
    def sample() -> float:
        before()
        start = page_faults()
        seconds = sampler()
        faults.append((page_faults() - start) / calls)
        return seconds

    return sample
