"""`multi_cast` bit by bit: against `Tensor.to`, and against rounding written down in NumPy."""

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from autocast_backend import multi_cast
from autocast_backend.ops import KERNEL_TIER
from tests.ops.smart_cast_suite import assert_same

op = torch.ops.smart_autocast.multi_cast.default
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = [f64, f32, f16, bf16, e4m3, e5m2]
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def assert_same_numbers(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same dtype, strides and bits, but for NaNs, which need only be NaNs: for some dtypes,
    ATen makes others of them at the end of a tensor than before."""
    assert torch.equal(actual.isnan(), wanted.isnan())
    assert_same(actual.where(~actual.isnan(), 0), wanted.where(~wanted.isnan(), 0))
    assert actual.stride() == wanted.stride()


@functools.cache
def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of up to 16 bits; half a million of others: any, and numbers near those that
    narrower dtypes round to and between."""
    integer = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(integer)
    if dtype.itemsize <= 2:
        return torch.arange(limits.min, limits.max + 1).to(integer).view(dtype)
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(
        limits.min, limits.max, (2**18,), generator=generator, dtype=torch.int64
    )
    narrow = torch.cat([patterns(d).to(dtype) for d in (f16, bf16, e4m3, e5m2)])
    halfway = (narrow[1:].double() + narrow[:-1].double()).div(2).to(dtype)
    below, above = (
        torch.nextafter(halfway, torch.full_like(halfway, x)) for x in (-torch.inf, torch.inf)
    )
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 65520.0, 1e-40, 464.0])
    return torch.cat([any_bits.to(integer).view(dtype), narrow, halfway, below, above, special])


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers from an address that is no multiple of their size."""
    data = bytearray(1) + bytearray(tensor.contiguous().flatten().view(torch.uint8).tolist())
    return torch.frombuffer(data, dtype=tensor.dtype, offset=1).view(tensor.shape)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_every_value_as_to_rounds_it(source: torch.dtype, target: torch.dtype) -> None:
    tensor = patterns(source)
    (result,) = op([tensor], target)  # the function casts one tensor by aten::to
    # Interpreted on the CPU, Triton's kernels make the NaNs that PyTorch makes on a GPU.
    interpreted = KERNEL_TIER.devices["cpu"].name == "triton"
    same = assert_same_numbers if interpreted and source != target else assert_same
    same(result, tensor.to(target, copy=True))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_sizes_and_alignment(source: torch.dtype, target: torch.dtype) -> None:
    """Every rest after the last whole register, from any place in memory; nothing beside it."""
    some = patterns(source)[:: max(1, patterns(source).numel() // 700)].contiguous()
    views = [some[o : o + n] for o in range(4) for n in (*range(20), 31, 33, 63, 64, 65, 129)]
    guarded = [torch.zeros(view.numel() + 9, dtype=target) for view in views]
    out = [memory[3:-6] for memory in guarded]
    multi_cast(views, target, out=out)
    for view, fresh, memory in zip(views, multi_cast(views, target), guarded, strict=True):
        assert_same_numbers(fresh, view.to(target, copy=True))
        wanted = torch.zeros_like(memory)
        wanted[3:-6] = view.to(target)
        assert_same_numbers(memory, wanted)
    askew = misaligned(some[:99])
    (result,) = multi_cast([askew], target, out=[misaligned(torch.zeros(99, dtype=target))])
    assert_same_numbers(result, askew.to(target, copy=True))


@pytest.mark.parametrize("seed", range(4))
def test_random_lists(seed: int) -> None:
    """Random numbers of tensors, shapes, orders of dimensions, slices, dtypes and values."""
    random = np.random.default_rng(seed)

    def tensor() -> torch.Tensor:
        dtype = FLOATS[random.integers(len(FLOATS))]
        shape = [int(n) for n in random.integers(0, 9, random.integers(0, 5))]
        if random.random() < 0.1:
            shape = [int(random.integers(30000, 90000))]
        pool = patterns(dtype)
        index = torch.from_numpy(random.integers(0, pool.numel(), int(np.prod(shape))))
        made = pool[index].reshape(shape)
        made = made.permute(random.permutation(len(shape)).tolist())
        if shape and random.random() < 0.3:
            made = made[:: int(random.integers(1, 4))]
        return made

    for target in FLOATS:
        tensors = [tensor() for _ in range(random.integers(1, 30))]
        out = [torch.empty_like(t, dtype=target) for t in tensors]
        multi_cast(tensors, target, out=out)
        for t, fresh, reused in zip(tensors, multi_cast(tensors, target), out, strict=True):
            assert_same_numbers(fresh, t.to(target, copy=True))
            assert_same_numbers(reused, fresh)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A floating format: bits of the fraction, the exponent of its smallest normal number, the
    largest number, and what is beyond."""

    fraction: int
    smallest: int
    largest: float
    beyond: float = np.inf


