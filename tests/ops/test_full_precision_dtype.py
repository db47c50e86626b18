import pytest
import torch
from functorch.compile import aot_function, nop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.ops.smart_cast_suite import DTYPES, assert_same, sample

full_precision_dtype = torch.ops.smart_autocast.full_precision_dtype.default
# PyTorch hands a ScalarType that an op returns to Python as its number; ops take it back as dtype.
FLOAT32, FLOAT64 = 6, 7
TABLE = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT32,
    torch.bfloat16: FLOAT32,
    torch.float64: None,
    torch.float8_e4m3fn: FLOAT32,
    torch.int64: None,
    torch.bool: None,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_table(dtype: torch.dtype) -> None:
    tensor = sample(dtype, 3)
    assert full_precision_dtype(tensor) == TABLE[dtype]
    assert full_precision_dtype(tensor, device_type="cpu") == TABLE[dtype]
    assert full_precision_dtype(tensor, device_type="cuda") is None
    assert full_precision_dtype(tensor, torch.float64) == FLOAT64
    assert full_precision_dtype(tensor, torch.float64, device_type="cuda") == FLOAT64


def test_fake_cuda_tensors() -> None:
    with FakeTensorMode():
        tensor = torch.empty(3, dtype=torch.float16, device="cuda")
        assert full_precision_dtype(tensor, device_type="cuda") == FLOAT32
        assert full_precision_dtype(tensor, device_type="cpu") is None


def softmax(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.softmax.int(tensor, -1, full_precision_dtype(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_as_the_dtype_argument_of_an_op(dtype: torch.dtype) -> None:
    """One graph, no dtype in it: what eager autocast's fp32_set_opt_dtype gives for each."""
    tensor = sample(dtype, 3, 5).requires_grad_()
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    results = []
    for run in (softmax, lambda x: torch.softmax(x, -1, dtype=wanted)):
        result = run(tensor)
        (grad,) = torch.autograd.grad(result, tensor, sample(wanted, 3, 5).flip(0))
        results.append((result.detach(), grad))
    for actual, expected in zip(*results, strict=True):
        assert_same(actual, expected)


def test_vmap_and_func_grad() -> None:
    tensor = sample(torch.bfloat16, 3, 5)
    assert_same(torch.vmap(softmax)(tensor), softmax(tensor))
    grad = torch.func.grad(lambda x: softmax(x)[0, 0])(tensor)
    assert grad.dtype == torch.bfloat16


def test_leaves_no_trace() -> None:
    graph = make_fx(softmax)(sample(torch.bfloat16, 3, 5)).graph
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    assert not any("full_precision_dtype" in str(target) for target in targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aot_autograd(dtype: torch.dtype) -> None:
    """Lowered graphs hold this op when AOTAutograd traces them; Dynamo itself never meets it."""
    results = []
    for run in (aot_function(softmax, nop), softmax):
        tensor = sample(dtype, 3, 5).requires_grad_()
        result = run(tensor)
        result.square().sum().backward()
        results.append((result.detach(), tensor.grad))
    for actual, expected in zip(*results, strict=True):
        assert_same(actual, expected)


def test_errors() -> None:
    with pytest.raises(RuntimeError, match=r"full_precision_dtype: .* got a complex tensor"):
        full_precision_dtype(sample(torch.float32, 3).to(torch.complex64))
    with pytest.raises(RuntimeError, match="full_precision_dtype: argument 'device_type'"):
        full_precision_dtype(sample(torch.float32, 3), device_type="gpu")
