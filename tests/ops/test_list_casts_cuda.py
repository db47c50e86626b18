"""`unscale_cast`, `stochastic_cast` and `cast_with_stats` on a GPU, against plain PyTorch there."""

import pytest
import torch

from autocast_backend.ops import KERNEL_TIER, reference
from autocast_backend.ops._stochastic_cast import stochastic_cast
from autocast_backend.ops._unscale_cast import unscale_cast
from tests.ops.smart_cast_suite import FLOATS_WITH_GRAD, assert_same, sample
from tests.ops.test_multi_cast_values import assert_same_numbers, patterns

pytestmark = pytest.mark.gpu
ops = torch.ops.smart_autocast
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2


def mixture() -> list[torch.Tensor]:
    tensors = [sample(dtype, 4, 6).cuda() for dtype in (*FLOATS_WITH_GRAD, e5m2)]
    tensors += [view for t in tensors for view in (t.t(), t[:, ::2], t[:0], t[0, 0])]
    large = patterns(f32)[:70_003].cuda()
    return [*tensors, large[large.isfinite()], sample(f16, 9001)[1:].cuda(), sample(f32, 5).cuda()]


@pytest.mark.skipif(KERNEL_TIER.name != "native", reason="the native kernels'")
@pytest.mark.parametrize(
    "op", ["unscale_cast", "unscale_cast.out", "stochastic_cast", "cast_with_stats"]
)
def test_kernels_are_registered(op: str) -> None:
    assert KERNEL_TIER.cuda_library is not None, KERNEL_TIER.cuda_reason
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"smart_autocast::{op}", "CUDA")


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16])
def test_unscale_cast(dtype: torch.dtype) -> None:
    scale = torch.tensor(3.0, device="cuda")
    everything = [patterns(source).cuda() for source in FLOATS_WITH_GRAD]
    for grads in (mixture(), everything, []):
        results, found = ops.unscale_cast(grads, scale, dtype)
        wanted, wanted_found = unscale_cast(grads, scale, dtype)
        for result, other in zip(results, wanted, strict=True):
            assert_same_numbers(result, other)
        assert_same(found, wanted_found)
        out = [torch.empty(grad.shape, dtype=dtype, device="cuda") for grad in grads]
        assert_same(ops.unscale_cast.out(grads, scale, dtype, out=out), wanted_found)
        for result, other in zip(out, wanted, strict=True):
            assert_same_numbers(result, other.contiguous())
        ops.unscale_cast.out(out, scale, dtype, out=out)
        again, _ = unscale_cast([other.contiguous() for other in wanted], scale, dtype)
        for result, other in zip(out, again, strict=True):
            assert_same_numbers(result, other)


def test_unscale_cast_finds_one_number_anywhere() -> None:
    grads = [torch.ones(100_001, device="cuda", dtype=f16), torch.ones(300, device="cuda")]
    scale = torch.tensor(2.0, device="cuda")
    assert ops.unscale_cast(grads, scale, f32)[1] == 0
    for place in (0, 7, 2047, 50_000, 100_000):
        grads[0][place] = torch.inf
        assert ops.unscale_cast(grads, scale, f32)[1] == 1
        grads[0][place] = 1
    with pytest.raises(RuntimeError, match="'grads' must hold tensors on the device of 'scale'"):
        ops.unscale_cast(grads, scale.cpu(), f32)


@pytest.mark.parametrize("dtype", [bf16, f16, e4m3, e5m2])
def test_stochastic_cast_has_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    many = [torch.full((1 + i % 7,), i / 7, device="cuda") for i in range(1500)]  # two tables
    for tensors in (mixture(), [patterns(f32).cuda()], many, []):
        results = ops.stochastic_cast(tensors, dtype, 5, 2**32 - 3)
        wanted = stochastic_cast([t.cpu() for t in tensors], dtype, 5, 2**32 - 3)
        for result, other in zip(results, wanted, strict=True):
            assert_same_numbers(result.cpu(), other)


@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("source", FLOATS_WITH_GRAD)
def test_cast_with_stats(source: torch.dtype, dtype: torch.dtype) -> None:
    everything = patterns(source).cuda()
    finite = everything[everything.isfinite()]
    views = (everything, finite, finite[3:], finite[:60_000].reshape(100, -1).t(), finite[:0])
    for tensor in (*views, finite[::3], finite[5], finite.repeat(40)):
        result, stats = ops.cast_with_stats(tensor, dtype)
        wanted, counts = reference.cast_with_stats(tensor, dtype)
        assert_same_numbers(result, wanted)
        assert torch.equal(stats, counts)


def test_captured_in_a_graph() -> None:
    """Zeros that results begin with, too, must be part of the graph."""
    tensor, scale = torch.ones(5000, device="cuda"), torch.tensor(2.0, device="cuda")

    def run() -> list[torch.Tensor]:
        (unscaled,), found = ops.unscale_cast([tensor], scale, f32)
        return [unscaled, found, *ops.cast_with_stats(tensor, f16)]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for value, bad in ((torch.inf, 1), (3.0, 0), (1e9, 0)):
        tensor.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert results[1] == bad
        for result, wanted in zip(results, run(), strict=True):
            assert_same_numbers(result, wanted)
