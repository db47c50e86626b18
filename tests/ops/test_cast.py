"""`cast`: one tensor, by aten::to on every device."""

import itertools

import pytest
import torch

import autocast_backend.ops  # noqa: F401 - registers the op
from tests.ops.smart_cast_suite import DTYPES, FLOATS_WITH_GRAD, assert_same, sample

cast = torch.ops.smart_autocast.cast.default


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


def test_func_grad() -> None:
    tensor = sample(torch.float32, 3, 5)
    grad = torch.func.grad(lambda x: cast(x, torch.bfloat16).sum())(tensor)
    assert_same(grad, torch.ones_like(tensor))


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_cuda(source: torch.dtype, target: torch.dtype) -> None:
    tensor = sample(source, 4, 6).cuda()
    for view in (tensor, tensor.t(), tensor[:, ::2], tensor[:0], tensor[0, 0]):
        result = cast(view, target)
        assert_same(result, view.to(target, copy=True))
        assert view.numel() == 0 or result.data_ptr() != view.data_ptr()
