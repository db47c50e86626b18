"""`cast` on every device; the tests marked gpu are the CUDA kernel's."""

import itertools

import pytest
import torch

from autocast_backend.ops import KERNEL_TIER
from tests.ops.smart_cast_suite import DTYPES, FLOATS_WITH_GRAD, assert_same, bits, sample

cast = torch.ops.smart_autocast.cast.default
KERNEL_PAIRS = list(itertools.permutations([torch.float32, torch.float16, torch.bfloat16], 2))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_equals_to(source: torch.dtype, target: torch.dtype) -> None:
    tensor = sample(source, 3, 5)
    result = cast(tensor, target)
    assert_same(result, tensor.to(target))
    assert result.data_ptr() != tensor.data_ptr()  # functional: a new tensor, also without a cast


def test_shapes_and_strides() -> None:
    base = sample(torch.float32, 4, 6, 8)
    for tensor in (
        sample(torch.float32),
        sample(torch.float32, 0, 3),
        base.transpose(0, 2),
        base[:, ::2, 1:],
        sample(torch.float32, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    ):
        assert_same(cast(tensor, torch.bfloat16), tensor.to(torch.bfloat16))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS_WITH_GRAD, repeat=2)))
def test_gradient(source: torch.dtype, target: torch.dtype) -> None:
    tensor = sample(source, 3, 5).requires_grad_()
    grad = sample(target, 3, 5).flip(0)
    (actual,) = torch.autograd.grad(cast(tensor, target), tensor, grad)
    assert_same(actual, grad.to(source))


def test_no_gradient_through_integers() -> None:
    assert not cast(sample(torch.float32, 3).requires_grad_(), torch.int64).requires_grad


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    tensor = sample(torch.float32, 3, 5).requires_grad_(requires_grad)
    torch.library.opcheck(cast, (tensor, torch.bfloat16))
    torch.library.opcheck(cast, (tensor.t(), torch.float32))


def test_vmap() -> None:
    tensor = sample(torch.float32, 3, 5)
    result = torch.vmap(cast, in_dims=(1, None), out_dims=1)(tensor, torch.float16)
    assert_same(result, tensor.to(torch.float16))


def test_second_gradient() -> None:
    tensor = sample(torch.float32, 3).requires_grad_()
    (grad,) = torch.autograd.grad(
        cast(tensor, torch.float64).pow(3).sum(), tensor, create_graph=True
    )
    (second,) = torch.autograd.grad(grad.sum(), tensor)
    torch.testing.assert_close(second, 6 * tensor.detach())


def test_compile() -> None:
    torch.compiler.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        return cast(x, torch.bfloat16) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.float16):
        tensor = sample(dtype, 3, 5).requires_grad_()
        assert_same(compiled(tensor).detach(), function(tensor).detach())


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a 16-bit dtype; a million of float32, infinities and NaNs among them."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (2**20,), generator=generator, dtype=torch.int32)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 65520.0, 1e-40])
    return torch.cat([random.view(torch.float32), special])


@pytest.mark.gpu
@pytest.mark.skipif(KERNEL_TIER.name == "reference", reason="no kernel on the reference tier")
def test_cuda_kernel_is_registered() -> None:
    assert KERNEL_TIER.cuda_library is not None, KERNEL_TIER.cuda_reason
    assert torch._C._dispatch_has_kernel_for_dispatch_key("smart_autocast::cast", "CUDA")


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), KERNEL_PAIRS)
def test_cuda_every_value(source: torch.dtype, target: torch.dtype) -> None:
    tensor = every_pattern(source).cuda()
    assert_same(cast(tensor, target), tensor.to(target))


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), KERNEL_PAIRS)
def test_cuda_sizes_and_alignment(source: torch.dtype, target: torch.dtype) -> None:
    """Every remainder after the last whole vector, and views that begin inside of one."""
    base = sample(source, 5000).cuda()
    for offset, size in itertools.product(range(9), [0, 1, 7, 8, 9, 255, 256, 1024, 2049, 4991]):
        view = base[offset : offset + size]
        assert_same(cast(view, target), view.to(target))


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_cuda_other_dtypes_and_strides(source: torch.dtype, target: torch.dtype) -> None:
    tensor = sample(source, 4, 6).cuda()
    for view in (tensor, tensor.t(), tensor[:, ::2], tensor[:0], tensor[0, 0]):
        result = cast(view, target)
        assert_same(result, view.to(target))
        assert view.numel() == 0 or result.data_ptr() != view.data_ptr()


@pytest.mark.gpu
def test_cuda_gradient_and_opcheck() -> None:
    tensor = sample(torch.float32, 3, 5).cuda().requires_grad_()
    grad = sample(torch.bfloat16, 3, 5).cuda()
    (actual,) = torch.autograd.grad(cast(tensor, torch.bfloat16), tensor, grad)
    assert_same(actual, grad.float())
    torch.library.opcheck(cast, (tensor, torch.bfloat16))


@pytest.mark.gpu
def test_cuda_runs_on_the_current_stream() -> None:
    """On a side stream behind a long wait, the result is what the stream's earlier work wrote."""
    stream = torch.cuda.Stream()
    tensor = torch.zeros(2**20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        tensor.fill_(3)
        result = cast(tensor, torch.bfloat16)
    stream.synchronize()
    assert torch.equal(result, torch.full_like(result, 3))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    tensor = torch.ones(1000, device="cuda")
    cast(tensor, torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cast(tensor, torch.float16)
    tensor.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, torch.full_like(result, 5))


@pytest.mark.gpu
def test_cuda_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensor = sample(torch.float32, 1000).to("cuda:1")
    result = cast(tensor, torch.bfloat16)
    assert result.device == tensor.device
    assert_same(result, tensor.to(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda_more_elements_than_32_bits() -> None:
    size = 2**31 + 2**20 + 3
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    tensor = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    tensor[-5:] = torch.arange(5, device="cuda")
    tensor[2**31 - 2 : 2**31 + 2] = 7
    result = cast(tensor, torch.float16)
    assert torch.equal(bits(result[-5:]), bits(tensor[-5:].to(torch.float16)))
    assert torch.equal(result[2**31 - 2 : 2**31 + 2], torch.full_like(result[:4], 7))
    assert result.sum(dtype=torch.float64).item() == 10 + 28
