import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autocast_backend import CastStats, cast_with_stats
from autocast_backend.ops import reference
from tests.ops.smart_cast_suite import FLOATS_WITH_GRAD, assert_same, sample
from tests.ops.test_multi_cast_values import assert_same_numbers, patterns

op = torch.ops.smart_autocast.cast_with_stats.default
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
inf, nan = math.inf, math.nan


def numbers(stats: CastStats) -> tuple[float, float, float, float]:
    return tuple(number.item() for number in stats)  # type: ignore[return-value]


# Values, dtype to cast to, and amax, overflows, underflows, nans.
TABLE = [
    ([], f16, (0, 0, 0, 0)),
    ([1.0, -3.0], f16, (3, 0, 0, 0)),
    ([65504.0, 65519.0, 65520.0, -1e9], f16, (1e9, 2, 0, 0)),
    ([inf, -inf, 1.0], f16, (inf, 0, 0, 0)),
    ([nan, -nan, 2.0], f16, (2, 0, 0, 2)),
    ([nan], bf16, (0, 0, 0, 1)),
    ([0.0, -0.0], f16, (0, 0, 0, 0)),
    ([2.0**-25, 2.0**-24, 1.5 * 2.0**-25, -1e-30, 0.0], f16, (1.5 * 2.0**-25 * 4 / 3, 0, 2, 0)),
    ([3.4e38, 3.389e38], bf16, (3.4e38, 1, 0, 0)),
    ([2.0**-134, 2.0**-133, 1.0], bf16, (1, 0, 1, 0)),
]


@pytest.mark.parametrize("call", [cast_with_stats, op], ids=["function", "op"])
@pytest.mark.parametrize(("values", "dtype", "expected"), TABLE)
def test_table(call, values, dtype, expected) -> None:
    tensor = torch.tensor(values, dtype=f64)
    result, stats = call(tensor, dtype)
    assert_same_numbers(result, tensor.to(dtype))
    assert [number.item() for number in stats] == pytest.approx(list(expected), rel=0, abs=0)


def test_named() -> None:
    result, stats = cast_with_stats(torch.tensor([1e6, 1e-9, nan, 2.0]), f16)
    assert isinstance(stats, CastStats)
    assert result.dtype == f16
    assert (stats.overflows, stats.underflows, stats.nans) == (1, 1, 1)
    assert stats.amax == torch.tensor(1e6).double()
    assert all(number.dtype == f64 and number.dim() == 0 for number in stats)


@pytest.mark.parametrize("target", [f16, bf16])
@pytest.mark.parametrize("source", FLOATS_WITH_GRAD)
def test_equals_the_reference_on_every_value(source: torch.dtype, target: torch.dtype) -> None:
    everything = patterns(source)
    finite = everything[everything.isfinite()]
    for tensor in (everything, finite, finite[:1001], finite[finite.abs() < 1e-3][3:], finite[:1]):
        result, stats = op(tensor, target)
        wanted, counts = reference.cast_with_stats(tensor, target)
        assert_same_numbers(result, wanted)
        assert torch.equal(stats, counts)


@pytest.mark.parametrize("target", [f16, bf16])
def test_each_number_at_a_limit(target: torch.dtype) -> None:
    """Alone: the largest and the smallest number of a block tell whether anything was lost."""
    limits = {f16: [65520.0, 2.0**-25], bf16: [3.3961775292304957e38, 2.0**-134]}[target]
    for limit in torch.tensor([*limits, inf, 0.0, 2.0**-149]):
        for number in (limit, limit.nextafter(limit * 0), limit.nextafter(torch.tensor(inf))):
            for tensor in (number.expand(70).clone(), -number.repeat(3), number.double()):
                counts = op(tensor, target)[1]
                assert torch.equal(counts, reference.cast_with_stats(tensor, target)[1])


def test_float64_beyond_float32_overflows_too() -> None:
    _, stats = cast_with_stats(torch.tensor([1e300, 1e-300, 1.0], dtype=f64), bf16)
    assert numbers(stats) == (1e300, 1, 1, 0)


