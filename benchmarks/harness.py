"""Interleaved measurements and their statistics; `benchmarks.answer` prints and keeps them.

A candidate is a *sampler*: a function without arguments that takes one sample and returns it in
seconds. Samplers for functions on the host and on CUDA are here; a question that times something
else (a process, a compiler) writes its own.

    samples = interleave({"stock": host_sampler(f), "ours": host_sampler(g)}, rounds=50)
    rows = compare(samples, baseline="stock")
    print(table(rows, unit="us"))
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Sampler = Callable[[], float]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For calls of microseconds. With more threads even a product of 4 by 4 matrices waits for the
    others, which on a busy machine takes longer than all that is to be measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of `values` lie, interpolated linearly."""
    if not values:
        raise ValueError("percentile: expected at least one value, got none")
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile: percent must lie in 0..100, got {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interleave(
    samplers: Mapping[str, Sampler], *, rounds: int, warmup: int = 0, seed: int = 0
) -> dict[str, list[float]]:
    """One sample of each candidate per round, in an order shuffled anew for each round.

    Slow drifts (clock, heat, other users of the machine) then fall on all candidates alike, and
    samples of one round can be compared with each other. `warmup` rounds are run and dropped.
    """
    if rounds < 1:
        raise ValueError(f"interleave: expected rounds >= 1, got {rounds}")
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(-warmup, rounds):
        order = list(samplers)
        shuffle(order)
        for name in order:
            seconds = samplers[name]()
            if number >= 0:
                samples[name].append(seconds)
    return samples


def host_sampler(function: Callable[[], object], *, calls: int = 1) -> Sampler:
    """Seconds per call by the host's clock, over `calls` calls in a row: for CPU work only."""

    def sample() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    return sample


def cuda_sampler(function: Callable[[], object], *, calls: int = 1) -> Sampler:
    """Seconds per call between two CUDA events around `calls` calls in a row: what a loop of them
    takes, which is the host's time for a call or the device's, whichever is longer."""

    def sample() -> float:
        start, end = _events_around(function, calls)
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    return sample


def device_sampler(
    function: Callable[[], object], *, calls: int = 1, flush: Callable[[], object] | None = None
) -> Sampler:
    """Seconds per call that the device takes, between CUDA events, over `calls` calls.

    Without `flush`, one pair of events is around all calls in a row. With it each call has its own
    pair and `flush` runs before it, outside them: that is the time of a call which finds its inputs
    in memory, not in the L2 cache.

    The device first sleeps for twice as long as the host takes to queue what is between a pair, so
    that it is not left waiting for the host. Where it woke up before all was queued, a sample is
    taken again with a longer sleep, twice at most. A GPU's queue holds some 1,000 launches, at
    which the host waits: with more between a pair of events, and a host that is slower than the
    device, a sample has some of the host's time in it.
    """
    at_once = calls if flush is None else 1
    to_queue: float | None = None

    def sample() -> float:
        nonlocal to_queue
        if to_queue is None:
            to_queue = min(_seconds_to_queue(function, at_once) for _ in range(3))
        for longer in (2, 4, 8):
            cycles = int(longer * to_queue * _cycles_per_second())
            pairs, in_time = [], True
            for _ in range(calls // at_once):
                torch.cuda._sleep(cycles)
                if flush is not None:
                    flush()
                pairs.append(_events_around(function, at_once))
                in_time &= not pairs[-1][0].query()
            torch.cuda.synchronize()
            if in_time:
                break
        return sum(start.elapsed_time(end) for start, end in pairs) / 1e3 / calls

    return sample


def _events_around(
    function: Callable[[], object], calls: int
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        function()
    end.record()
    return start, end


def _seconds_to_queue(function: Callable[[], object], calls: int) -> float:
    """By the host's clock, with nothing before them on the device."""
    torch.cuda.synchronize()
    before = time.perf_counter()
    _events_around(function, calls)
    seconds = time.perf_counter() - before
    torch.cuda.synchronize()
    return seconds


@functools.cache
def _cycles_per_second() -> float:
    """Of the clock that `torch.cuda._sleep` counts."""
    cycles = 10_000_000
    for _ in range(2):  # The first one may find the device at rest, and its clock slow.
        start, end = _events_around(lambda: torch.cuda._sleep(cycles), 1)
        torch.cuda.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


class L2Flush:
    """Call it to evict the GPU's L2 cache: it writes twice the cache's size."""

    def __init__(self) -> None:
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self._buffer = torch.empty(2 * size, dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        self._buffer.zero_()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate's samples in seconds, and how they compare with the baseline's.

    Attributes:
        p20, p50, p80: percentiles of the samples.
        ratio: median over rounds of this candidate's sample by the baseline's of the same round.
        difference: likewise, of this candidate's sample minus the baseline's. Both are None in a
            comparison without a baseline.
        samples: all of them, to four digits, in the order they were taken.
    """

    name: str
    p20: float
    p50: float
    p80: float
    ratio: float | None
    difference: float | None
    samples: list[float]


def compare(samples: Mapping[str, Sequence[float]], *, baseline: str | None = None) -> list[Row]:
    """Percentiles of each candidate, and its ratio to and difference from `baseline`."""
    if baseline is not None and baseline not in samples:
        raise ValueError(f"compare: baseline {baseline!r} is not among {sorted(samples)}")
    rows = []
    for name, values in samples.items():
        ratio = difference = None
        if baseline is not None:
            pairs = list(zip(values, samples[baseline], strict=True))
            ratio = percentile([ours / theirs for ours, theirs in pairs], 50)
            difference = percentile([ours - theirs for ours, theirs in pairs], 50)
        p20, p50, p80 = (percentile(values, percent) for percent in (20, 50, 80))
        row = Row(
            name=name,
            p20=p20,
            p50=p50,
            p80=p80,
            ratio=ratio,
            difference=difference,
            samples=[float(f"{value:.4g}") for value in values],
        )
        rows.append(row)
    return rows


def row_of(rows: Sequence[Row], name: str) -> Row:
    """The row of one candidate."""
    return next(row for row in rows if row.name == name)
