"""`stochastic_cast` against Philox and rounding written down in NumPy, and against chance."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from autocast_backend import multi_cast
from tests.ops.smart_cast_suite import assert_same, sample
from tests.ops.test_multi_cast_values import FORMATS, assert_same_numbers, misaligned, patterns

op = torch.ops.smart_autocast.stochastic_cast.default
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
TARGETS = [bf16, f16, e4m3, e5m2]
inf, nan = math.inf, math.nan


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10: `counter` is uint64 of shape (n, 4), each a word of 32 bits."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counter.T
    for i in range(10):
        k0 = np.uint64((key[0] + i * 0x9E3779B9) % 2**32)
        k1 = np.uint64((key[1] + i * 0xBB67AE85) % 2**32)
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        thirty_two = np.uint64(32)
        c0, c1, c2, c3 = (
            (p1 >> thirty_two) ^ c1 ^ k0,
            p1 & low,
            (p0 >> thirty_two) ^ c3 ^ k1,
            p0 & low,
        )
    return np.stack([c0, c1, c2, c3], axis=1)


# From the authors' Random123, examples/kat_vectors.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_of_this_file(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(philox(np.array([counter], dtype=np.uint64), key)[0]) == words


def words(count: int, seed: int, first: int) -> np.ndarray:
    """The words of a tensor of `count` elements that begins with the counter `first`."""
    counters = np.arange(-(-count // 4), dtype=np.uint64) + np.uint64(first % 2**64)
    low, high = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    counter = np.stack([low, high, 0 * low, 0 * low], axis=1)
    seed %= 2**64
    return philox(counter, (seed % 2**32, seed >> 32)).reshape(-1)[:count]


def rounded(values: np.ndarray, words: np.ndarray, target: torch.dtype) -> np.ndarray:
    """float64 in and out, both exact; no upper end."""
    form = FORMATS[target]
    magnitude = np.abs(values)
    finite = np.isfinite(values)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, form.smallest)
    quantum = np.ldexp(1.0, exponent - form.fraction)
    scaled = np.where(finite, magnitude, 0) / quantum
    share = np.floor((scaled - np.floor(scaled)) * 2.0**32)
    up = words.astype(np.float64) + share >= 2.0**32
    return np.where(finite, np.copysign((np.floor(scaled) + up) * quantum, values), values)


def expected(
    tensors: list[torch.Tensor], dtype: torch.dtype, seed: int, offset: int
) -> list[torch.Tensor]:
    results, first = [], offset
    for tensor in tensors:
        place = torch.empty_like(tensor, dtype=f64)  # as the result lies in memory
        place.copy_(tensor.to(f32))
        run = place.as_strided((place.numel(),), (1,))
        run.copy_(torch.from_numpy(rounded(run.numpy(), words(run.numel(), seed, first), dtype)))
        results.append(place.to(f32).to(dtype))
        first += -(-tensor.numel() // 4)
    return results


def assert_expected(
    tensors: list[torch.Tensor], dtype: torch.dtype, seed: int = 5, offset: int = 0
) -> None:
    results = op(tensors, dtype, seed, offset)
    for result, wanted in zip(results, expected(tensors, dtype, seed, offset), strict=True):
        assert_same_numbers(result, wanted)


def mixture() -> list[torch.Tensor]:
    base = sample(f32, 4, 6, 8)
    return [
        *(sample(dtype, 3, 5) for dtype in (f32, f16, bf16, f64, e4m3, e5m2)),
        sample(f32),
        sample(f32, 0, 3),
        base,
        base.transpose(0, 2),
        base[:, ::2, 1:],
        sample(f16, 5, 1).expand(5, 4),
        sample(f32, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        sample(torch.complex64, 4).conj().imag,
        sample(f32, 40)[3:],
        misaligned(sample(f32, 50)),
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_mixtures(target: torch.dtype) -> None:
    assert_expected(mixture(), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [f32, f64, f16, bf16])
def test_values_of_every_kind(source: torch.dtype, target: torch.dtype) -> None:
    pool = patterns(source)
    assert_expected([pool[:: pool.numel() // 2**14]], target)


@pytest.mark.parametrize(
    ("seed", "offset"),
    [(0, 0), (-1, 3), (2**63 - 1, 2**32 - 2), (-(2**63), 2**63 - 2), (2**32, 2**32)],
)
def test_seeds_and_offsets(seed: int, offset: int) -> None:
    assert_expected([sample(f32, 9), sample(f32, 21)], bf16, seed, offset)


def test_sizes_and_alignment() -> None:
    some = patterns(f32)[:: patterns(f32).numel() // 700].contiguous()
    views = [some[o : o + n] for o in range(3) for n in (*range(20), 31, 33, 63, 64, 65, 129)]
    for target in (bf16, f16):
        assert_expected(views, target)


def test_large_tensors_and_any_number_of_threads() -> None:
    tensors = [sample(f32, 200_003), sample(f32, 7), sample(f32, 140_001)[1:]]
    assert_expected(tensors, bf16, offset=11)
    results = op(tensors, bf16, 5, 11)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for result, again in zip(results, op(tensors, bf16, 5, 11), strict=True):
                assert_same(result, again)
    finally:
        torch.set_num_threads(before)


def test_calls_in_a_row_are_one_call() -> None:
    tensors = [sample(f32, 9), sample(f32, 5), sample(f32, 3)]
    together = op(tensors, bf16, 1, 7)
    apart = [*op(tensors[:1], bf16, 1, 7), *op(tensors[1:], bf16, 1, 7 + 3)]
    for one, other in zip(together, apart, strict=True):
        assert_same(one, other)
    assert not torch.equal(
        op([sample(f32, 999)], bf16, 1, 0)[0], op([sample(f32, 999)], bf16, 2, 0)[0]
    )


# A number, where it is between its neighbours, and the dtype.
BETWEEN = [
    (1 + 0.3 * 2**-7, 0.3, bf16),
    (-(1 + 0.75 * 2**-7), 0.75, bf16),
    (0.4 * 2.0**-133, 0.4, bf16),
    (5.6 * 2.0**-133, 0.6, bf16),
    (1000 + 0.1 * 2**-1, 0.1, f16),
    (0.01 * 2.0**-24, 0.01, f16),
    (-3.5 * 2.0**-24, 0.5, f16),
    (65504 + 0.25 * 32, 0.25, f16),
    (17 + 0.5, 0.75, e4m3),
    (0.2 * 2.0**-9, 0.2, e4m3),
    (9.0, 0.5, e5m2),
    (0.7 * 2.0**-16, 0.7, e5m2),
]


@pytest.mark.parametrize(("value", "share", "target"), BETWEEN)
def test_right_on_average(value: float, share: float, target: torch.dtype) -> None:
    """Up as often as it should be, but for five standard deviations."""
    count = 100_000
    (result,) = op([torch.full((count,), value)], target, 1234, 0)
    # As integers, bits of numbers of one sign are in the order of their magnitudes.
    bits = result.view({1: torch.int8, 2: torch.int16}[target.itemsize]).int() & (
        2 ** (8 * target.itemsize - 1) - 1
    )
    low = int(bits.min())
    assert set(bits.unique().tolist()) == {low, low + 1}
    up = (bits - low).sum().item() / count
    assert abs(up - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_the_words_of_neighbours_do_not_go_together() -> None:
    (result,) = op([torch.full((2**18,), 1 + 2.0**-8)], bf16, 7, 0)
    up = (result.double() - 1).sign() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 16, 64, 1024, 4096):
        correlation = (up[distance:] * up[:-distance]).mean() * 4
        assert abs(correlation) < 5 / math.sqrt(up.numel())


def test_exact_numbers_stay() -> None:
    special = torch.tensor([0.0, -0.0, inf, -inf, 1.0, -1.5, 2.0**-24, 448.0])
    for target in (bf16, f16):
        for seed in range(20):
            assert_same(op([special], target, seed, 0)[0], special.to(target))
            assert op([torch.tensor([nan, -nan])], target, seed, 0)[0].isnan().all()
    for dtype in TARGETS:
        exact = patterns(dtype)
        assert_same_numbers(op([exact], dtype, 3, 0)[0], exact)


def test_beyond_the_largest_number() -> None:
    """Infinity for what is beyond the next one; for what is before it, as often as elsewhere."""
    (result,) = op([torch.tensor([65536.0, -1e6, 3e38])], f16, 0, 0)
    assert result.tolist() == [inf, -inf, inf]
    (result,) = op([torch.full((1000,), 65519.0)], f16, 0, 0)
    assert set(result.tolist()) == {65504.0, inf}
    (result,) = op([torch.full((1000,), 3.39e38)], bf16, 0, 0)
    assert result.isinf().any()


def test_function() -> None:
    tensors = [sample(f32, 30), sample(f16, 4)]
    results = multi_cast(tensors, bf16, rounding="stochastic", seed=9, offset=2)
    for result, wanted in zip(results, op(tensors, bf16, 9, 2), strict=True):
        assert_same(result, wanted)
    assert multi_cast([], bf16, rounding="stochastic", seed=9) == []


def test_meta_and_fake_tensors() -> None:
    (meta,) = op([torch.empty(4, 6, device="meta").t()], f16, 0, 0)
    assert (meta.device.type, meta.dtype, meta.stride()) == ("meta", f16, (1, 6))
    with FakeTensorMode():
        (fake,) = op([torch.empty(4, 6, device="cuda").t()], e4m3, 0, 0)
        assert (fake.device.type, fake.dtype, fake.stride()) == ("cuda", e4m3, (1, 6))


def test_opcheck() -> None:
    torch.library.opcheck(op, ([sample(f32, 3, 5), sample(f64, 4, 6).t()], bf16, 3, 1))


def test_vmap_and_compile() -> None:
    tensor = sample(f32, 3, 50)

    def function(x: torch.Tensor) -> torch.Tensor:
        return multi_cast([x], bf16, rounding="stochastic", seed=4)[0]

    each = torch.stack([function(row) for row in tensor])
    assert_same(torch.vmap(function)(tensor), each)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(compiled(tensor), function(tensor))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_numbers_that_change_from_call_to_call_are_compiled_once(inner: str) -> None:
    """The offset of the next call comes after what this one takes; seeds, too, may change."""
    tensor, counters = sample(f32, 50), CompileCounterWithBackend(inner)

    def function(x: torch.Tensor, seed: int, offset: int) -> torch.Tensor:
        return multi_cast([x], bf16, rounding="stochastic", seed=seed, offset=offset)[0]

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=counters)
    for i in range(12):
        seed, offset = (-1) ** i * (i + 5) * 2**31, 13 * i + 2
        assert_same(compiled(tensor, seed, offset), function(tensor, seed, offset))
    assert counters.frame_count <= 3
    with pytest.raises(RuntimeError, match="'offset' must not be negative"):
        compiled(tensor, 1, -2)


def test_an_offset_that_depends_on_data() -> None:
    def function(x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return multi_cast([x], bf16, rounding="stochastic", seed=1, offset=int(offset.item()))[0]

    tensor = sample(f32, 50)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for i in range(3):
            offset = torch.tensor(i)
            assert_same(compiled(tensor, offset), function(tensor, offset))


def test_takes_no_gradients() -> None:
    tensor = sample(f32, 3).requires_grad_()
    message = "stochastic_cast: it has no gradient, but a tensor requires grad; call it under"
    with pytest.raises(RuntimeError, match=message):
        op([tensor], bf16, 0, 0)
    with torch.no_grad():
        assert not op([tensor], bf16, 0, 0)[0].requires_grad


def test_errors() -> None:
    tensor = sample(f32, 3)

    def refused(error: type[Exception], message: str, *tensors: Any, **options: Any) -> None:
        options = {"dtype": bf16, "rounding": "stochastic", "seed": 1, **options}
        with pytest.raises(error, match=message):
            multi_cast(list(tensors), options.pop("dtype"), **options)

    refused(ValueError, "'rounding' must be 'nearest-even' or 'stochastic'", tensor, rounding="up")
    refused(TypeError, "'seed' must be an int .* got NoneType", tensor, seed=None)
    refused(TypeError, "'offset' must be an int .* got float", tensor, offset=1.0)
    refused(ValueError, r"'seed' must fit into 64 bits with a sign, got 9223", tensor, seed=2**63)
    refused(ValueError, r"'offset' must fit .* got -9223", tensor, seed=0, offset=-(2**63) - 1)
    refused(ValueError, "'out' is for rounding='nearest-even'", tensor, out=[tensor.bfloat16()])
    refused(ValueError, "'seed' and 'offset' are for rounding=", tensor, rounding="nearest-even")
    refused(
        ValueError, "'offset' are for", tensor, rounding="nearest-even", seed=None, offset=tensor
    )
    refused(RuntimeError, "'offset' must not be negative, got -1", tensor, offset=-1)
    refused(RuntimeError, "'dtype' must be torch.bfloat16, .* got", tensor, dtype=f32)
    floating = r"'tensors' must hold floating tensors, got torch.int64 for tensors\[0\]; leave"
    refused(RuntimeError, floating, torch.arange(3))
    refused(RuntimeError, "'tensors' must be a dense tensor .* got a sparse", tensor.to_sparse())
    refused(RuntimeError, "must hold tensors on one device", tensor, torch.empty(3, device="meta"))


def test_vmap_over_nothing() -> None:
    (result,) = torch.vmap(
        lambda x: multi_cast([x], bf16, rounding="stochastic", seed=1), in_dims=1
    )(torch.empty(3, 0, 2))
    assert (result.shape, result.dtype) == ((0, 3, 2), bf16)