def test_shapes_strides_and_threads() -> None:
    base = sample(f32, 4, 6, 8)
    large = sample(f32, 700_001)
    large[::1000] = 1e9
    for tensor in (
        sample(f32),
        sample(f32, 0, 3),
        base.transpose(0, 2),
        base[:, ::2, 1:],
        sample(f16, 5, 1).expand(5, 4),
        sample(torch.complex64, 4).conj().imag,
        large,
        large[1:],
    ):
        result, stats = op(tensor, f16)
        wanted, counts = reference.cast_with_stats(tensor, f16)
        assert_same(result, wanted)
        assert torch.equal(stats, counts)
    assert op(large, f16)[1][1] == 701


def test_gradient() -> None:
    tensor = sample(f32, 3, 5).requires_grad_()
    result, stats = cast_with_stats(tensor, bf16)
    grad = sample(bf16, 3, 5).flip(0)
    (actual,) = torch.autograd.grad(result, tensor, grad)
    assert_same(actual, grad.float())
    assert not any(number.requires_grad for number in stats)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    tensor = sample(f32, 3, 5).requires_grad_(requires_grad)
    torch.library.opcheck(op, (tensor, bf16))
    torch.library.opcheck(op, (tensor.t(), f16))


def test_vmap_counts_each() -> None:
    tensor = torch.tensor([[1.0, 1e6], [nan, 1e-9], [2.0, 3.0]]).t()
    result, stats = torch.vmap(lambda x: op(x, f16), in_dims=1)(tensor)
    assert_same_numbers(result, tensor.t().half().contiguous())
    assert stats.nan_to_num().tolist() == [
        [torch.tensor(1e6).item(), 1, 0, 0],
        [torch.tensor(1e-9).item(), 0, 1, 1],
        [3, 0, 0, 0],
    ]


def test_compile() -> None:
    torch.compiler.reset()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, stats = cast_with_stats(x, f16)
        return result * 2, stats.overflows + stats.nans

    tensor = torch.tensor([1e9, nan, 2.0])
    expected = function(tensor)
    actual = torch.compile(function, fullgraph=True, backend="aot_eager")(tensor)
    assert_same_numbers(actual[0], expected[0])
    assert actual[1] == expected[1] == 2


def test_fake_and_meta() -> None:
    with FakeTensorMode():
        result, stats = op(torch.empty(4, 6, device="cuda").t(), bf16)
        assert (result.device.type, result.dtype, result.stride()) == ("cuda", bf16, (1, 6))
        assert (stats.device.type, stats.dtype, stats.shape) == ("cuda", f64, (4,))
    assert op(torch.empty(3, device="meta"), bf16)[1].device.type == "meta"


def test_vmap_over_nothing() -> None:
    result, stats = torch.vmap(lambda x: op(x, f16), in_dims=1)(torch.empty(3, 0, 2))
    assert (result.shape, result.dtype) == ((0, 3, 2), f16)
    assert (stats.shape, stats.dtype) == ((0, 4), f64)


def test_errors() -> None:
    tensor = sample(f32, 3)
    with pytest.raises(TypeError, match=r"'tensor' must be a torch.Tensor, got list"):
        cast_with_stats([tensor], bf16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'dtype' must be a torch.dtype .* got str"):
        cast_with_stats(tensor, "bf16")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"'dtype' must be torch.float16 or torch.bfloat16, got"):
        cast_with_stats(tensor, torch.float8_e5m2)
    with pytest.raises(RuntimeError, match=r"'dtype' must be torch.float16 .* got torch.qint8"):
        cast_with_stats(tensor, torch.qint8)
    with pytest.raises(RuntimeError, match=r"'tensor' must be float64, .* got .*\.to\("):
        cast_with_stats(torch.arange(3), bf16)
    with pytest.raises(
        RuntimeError, match=r"'tensor' must be a dense tensor .*, got a sparse tensor"
    ):
        cast_with_stats(torch.eye(3).to_sparse(), bf16)
    with pytest.raises(RuntimeError, match=r"'tensor' must be a dense tensor .*, got None"):
        op(None, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize("target", [f16, bf16])
def test_cuda(target: torch.dtype) -> None:
    tensor = patterns(f32)
    result, stats = op(tensor.cuda(), target)
    wanted, counts = reference.cast_with_stats(tensor, target)
    assert_same_numbers(result.cpu(), wanted)
    assert torch.equal(stats.cpu(), counts)
