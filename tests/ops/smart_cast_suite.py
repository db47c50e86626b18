"""What holds for every smart cast of one tensor; each op's test file says only its table.

The tables are written out by hand from autocast's rule: floating, not float64, not the target yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

FLOATS_WITH_GRAD = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [*FLOATS_WITH_GRAD, torch.float8_e4m3fn, torch.int64, torch.bool]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values around zero that every dtype here rounds differently."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape, strides and bits."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert torch.equal(bits(actual), bits(expected))


class SmartCastSuite:
    """Subclasses name the op and its table: what each of DTYPES becomes."""

    op: Any  # the OpOverload
    table: dict[torch.dtype, torch.dtype]

    @staticmethod
    def cast(tensor: torch.Tensor, *, device_type: str | None = None) -> torch.Tensor:
        """The public function."""
        raise NotImplementedError

    def call_op(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The op as torch.ops has it."""
        return self.op(tensor, **kwargs)

    def opcheck_args(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (tensor,)

    def casts(self, dtype: torch.dtype) -> bool:
        return self.table[dtype] != dtype

    @pytest.fixture(params=["function", "op"])
    def call(self, request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
        return self.cast if request.param == "function" else self.call_op

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("device_type", [None, "cpu"])
    def test_table(self, call: Any, dtype: torch.dtype, device_type: str | None) -> None:
        tensor = sample(dtype, 3, 5)
        result = call(tensor, device_type=device_type)
        assert result.dtype == self.table[dtype]
        if self.casts(dtype):
            assert_same(result, tensor.to(self.table[dtype]))
        else:
            assert result is tensor

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_other_device_types_go_through(self, call: Any, dtype: torch.dtype) -> None:
        tensor = sample(dtype, 3)
        assert call(tensor, device_type="cuda") is tensor

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_fake_cuda_tensors(self, call: Any, dtype: torch.dtype) -> None:
        with FakeTensorMode():
            tensor = torch.empty(2, 3, dtype=dtype, device="cuda")
            assert call(tensor, device_type="cpu") is tensor
            for device_type in (None, "cuda"):
                result = call(tensor, device_type=device_type)
                assert (result.dtype, result.device.type) == (self.table[dtype], "cuda")
                assert (result is tensor) == (not self.casts(dtype))

    @pytest.mark.parametrize("dtype", FLOATS_WITH_GRAD)
    def test_shapes_and_strides(self, call: Any, dtype: torch.dtype) -> None:
        base = sample(dtype, 4, 6, 8)
        for tensor in (
            sample(dtype),
            sample(dtype, 0, 3),
            base.transpose(0, 2),
            base[:, ::2, 1:],
            base[0, 0, 3:4].expand(5, 4),
            sample(dtype, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        ):
            assert_same(call(tensor), tensor.to(self.table[dtype]))

    @pytest.mark.parametrize("dtype", [torch.uint4, torch.int2, torch.bits8], ids=str)
    def test_dtypes_without_numbers_pass_through(self, call: Any, dtype: torch.dtype) -> None:
        tensor = torch.empty(2, dtype=dtype)
        assert call(tensor) is tensor

    def test_meta(self, call: Any) -> None:
        for dtype in DTYPES:
            tensor = torch.empty(2, 3, dtype=dtype, device="meta")
            result = call(tensor)
            assert (result.dtype, result.device.type) == (self.table[dtype], "meta")

    @pytest.mark.parametrize("dtype", FLOATS_WITH_GRAD)
    def test_gradient(self, call: Any, dtype: torch.dtype) -> None:
        tensor = sample(dtype, 3, 5).requires_grad_()
        result = call(tensor)
        grad = sample(result.dtype, 3, 5).flip(0)
        (actual,) = torch.autograd.grad(result, tensor, grad)
        assert_same(actual, grad.to(dtype))

    @pytest.mark.parametrize("dtype", FLOATS_WITH_GRAD)
    def test_func_grad(self, call: Any, dtype: torch.dtype) -> None:
        tensor = sample(dtype, 3, 5)
        actual = torch.func.grad(lambda x: call(x).double().square().sum())(tensor)
        expected = torch.func.grad(lambda x: x.to(self.table[dtype]).double().square().sum())
        assert_same(actual, expected(tensor))

    @pytest.mark.parametrize("dtype", FLOATS_WITH_GRAD)
    def test_func_jvp(self, call: Any, dtype: torch.dtype) -> None:
        tensor, tangent = sample(dtype, 3, 5), sample(dtype, 3, 5).flip(0)
        result, out_tangent = torch.func.jvp(call, (tensor,), (tangent,))
        assert_same(result, tensor.to(self.table[dtype]))
        assert_same(out_tangent, tangent.to(self.table[dtype]))

    @pytest.mark.parametrize("dtype", FLOATS_WITH_GRAD)
    def test_vmap(self, call: Any, dtype: torch.dtype) -> None:
        tensor = sample(dtype, 3, 5)
        for in_dim in (0, 1):
            result = torch.vmap(call, in_dims=in_dim, out_dims=in_dim)(tensor)
            assert_same(result.contiguous(), tensor.to(self.table[dtype]))

    @pytest.mark.parametrize("dtype", FLOATS_WITH_GRAD)
    def test_vmap_of_grad(self, call: Any, dtype: torch.dtype) -> None:
        tensor = sample(dtype, 3, 5)
        actual = torch.vmap(torch.func.grad(lambda x: call(x).double().square().sum()))(tensor)
        assert_same(actual, tensor.to(self.table[dtype]).double().mul(2).to(dtype))

    @pytest.mark.parametrize("requires_grad", [False, True])
    @pytest.mark.parametrize("dtype", FLOATS_WITH_GRAD)
    def test_opcheck(self, dtype: torch.dtype, requires_grad: bool) -> None:
        tensor = sample(dtype, 3, 5).requires_grad_(requires_grad)
        torch.library.opcheck(self.op, self.opcheck_args(tensor), {"device_type": "cpu"})

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_traces_to_one_cast(self, call: Any, dtype: torch.dtype) -> None:
        graph = make_fx(lambda x: call(x))(sample(dtype, 3, 5)).graph
        calls = [node for node in graph.nodes if node.op == "call_function"]
        expected = [torch.ops.aten._to_copy.default] if self.casts(dtype) else []
        assert [node.target for node in calls] == expected
        assert [node.kwargs for node in calls] == [{"dtype": self.table[dtype]}] * len(expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_compile(self, call: Any, dtype: torch.dtype) -> None:
        torch.compiler.reset()

        def function(x: torch.Tensor) -> torch.Tensor:
            return call(x) * 3

        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            tensor = sample(dtype, 3, 5).requires_grad_()
            result = run(tensor)
            result.sum().backward()
            results.append((result.detach(), tensor.grad))
        for actual, expected in zip(*reversed(results), strict=True):
            assert_same(actual, expected)

    def test_dynamo_writes_the_op(self) -> None:
        """The public function leaves one node in a Dynamo graph."""
        torch.compiler.reset()
        graphs: list[torch.fx.Graph] = []

        def backend(module: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(module.graph)
            return module.forward

        torch.compile(self.cast, fullgraph=True, backend=backend)(sample(torch.float32, 3))
        (graph,) = graphs
        assert [n.target for n in graph.nodes if n.op == "call_function"] == [self.op]

    def test_inference_tensors(self, call: Any) -> None:
        with torch.inference_mode():
            tensor = sample(torch.float32, 3, 5)
            inside = call(tensor)
        for result in (inside, call(tensor)):
            assert_same(result, tensor.to(self.table[torch.float32]))

    def test_same_storage_only_without_a_cast(self, call: Any) -> None:
        for dtype in FLOATS_WITH_GRAD:
            tensor = sample(dtype, 3)
            assert (call(tensor).data_ptr() == tensor.data_ptr()) == (not self.casts(dtype))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda x: x.to_sparse(), r"got a sparse tensor; pass tensor.to_dense\(\)"),
            (lambda x: x.to_sparse_csr(), "got a sparse tensor"),
            (lambda x: x.to_sparse_csc(), "got a sparse tensor"),
            (lambda x: x.to_sparse_bsr((1, 1)), "got a sparse tensor"),
            (lambda x: x.to_sparse_bsc((1, 1)), "got a sparse tensor"),
            (lambda x: x.to(torch.complex64), "got a complex tensor; cast torch.view_as_real"),
            pytest.param(
                lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
                r"got a quantized tensor; call tensor.dequantize\(\)",
                marks=pytest.mark.skipif(
                    not hasattr(torch, "quantize_per_tensor"),
                    reason="PyTorch is about to remove quantized tensors (pytorch/pytorch#184982)",
                ),
            ),
        ],
        ids=["coo", "csr", "csc", "bsr", "bsc", "complex", "quantized"],
    )
    @pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:Sparse CSR")
    def test_unsupported_tensors(self, call: Any, make: Any, message: str) -> None:
        expected = f"{self.op._opname}: argument 'self' must be a dense tensor.*{message}"
        with pytest.raises(RuntimeError, match=expected):
            call(make(sample(torch.float32, 3, 5)))

    def test_none_is_no_tensor(self) -> None:
        """PyTorch hands it to the op as an undefined tensor, or as it is."""
        with pytest.raises(RuntimeError, match=r"argument 'self' must be a dense .* got None"):
            self.call_op(None)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e5m2fnuz", "e4m3fnuz", "e8m0fnu"])
    def test_every_float8(self, call: Any, name: str) -> None:
        eighth = torch.tensor([0.125, 2.0]).to(getattr(torch, f"float8_{name}"))
        assert_same(call(eighth), torch.tensor([0.125, 2.0], dtype=self.table[torch.float8_e4m3fn]))

    def test_what_pytorch_does_not_cast(self, call: Any) -> None:
        """An error where there is something to cast, the tensor itself where there is not."""
        packed = torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        with pytest.raises(RuntimeError, match=r"'self' must be a dense .* got a float4"):
            call(packed)
        assert call(packed, device_type="cuda") is packed

    def test_bad_arguments(self) -> None:
        tensor = sample(torch.float32, 3)
        with pytest.raises(TypeError, match=r"'tensor' must be a torch.Tensor, got list"):
            self.cast([1.0])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"'device_type' must be .*, got device; pass"):
            self.cast(tensor, device_type=torch.device("cpu"))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"'device_type' must be .*, got list; pass"):
            self.cast(tensor, device_type=["cpu"])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"got 'gpu'. Expected one of cpu, cuda"):
            self.cast(tensor, device_type="gpu")
        with pytest.raises(ValueError, match=r"got 'cuda:0'; leave out the index: 'cuda'"):
            self.cast(tensor, device_type="cuda:0")

    @pytest.mark.parametrize("device_type", ["gpu", "cpu:0", ""])
    def test_bad_device_type_to_the_op(self, device_type: str) -> None:
        expected = f"{self.op._opname}: argument 'device_type' must be .*, got '{device_type}'"
        with pytest.raises(RuntimeError, match=expected):
            self.call_op(sample(torch.float32, 3), device_type=device_type)
