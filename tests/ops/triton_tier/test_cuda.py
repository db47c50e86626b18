"""The Triton tier on a GPU: `SMART_AUTOCAST_KERNELS=triton python -m pytest -m gpu tests/ops`.

`test_multi_cast_cuda.py` has what holds for every tier; this is what is Triton's own.
"""

import itertools

import pytest
import torch

from autocast_backend import multi_cast
from autocast_backend.ops import KERNEL_TIER, _stochastic_cast, _unscale_cast, reference, triton
from autocast_backend.ops.triton import tables
from tests.ops.smart_cast_suite import assert_same, sample
from tests.ops.test_multi_cast_values import assert_same_numbers, patterns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KERNEL_TIER.devices["cuda"].name != "triton", reason="another tier's"),
]
ops = torch.ops.smart_autocast
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [f64, f32, f16, bf16]


def views(dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rest after a vector, from every place in one; a tensor of several tiles."""
    some = patterns(dtype)[:20_000].cuda()
    sizes = [*range(1, 18), 255, 256, 257, 4095, 4096, 4097, 9001]
    return [some[begin : begin + size] for begin in range(9) for size in sizes]


def test_kernels_are_registered() -> None:
    for name in triton.KERNELS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"smart_autocast::{name}", "CUDA")


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations([f32, f16, bf16], 2)))
def test_nans_too_are_those_of_pytorch(source: torch.dtype, target: torch.dtype) -> None:
    tensor = patterns(source).cuda()
    (result,) = ops.multi_cast.default([tensor], target)
    assert_same(result, tensor.to(target))


@pytest.mark.parametrize("target", [f16, bf16])
@pytest.mark.parametrize("source", DTYPES)
def test_cast_with_stats(source: torch.dtype, target: torch.dtype) -> None:
    everything = patterns(source).cuda()
    transposed = everything[:3600].view(60, 60).t()
    for tensor in (everything, everything[1:], everything[:7], transposed, transposed[::2]):
        result, stats = ops.cast_with_stats.default(tensor, target)
        wanted, counts = reference.cast_with_stats(tensor, target)
        assert_same_numbers(result, wanted)
        assert torch.equal(stats, counts)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_unscale_cast(source: torch.dtype, target: torch.dtype) -> None:
    everything = patterns(source).cuda()
    finite = everything[everything.to(target).isfinite()]
    for grads in ([everything], [finite, finite[3:5000]], views(source)):
        scale = torch.tensor(7.0, device="cuda")
        results, found = ops.unscale_cast.default(grads, scale, target)
        wanted, wanted_found = _unscale_cast.unscale_cast(grads, scale, target)
        assert_same(found, wanted_found)
        for result, other in zip(results, wanted, strict=True):
            assert_same_numbers(result, other)


@pytest.mark.parametrize("target", [bf16, f16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", DTYPES)
def test_stochastic_cast(source: torch.dtype, target: torch.dtype) -> None:
    tensors = [patterns(source).cuda(), *views(source), sample(torch.float8_e5m2, 9).cuda()]
    results = ops.stochastic_cast.default(tensors, target, -5, 2**32 - 9)
    wanted = _stochastic_cast.stochastic_cast(tensors, target, -5, 2**32 - 9)
    for result, other in zip(results, wanted, strict=True):
        assert_same_numbers(result, other)


def test_a_table_is_kept_for_the_same_tensors_on_the_same_stream() -> None:
    tensors = [sample(f32, 100 + i).cuda() for i in range(150)]
    out = [torch.empty_like(tensor, dtype=bf16) for tensor in tensors]
    tables._kept.cache_clear()
    for _ in range(3):
        multi_cast(tensors, bf16, out=out)
    assert tables._kept.cache_info().misses == 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        multi_cast(tensors, bf16, out=out)
    torch.cuda.synchronize()
    assert tables._kept.cache_info().misses == 2
    for tensor, result in zip(tensors, out, strict=True):
        assert torch.equal(result, tensor.bfloat16())


def test_all_ops_captured_in_a_graph() -> None:
    """A replay must write and read its own tables, whatever became of those kept since."""
    tensors = [torch.ones(100 + i, device="cuda") for i in range(150)]
    tensors += [tensor[1:] for tensor in tensors[:3]]
    scale = torch.tensor(2.0, device="cuda")

    def call() -> tuple[list[torch.Tensor], ...]:
        unscaled, found = ops.unscale_cast.default(tensors, scale, f32)
        cast, stats = ops.cast_with_stats.default(tensors[0], bf16)
        random = ops.stochastic_cast.default(tensors, bf16, 3, 0)
        return ops.multi_cast.default(tensors, f16), unscaled, random, [found, cast, stats]

    call()  # compiles: nothing can be loaded while a graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for i in range(2 * tables.TABLES_KEPT):
        ops.multi_cast.default([torch.zeros(7 + i, device="cuda")] * 160, f16)
    for i, tensor in enumerate(tensors[:150]):
        tensor.copy_(torch.randn_like(tensor) * i)
    tensors[70][5] = torch.inf
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for some, others in zip(results, call(), strict=True):
        for result, wanted in zip(some, others, strict=True):
            assert_same(result, wanted)
    assert results[3][0] == 1


def test_runs_on_the_device_of_its_tensors() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensors = [sample(f32, 5000).to("cuda:1"), sample(f32, 70).to("cuda:1")]
    scale = torch.tensor(2.0, device="cuda:1")
    results, found = ops.unscale_cast.default(tensors, scale, bf16)
    random = ops.stochastic_cast.default(tensors, bf16, 1, 0)
    _, stats = ops.cast_with_stats.default(tensors[0], bf16)
    assert torch.cuda.current_device() == 0
    assert {t.device.index for t in (*results, *random, found, stats)} == {1}
    wanted, _ = _unscale_cast.unscale_cast(tensors, scale, bf16)
    for result, other in zip(results, wanted, strict=True):
        assert_same(result, other)
