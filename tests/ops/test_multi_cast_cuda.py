"""`multi_cast` on a GPU: the kernel, and all that has to do with devices and streams."""

import itertools
import os

import pytest
import torch

from autocast_backend import multi_cast
from autocast_backend.ops import KERNEL_TIER
from tests.ops.smart_cast_suite import DTYPES, assert_same, sample
from tests.ops.test_multi_cast_values import assert_same_numbers, patterns

pytestmark = pytest.mark.gpu
op = torch.ops.smart_autocast.multi_cast.default
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KERNEL_DTYPES = [f64, f32, f16, bf16, torch.float8_e4m3fn, torch.float8_e5m2]


def assert_casts(tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Into new tensors, and into given ones."""
    out = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    multi_cast(tensors, dtype, out=out)
    wanted = [tensor.to(dtype, copy=True) for tensor in tensors]
    for results in (multi_cast(tensors, dtype), out):
        for result, other in zip(results, wanted, strict=True):
            assert (result.shape, result.stride()) == (other.shape, other.stride())
            assert result.device == other.device
        assert_same_numbers(end_to_end(results), end_to_end(wanted))


def end_to_end(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their elements in one tensor: to compare many small ones takes long, and longer yet where
    compute-sanitizer looks at each that is made for it."""
    data = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    return data.view(tensors[0].dtype)


@pytest.mark.skipif(
    os.environ.get("SMART_AUTOCAST_KERNELS") == "reference", reason="no kernel on that tier"
)
def test_kernel_is_registered() -> None:
    tier = KERNEL_TIER.devices["cuda"]
    wanted = os.environ.get("SMART_AUTOCAST_KERNELS")
    assert tier.name in ((wanted,) if wanted else ("native", "triton")), tier.reason
    for name in ("multi_cast", "multi_cast.out"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"smart_autocast::{name}", "CUDA")


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(KERNEL_DTYPES, KERNEL_DTYPES))
)
def test_every_value(source: torch.dtype, target: torch.dtype) -> None:
    tensor = patterns(source).cuda()
    (result,) = op([tensor], target)
    assert_same_numbers(result, tensor.to(target, copy=True))


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(KERNEL_DTYPES, KERNEL_DTYPES))
)
def test_sizes_and_alignment(source: torch.dtype, target: torch.dtype) -> None:
    """Every rest after the last whole vector, views that begin inside of one, chunks that end
    inside of a tensor; nothing is written beside them."""
    some = patterns(source)
    some = some.repeat(-(-9000 // some.numel()))[:9000].cuda()  # float8 has 256 of them
    assert some.numel() == 9000
    sizes = [*range(18), 255, 256, 257, 2047, 2048, 2049, 8191, 8193]
    views = [some[o : o + n] for o in range(9) for n in sizes]
    assert_casts(views, target)
    begins = list(itertools.accumulate((view.numel() + 9 for view in views), initial=3))
    found, wanted = (torch.zeros(begins[-1], dtype=target, device="cuda") for _ in range(2))
    places = [
        slice(begin, begin + view.numel()) for begin, view in zip(begins[:-1], views, strict=True)
    ]
    multi_cast(views, target, out=[found[place] for place in places])
    for view, place in zip(views, places, strict=True):
        wanted[place] = view.to(target)
    assert_same_numbers(found, wanted)


def test_mixtures() -> None:
    tensors = [sample(dtype, 4, 6).cuda() for dtype in [*DTYPES, torch.float8_e5m2]]
    tensors += [view for t in tensors for view in (t.t(), t[:, ::2], t[:0], t[0, 0])]
    for target in KERNEL_DTYPES:
        assert_casts(tensors, target)


@pytest.mark.parametrize("count", [1, 168, 169, 1360, 1361, 3000])
def test_tables_of_every_size(count: int) -> None:
    assert_casts([torch.full((1 + i % 40,), float(i), device="cuda") for i in range(count)], bf16)


def test_large_and_small_tensors_in_one_list() -> None:
    pool = patterns(f32)[: 2**16].cuda().repeat(600)  # 39 million
    assert_casts([pool[:3], pool, pool[5:1000], pool[1:]], bf16)


def test_one_launch_for_the_tensors_of_a_model() -> None:
    tensors = [torch.ones(1 + i, device="cuda") for i in range(148)]
    out = [torch.empty_like(tensor, dtype=bf16) for tensor in tensors]
    multi_cast(tensors, bf16, out=out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        multi_cast(tensors, bf16, out=out)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "multi_cast_kernel" in event.name]
    assert len(kernels) == 1
    assert not any("Memcpy" in event.name for event in profile.events())


@pytest.mark.parametrize(("source", "target"), [(f32, bf16), (bf16, f32)])
def test_one_large_tensor_is_cast_by_the_faster_kernel(
    source: torch.dtype, target: torch.dtype
) -> None:
    """PyTorch's is as fast as memory to narrower dtypes, and half as fast to wider ones."""
    tensor = sample(source, 2**21).cuda()
    multi_cast([tensor], target)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        (result,) = multi_cast([tensor], target)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "multi_cast_kernel" in event.name]
    assert len(kernels) == (0 if source is f32 else KERNEL_TIER.devices["cuda"].name != "reference")
    assert_same(result, tensor.to(target))


def test_few_tensors_with_gradients_are_cast_one_by_one() -> None:
    """As more of them are, without a list in between; but never from two devices."""
    tensors = [sample(f32, 3, 5).cuda().requires_grad_() for _ in range(3)]
    results = multi_cast(tensors, bf16)
    for result, tensor in zip(results, tensors, strict=True):
        assert_same(result, tensor.bfloat16())
    torch.stack(results).float().sum().backward()
    assert all(torch.equal(t.grad, torch.ones_like(t)) for t in tensors)
    elsewhere = sample(f32, 3, 5).requires_grad_()
    with pytest.raises(RuntimeError, match="'tensors' must hold tensors on one device"):
        multi_cast([*tensors, elsewhere], bf16)
    with pytest.raises(RuntimeError, match="'tensors' must hold tensors on one device"):
        multi_cast([elsewhere, *tensors], bf16)


def test_gradients_and_opcheck() -> None:
    tensors = [sample(f32, 3, 5).cuda().requires_grad_(), sample(f16, 4).cuda()]
    results = multi_cast(tensors, bf16)
    assert [result.requires_grad for result in results] == [True, False]
    grad = sample(bf16, 3, 5).cuda()
    (actual,) = torch.autograd.grad(results[0], tensors[0], grad)
    assert_same(actual, grad.float())
    torch.library.opcheck(op, (tensors, bf16))


def test_runs_on_the_current_stream() -> None:
    """On a side stream behind a long wait, the result is what the stream's earlier work wrote."""
    stream = torch.cuda.Stream()
    tensor = torch.zeros(2**20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        tensor.fill_(3)
        (result,) = op([tensor], bf16)
    stream.synchronize()
    assert torch.equal(result, torch.full_like(result, 3))


def test_captured_in_a_graph() -> None:
    """The table must be part of the graph: the one of the call is gone when it is replayed."""
    tensors = [torch.ones(100 + i, device="cuda") for i in range(200)]
    multi_cast(tensors, f16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = multi_cast(tensors, f16)
    others = [torch.zeros(7, device="cuda") for _ in range(300)]
    multi_cast(others, f16)  # another table
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert torch.equal(result, torch.full_like(result, i))


@pytest.mark.slow
def test_in_a_cuda_graph_of_inductor() -> None:
    """Which is warmed up first, with memory that nothing may keep."""
    tensors = [sample(f32, 100 + i).cuda() for i in range(150)]
    torch.compiler.reset()
    compiled = torch.compile(lambda: multi_cast(tensors, bf16), mode="reduce-overhead")
    for _ in range(4):
        for result, tensor in zip(compiled(), tensors, strict=True):
            assert torch.equal(result, tensor.bfloat16())
        for tensor in tensors:
            tensor.mul_(1.5)


def test_whatever_the_default_device_is() -> None:
    tensors = [sample(f32, 3, 5).cuda(), sample(f16, 4).cuda()]
    with torch.device("cuda"):
        assert_casts(tensors, bf16)
        assert_casts(tensors, torch.float8_e4m3fn)
    with torch.device("meta"):
        assert_casts([*tensors, tensors[0]], bf16)


def test_errors() -> None:
    tensor = sample(f32, 8).cuda()
    with pytest.raises(RuntimeError, match="'tensors' must hold tensors on one device"):
        multi_cast([tensor, sample(f32, 3)], bf16)
    out = torch.empty(8, dtype=bf16, device="cuda")
    with pytest.raises(RuntimeError, match="'out' must not overlap"):
        multi_cast([tensor, tensor], bf16, out=[out, out])
    with pytest.raises(RuntimeError, match=r"'out\[0\]' must be on the device of 'tensors'"):
        multi_cast([sample(f32, 8)], bf16, out=[out])


def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensors = [sample(f32, 1000).to("cuda:1"), sample(f16, 7).to("cuda:1")]
    assert_casts(tensors, bf16)
    with pytest.raises(RuntimeError, match="'tensors' must hold tensors on one device"):
        multi_cast([*tensors, tensors[0].to("cuda:0")], bf16)


@pytest.mark.slow
def test_more_elements_than_32_bits() -> None:
    size = 2**31 + 2**20 + 3
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    tensor = torch.zeros(size, dtype=bf16, device="cuda")
    tensor[-5:] = torch.arange(5, device="cuda")
    tensor[2**31 - 2 : 2**31 + 2] = 7
    (result,) = op([tensor], f16)
    assert torch.equal(result[-5:], tensor[-5:].to(f16))
    assert torch.equal(result[2**31 - 2 : 2**31 + 2], torch.full_like(result[:4], 7))
    assert result.sum(dtype=f64).item() == 10 + 28
