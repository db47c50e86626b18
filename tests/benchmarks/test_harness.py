import statistics

import pytest
import torch

from benchmarks.harness import compare, cuda_sampler, host_sampler, interleave, percentile


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


@pytest.mark.gpu
def test_cuda_sampler_times_the_device_and_flushes_before_each_call():
    x = torch.randn(2048, 2048, device="cuda")
    flushes = []
    sampler = cuda_sampler(lambda: x @ x, calls=4, flush=lambda: flushes.append(1))
    assert 0 < sampler() < 10
    assert len(flushes) == 4
