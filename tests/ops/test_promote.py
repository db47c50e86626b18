from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autocast_backend import promote
from tests.ops.smart_cast_suite import assert_same, sample

op = torch.ops.smart_autocast.promote.default
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
f8, i64, b8 = torch.float8_e4m3fn, torch.int64, torch.bool

# Dtypes in, dtypes out.
TABLE = [
    ([], []),
    ([f16], [f16]),
    ([bf16, bf16], [bf16, bf16]),
    ([f32, f32], [f32, f32]),
    ([f16, f32], [f32, f32]),
    ([f32, bf16, bf16], [f32, f32, f32]),
    ([f16, bf16], [f32, f32]),  # eager autocast raises
    ([bf16, f16, bf16], [f32, f32, f32]),
    ([f64], [f64]),
    ([f64, bf16], [f64, bf16]),
    ([f64, bf16, f32], [f64, f32, f32]),
    ([i64, b8], [i64, b8]),
    ([i64, f16, f32, b8], [i64, f32, f32, b8]),
    ([f8, f8], [f8, f8]),
    ([f8, bf16], [f32, f32]),
]


@pytest.fixture(params=["function", "op"])
def call(request: pytest.FixtureRequest) -> Any:
    return promote if request.param == "function" else op


def ids(case: Any) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in case[0]) or "empty"


@pytest.mark.parametrize("device_type", [None, "cpu"])
@pytest.mark.parametrize("case", TABLE, ids=ids)
def test_table(call: Any, case: Any, device_type: str | None) -> None:
    tensors = [sample(dtype, 3, 5) for dtype in case[0]]
    results = call(tensors, device_type=device_type)
    assert isinstance(results, list)
    assert [result.dtype for result in results] == case[1]
    for tensor, result in zip(tensors, results, strict=True):
        if tensor.dtype == result.dtype:
            assert result is tensor
        else:
            assert_same(result, tensor.to(result.dtype))


def test_tuple_in_list_out() -> None:
    tensors = (sample(f16, 3), sample(f32, 3))
    assert isinstance(promote(tensors), list)


def test_shapes_may_differ(call: Any) -> None:
    tensors = [sample(f16), sample(f32, 0, 3), sample(f16, 4, 6).t(), sample(f16, 8)[::2]]
    for tensor, result in zip(tensors, call(tensors), strict=True):
        assert_same(result, tensor.to(f32))


def test_device_types(call: Any) -> None:
    with FakeTensorMode():
        cuda, cpu = torch.empty(3, dtype=f16, device="cuda"), torch.empty((), dtype=f32)
        assert [t.dtype for t in call([cuda, cpu])] == [f32, f32]
        for device_type in ("cuda", "cpu"):  # each alone has one dtype: nothing to do
            results = call([cuda, cpu], device_type=device_type)
            assert results[0] is cuda
            assert results[1] is cpu
        results = call([cuda, cpu, cuda.float()], device_type="cuda")
        assert [(t.dtype, t.device.type) for t in results] == [
            (f32, "cuda"), (f32, "cpu"), (f32, "cuda")
        ]  # fmt: skip


def test_meta(call: Any) -> None:
    tensors = [torch.empty(3, dtype=dtype, device="meta") for dtype in (f16, f32, i64)]
    assert [t.dtype for t in call(tensors)] == [f32, f32, i64]


def test_inference_tensors(call: Any) -> None:
    with torch.inference_mode():
        tensors = [sample(f16, 3), sample(f32, 3)]
    assert_same(call(tensors)[0], tensors[0].to(f32))


def test_gradients_return_in_each_dtype(call: Any) -> None:
    tensors = [sample(dtype, 3, 5).requires_grad_() for dtype in (f16, bf16, f32, f64)]
    results = call(tensors)
    grads = [sample(result.dtype, 3, 5).flip(0) for result in results]
    for tensor, grad, actual in zip(
        tensors, grads, torch.autograd.grad(results, tensors, grads), strict=True
    ):
        assert_same(actual, grad.to(tensor.dtype))


def test_only_what_requires_grad_has_one(call: Any) -> None:
    results = call([sample(f16, 3).requires_grad_(), sample(bf16, 3), sample(f32, 3)])
    assert [result.requires_grad for result in results] == [True, False, False]


def total(a: torch.Tensor, b: torch.Tensor, call: Any) -> torch.Tensor:
    x, y = call([a, b])
    return (x * y).sum()


@pytest.mark.parametrize("dtypes", [(f16, f32), (f16, bf16), (bf16, bf16)])
def test_transforms(call: Any, dtypes: Any) -> None:
    a, b = (sample(dtype, 3, 5) for dtype in dtypes)
    grads = torch.func.grad(total, argnums=(0, 1))(a, b, call)
    assert tuple(grad.dtype for grad in grads) == dtypes
    rows = torch.vmap(torch.func.grad(total, argnums=(0, 1)), in_dims=(0, 0, None))(a, b, call)
    for row, grad in zip(rows, grads, strict=True):
        assert_same(row, grad)


def test_vmap_over_one_of_two(call: Any) -> None:
    a, b = sample(f16, 3, 5), sample(f32, 5)
    x, y = torch.vmap(lambda a, b: tuple(call([a, b])), in_dims=(0, None), out_dims=(0, None))(a, b)
    assert_same(x, a.to(f32))
    assert_same(y, b)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtypes", [(f16, f32), (f16, bf16, f64), (bf16, bf16)])
def test_opcheck(dtypes: Any, requires_grad: bool) -> None:
    tensors = [sample(dtype, 3, 5).requires_grad_(requires_grad) for dtype in dtypes]
    torch.library.opcheck(op, (tensors,), {"device_type": "cpu"})


def test_traces_to_casts_of_what_is_narrower(call: Any) -> None:
    graph = make_fx(lambda *tensors: call(tensors))(sample(f16, 3), sample(f32, 3), sample(f64, 3))
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [torch.ops.aten._to_copy.default]
    assert calls[0].kwargs == {"dtype": f32}


def test_compile(call: Any) -> None:
    torch.compiler.reset()

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat(call([a, b])) * 3

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        a, b = sample(f16, 3, 5).requires_grad_(), sample(f32, 2, 5).requires_grad_()
        result = run(a, b)
        result.sum().backward()
        results.append((result.detach(), a.grad, b.grad))
    for actual, expected in zip(*reversed(results), strict=True):
        assert_same(actual, expected)


def test_errors() -> None:
    tensor = sample(f32, 3)
    with pytest.raises(
        TypeError, match=r"must be a list or tuple of tensors, got Tensor; pass list"
    ):
        promote(tensor)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'tensors\[1\]' must be a torch.Tensor, got float"):
        promote([tensor, 1.0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"got 'gpu'. Expected one of cpu, cuda"):
        promote([tensor], device_type="gpu")
    with pytest.raises(RuntimeError, match=r"promote: argument 'tensors' .* got a sparse tensor"):
        promote([tensor, tensor.to_sparse()])
    with pytest.raises(RuntimeError, match="promote: argument 'device_type'"):
        op([tensor], device_type="gpu")