FORMATS = {
    f16: Format(fraction=10, smallest=-14, largest=65504.0),
    bf16: Format(fraction=7, smallest=-126, largest=(2 - 2**-7) * 2.0**127),
    # Newer versions of torch saturate.
    e4m3: Format(fraction=3, smallest=-6, largest=448.0, beyond=float(torch.tensor(1e9).to(e4m3))),
    e5m2: Format(fraction=2, smallest=-14, largest=57344.0),
}


def rounded(values: np.ndarray, to: Format) -> np.ndarray:
    """`values` to the nearest number of a format, ties to even: exact, in float64."""
    exponent = np.maximum(np.frexp(values)[1] - 1, to.smallest)
    quantum = np.ldexp(1.0, exponent - to.fraction)
    result = np.rint(values / quantum) * quantum  # rint takes ties to even
    beyond = np.abs(result) > to.largest
    return np.where(beyond & ~np.isnan(values), np.copysign(to.beyond, values), result)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", [f32, f16, bf16, e5m2])
def test_against_numpy(source: torch.dtype, target: torch.dtype) -> None:
    tensor = patterns(source)
    values = tensor.double().numpy()
    with np.errstate(invalid="ignore"):
        wanted = rounded(values, FORMATS[target])
    (result,) = op([tensor], target)
    actual = result.double().numpy()
    np.testing.assert_array_equal(actual, wanted)  # NaNs equal NaNs
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(actual[number]), np.signbit(wanted[number]))


native = pytest.mark.skipif(KERNEL_TIER.name != "native", reason="the native kernel's")


@native
def test_stores_around_the_caches() -> None:
    """Lists larger than the last level of the cache are stored in another way, in memory that has
    been written to."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    cache = int(size.read_text().strip()[:-1]) * 2**10 if size.exists() else 2**25
    if cache > 2**28:
        pytest.skip("needs more memory than the last level of the cache")
    pool = patterns(f32)
    large = pool.repeat(cache // 4 // pool.numel() + 1)
    for target in FLOATS:
        tensors = [large[3:], large[5:1000].double(), large[: large.numel() // 2].bfloat16()]
        out = [torch.zeros(tensor.numel() + 1, dtype=target)[1:] for tensor in tensors]
        for tensor, result in zip(tensors, multi_cast(tensors, target, out=out), strict=True):
            assert_same_numbers(result, tensor.to(target, copy=True))


@pytest.mark.slow
@native
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_narrower_instruction_sets(capability: str) -> None:
    """This file again with the instruction set that ATen, too, is told to use."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("this is one of those runs")
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


@native
@pytest.mark.slow
def test_more_elements_than_32_bits() -> None:
    size = 2**31 + 2**20 + 3
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 8 * 2**30:
        pytest.skip("needs 8 GiB of free memory")
    tensor = torch.zeros(size, dtype=e5m2)
    last = torch.arange(5.0).to(e5m2)
    tensor[-5:] = last
    tensor[2**31 - 2 : 2**31 + 2] = 7
    first, (result,) = op([last], bf16), op([tensor], bf16)
    assert torch.equal(result[-5:], first[0])
    assert torch.equal(result[2**31 - 2 : 2**31 + 2], torch.full((4,), 7.0, dtype=bf16))
    assert result.count_nonzero() == 4 + 4
