import statistics
import time

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import (
    compare,
    cuda_sampler,
    device_sampler,
    host_sampler,
    interleave,
    percentile,
)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (20, 1.8), (50, 3.0), (80, 4.2), (100, 5.0)]
)
def test_percentile_interpolates_linearly(percent, expected):
    assert percentile([4.0, 1.0, 5.0, 2.0, 3.0], percent) == pytest.approx(expected)


def test_percentile_50_is_the_median():
    values = [0.3, 9.0, 2.5, 7.75]
    assert percentile(values, 50) == pytest.approx(statistics.median(values))
    assert percentile([2.5], 80) == 2.5


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_it_cannot_answer(values, percent):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def _recorded_order(seed, rounds=20, warmup=0):
    order = []

    def sampler(name):
        return lambda: order.append(name) or float(len(order))

    samples = interleave(
        {name: sampler(name) for name in "abc"}, rounds=rounds, seed=seed, warmup=warmup
    )
    return order, samples


def test_every_round_samples_each_candidate_once():
    order, samples = _recorded_order(seed=0)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 20
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1, "the order never changed"
    assert all(len(values) == 20 for values in samples.values())


def test_order_depends_on_the_seed_alone():
    assert _recorded_order(seed=1)[0] == _recorded_order(seed=1)[0]
    assert _recorded_order(seed=1)[0] != _recorded_order(seed=2)[0]


def test_warmup_rounds_are_run_and_dropped():
    order, samples = _recorded_order(seed=0, rounds=2, warmup=3)
    assert len(order) == 3 * 5
    kept = sorted(value for values in samples.values() for value in values)
    assert kept == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], "the samples of the first rounds are gone"


def test_interleave_refuses_no_rounds():
    with pytest.raises(ValueError, match="rounds >= 1, got 0"):
        interleave({"a": lambda: 1.0}, rounds=0)


def test_ratio_is_paired_round_by_round():
    # The machine slows down fourfold over the run. By round, ours always takes twice stock's time;
    # medians of unpaired samples would be mixed up by the drift.
    stock = [1.0, 2.0, 4.0]
    ours = [2.0, 4.0, 8.0]
    rows = {row.name: row for row in compare({"stock": stock, "ours": ours}, baseline="stock")}
    assert rows["ours"].ratio == 2.0
    assert rows["ours"].difference == 2.0
    assert rows["stock"].ratio == 1.0
    assert (rows["ours"].p20, rows["ours"].p50, rows["ours"].p80) == pytest.approx((2.8, 4.0, 6.4))


def test_paired_ratio_is_not_the_ratio_of_medians():
    rows = compare({"stock": [1.0, 10.0, 2.0], "ours": [3.0, 5.0, 4.0]}, baseline="stock")
    assert rows[1].ratio == 2.0  # of 3, 0.5 and 2
    assert rows[1].p50 / rows[0].p50 == 2.0
    rows = compare({"stock": [1.0, 10.0, 2.0], "ours": [3.0, 5.0, 0.5]}, baseline="stock")
    assert rows[1].ratio == 0.5  # of 3, 0.5 and 0.25
    assert rows[1].p50 / rows[0].p50 == 1.5


def test_compare_without_a_baseline_has_no_ratio():
    (row,) = compare({"alone": [1.0, 2.0]})
    assert row.ratio is None
    assert row.difference is None
    with pytest.raises(ValueError, match="'stock' is not among"):
        compare({"alone": [1.0]}, baseline="stock")


def test_host_sampler_divides_by_the_calls(monkeypatch):
    calls = []
    clock = iter([10.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert host_sampler(lambda: calls.append(1), calls=3)() == 2.0
    assert len(calls) == 3


class Gpu:
    """One that runs what a host has queued, both by a clock of their own, in seconds."""

    def __init__(self, monkeypatch):
        self.now = 0.0  # the host's
        self.idle_from = 0.0
        self.slept = []
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                self.at = None

            def record(self):
                gpu.queue(host=1e-6, device=0)
                self.at = gpu.idle_from

            def query(self):
                return self.at <= gpu.now

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda._sleep", self.sleep)
        monkeypatch.setattr("torch.cuda.synchronize", self.synchronize)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        harness._cycles_per_second.cache_clear()

    def queue(self, *, host, device):
        self.now += host
        self.idle_from = max(self.now, self.idle_from) + device

    def sleep(self, cycles):
        self.slept.append(cycles / 1.5e9)
        self.queue(host=2e-6, device=self.slept[-1])

    def synchronize(self):
        self.now = max(self.now, self.idle_from)

    def launches(self, count):
        """A function with as many: 3 us of the host and 0.5 us of the device each."""

        def function():
            for _ in range(count):
                self.queue(host=3e-6, device=0.5e-6)

        return function


@pytest.fixture
def gpu(monkeypatch):
    yield Gpu(monkeypatch)
    harness._cycles_per_second.cache_clear()


def test_the_device_alone_where_the_host_takes_longer(gpu):
    function = gpu.launches(150)

    def flush():
        gpu.queue(host=3e-6, device=30e-6)

    assert cuda_sampler(function, calls=20)() == pytest.approx(450e-6, rel=0.02)
    for calls, before in ((1, flush), (4, flush), (4, None)):
        sampler = device_sampler(function, calls=calls, flush=before)
        for _ in range(2):
            assert sampler() == pytest.approx(75e-6, rel=0.02)
    assert cuda_sampler(function, calls=20)() == pytest.approx(450e-6, rel=0.02)


def test_where_the_device_takes_longer_both_samplers_have_its_time(gpu):
    def function():
        gpu.queue(host=3e-6, device=1e-3)

    assert cuda_sampler(function, calls=20)() == pytest.approx(1e-3, rel=0.02)
    assert device_sampler(function, calls=20)() == pytest.approx(1e-3, rel=0.02)


def test_a_host_that_was_slower_than_the_sleep_is_waited_for_longer(gpu):
    pauses = iter([0, 0, 0, 2e-3, 0])  # three times it is asked how long it takes

    def function():
        gpu.now += next(pauses)
        gpu.launches(150)()

    sampler = device_sampler(function)
    assert sampler() == pytest.approx(75e-6, rel=0.02)
    assert gpu.slept[-2:] == pytest.approx([2 * 452e-6, 4 * 452e-6], rel=0.02)
    pauses = iter([9e-3] * 3)  # but not for ever
    assert sampler() > 1e-3


@pytest.mark.gpu
def test_device_sampler_times_the_device_and_flushes_before_each_call():
    x = torch.randn(2048, 2048, device="cuda")
    flushes = []
    sampler = device_sampler(lambda: x @ x, calls=4, flush=lambda: flushes.append(1))
    assert 0 < sampler() < 10
    assert len(flushes) in (4, 8, 12)


@pytest.mark.gpu
def test_the_host_is_not_in_the_time_of_the_device():
    x = torch.zeros(4, device="cuda")

    def function():
        time.sleep(2e-3)
        x.add_(1)

    assert cuda_sampler(function, calls=4)() > 1.5e-3
    for flush in (None, lambda: None):
        assert device_sampler(function, calls=4, flush=flush)() < 0.5e-3
