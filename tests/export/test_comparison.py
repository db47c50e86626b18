"""The comparison table of docs/export.md, one test a row: torch's region pass, which `torch.export`
runs, TorchScript's autocast pass, and ours."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._export.serde.serialize import SerializeError
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

import autocast_backend.export
from autocast_backend._torch.autocast import enter_autocast, wrap_with_autocast
from autocast_backend.graphs import nodes_of
from autocast_backend.regions import hops_to_regions, regions_to_hops
from tests.export.support import dtypes, save_and_load
from tests.support import assert_same_bits, targets

BF16, FP16, FULL = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _jit_autocast() -> Iterator[None]:
    before = torch._C._jit_set_autocast_mode(True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)
        yield
    torch._C._jit_set_autocast_mode(before)


class Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def exported(function: Callable[..., Any], *inputs: Any) -> ExportedProgram:
    return torch.export.export(Module(function), inputs)


def ours(program: ExportedProgram) -> Any:
    return autocast_backend.export.module(autocast_backend.export.lower(program))


def calls(program: ExportedProgram, target: Any) -> int:
    return sum(n.target is target for n in nodes_of(program.graph_module))


def product(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(a, a)


def test_casts_in_the_graph() -> None:
    program = exported(product, X)
    assert targets(program.graph_module) == ["wrap_with_autocast", "getitem", "mm.default"]
    scripted = torch.jit.script(product)
    scripted(X)
    assert "aten::_autocast_to_reduced_precision" in str(scripted.graph_for(X))
    lowered = autocast_backend.export.lower(program)
    assert targets(lowered.graph_module)[:1] == ["autocast_to_bf16.default"]
    assert calls(lowered, wrap_with_autocast) == 0


def test_float16_under_bfloat16_autocast() -> None:
    """Eager autocast casts float16 to bfloat16. TorchScript casts float32 alone."""
    half = X.half()
    expected = product(half)
    assert expected.dtype is BF16
    program = exported(product, X)
    assert_same_bits(program.module()(half), expected)
    assert torch.jit.script(product)(half).dtype is FP16
    assert_same_bits(ours(program)(half), expected)


def widened(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(a.float(), a.float())


def test_other_dtypes_where_the_model_casts() -> None:
    expected = widened(X.half())
    program = exported(widened, X)
    with pytest.raises(RuntimeError, match="Tensor dtype mismatch!"):
        program.module()(X.half())
    assert_same_bits(torch.jit.script(widened)(X.half()), expected)
    assert_same_bits(ours(program)(X.half()), expected)


def many_ops(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = a[None]
        return (
            torch.mm(a, a),
            torch.einsum("ij,jk->ik", a, a),
            F.scaled_dot_product_attention(b, b, b),
            torch.mm(a, a) + 1,
            F.mse_loss(a, a),
        )


def padded(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.pad(a, (1, 1), "reflect")


def test_which_ops_it_knows() -> None:
    """TorchScript's pass has a list of its own, without composites and newer ops, and with rules
    for CUDA that it applies on the CPU: an addition in float32."""
    expected = many_ops(X)
    assert dtypes(expected) == [BF16, BF16, BF16, BF16, FULL]
    program = exported(many_ops, X)
    assert_same_bits(program.module()(X), expected)
    assert dtypes(torch.jit.script(many_ops)(X)) == [BF16, FULL, FULL, FULL, FULL]
    assert_same_bits(ours(program)(X), expected)

    program = exported(padded, X.bfloat16())
    assert dtypes(padded(X.bfloat16())) == dtypes(program.module()(X.bfloat16())) == [FULL]
    assert dtypes(torch.jit.script(padded)(X.bfloat16())) == [BF16]
    assert dtypes(ours(program)(X.bfloat16())) == [FULL]


def nested(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.mm(a, a)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            y = torch.mm(a, a)
            with torch.autocast("cpu", dtype=torch.float16):
                z = torch.mm(a, a)
    return x, y, z


def test_nested_regions() -> None:
    expected = nested(X)
    program = exported(nested, X)
    assert calls(program, wrap_with_autocast) == 3
    for run in (program.module(), torch.jit.script(nested), ours(program)):
        assert_same_bits(run(X), expected)


def no_change(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = torch.mm(a, a)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(b, b)


def test_a_region_that_changes_nothing() -> None:
    program = exported(no_change, X)
    assert calls(program, wrap_with_autocast) == 2
    scripted = torch.jit.script(no_change)
    scripted(X)
    assert str(scripted.graph_for(X)).count("prim::Enter") == 2
    flat, _ = hops_to_regions(program.graph_module)
    hops, _ = regions_to_hops(flat)
    assert sum(n.target is wrap_with_autocast for n in nodes_of(hops)) == 1


def side_effect(a: Tensor, seen: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.add_(torch.mm(a, a))
    return a + 1


def idle(a: Tensor, seen: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pass
    return a + 1


@pytest.mark.parametrize("function", [idle, side_effect])
def test_a_region_without_results(function: Callable[..., Any]) -> None:
    def run(call: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        seen = torch.zeros(4, 4)
        return call(X, seen), seen

    program = exported(function, X, torch.zeros(4, 4))
    with pytest.raises(SpecViolationError, match="missing val"):
        save_and_load(program)
    assert_same_bits(run(torch.jit.script(function)), run(function))
    lowered = save_and_load(autocast_backend.export.lower(program))
    assert_same_bits(run(lowered.module()), run(function))


def branches(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cond(
            a.sum() > 0, lambda t: torch.mm(t, t), lambda t: torch.mm(t, t).relu(), (a,)
        )


def branches_of_torchscript(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(a, a) if bool(a.sum() > 0) else torch.mm(a, a).relu()


def test_a_region_around_branches() -> None:
    program = exported(branches, X)
    assert calls(program, enter_autocast) == 1
    with pytest.raises((AssertionError, SerializeError), match="_enter_autocast"):
        torch.export.save(program, io.BytesIO())
    lowered = save_and_load(autocast_backend.export.lower(program))
    for x in (X.abs(), -X.abs()):
        expected = branches_of_torchscript(x)
        assert_same_bits(torch.jit.script(branches_of_torchscript)(x), expected)
        assert_same_bits(lowered.module()(x), expected)


def test_a_region_inside_a_branch() -> None:
    def function(a: Tensor) -> Tensor:
        return torch.cond(a.sum() > 0, product, lambda t: torch.mm(t, t).to(BF16), (a,))

    def scripted(a: Tensor) -> Tensor:
        if bool(a.sum() > 0):
            return product(a)
        return torch.mm(a, a).to(torch.bfloat16)

    program = exported(function, X)
    for sign in (1.0, -1.0):
        x = X.abs() * sign
        expected = scripted(x)
        for run in (program.module(), torch.jit.script(scripted), ours(program)):
            assert_same_bits(run(x), expected)


def switched(a: Tensor, on: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        return torch.mm(a, a)


def test_a_switch_that_is_an_argument() -> None:
    """Export writes down the value it was given, and checks that it is given again."""
    program = exported(switched, X, True)
    for run in (program.module(), ours(program)):
        assert_same_bits(run(X, True), product(X))
        with pytest.raises(AssertionError, match="Guard failed"):
            run(X, False)
    with pytest.raises(RuntimeError, match="must be a constant"):
        torch.jit.script(switched)(X, True)


def twice(a: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(torch.mm(a, w).relu(), w)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, a: Tensor) -> Tensor:
        return twice(a, self.weight)


def test_gradients_of_a_weight_used_twice() -> None:
    """Bits of the gradient under eager autocast, which casts the weight once."""

    def gradient(run: Callable[..., Tensor], *parameters: nn.Parameter) -> Tensor:
        run(X).float().square().sum().backward()
        return parameters[0].grad

    model = Twice()
    expected = gradient(model, model.weight)
    program = torch.export.export(Twice(), (X,))
    stock, lowered, scripted = program.module(), ours(program), torch.jit.script(Twice())
    assert not torch.equal(gradient(stock, *stock.parameters()), expected)
    assert_same_bits(gradient(scripted, *scripted.parameters()), expected)
    assert_same_bits(gradient(lowered, *lowered.parameters()), expected)


def log_on_cuda(a: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return torch.log(a)


def log_on_cpu(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.log(a)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what export does without a GPU")
def test_policies_of_cuda_without_a_gpu() -> None:
    """`log` runs in float32 on CUDA alone. `torch.autocast("cuda")` switches itself off where there
    is no GPU, and so it is exported; TorchScript's casts ask each tensor for its device."""
    with pytest.warns(UserWarning, match="CUDA is not available"):
        program = exported(log_on_cuda, X.abs())
    (call,) = [n for n in nodes_of(program.graph_module) if n.target is wrap_with_autocast]
    assert call.args[:3] == ("cuda", FP16, False)
    scripted = torch.jit.script(log_on_cuda)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted(X.abs())
        assert "aten::_autocast_to_full_precision" in str(scripted.graph_for(X.abs()))
    program = exported(log_on_cpu, X.abs())
    assert dtypes(ours(program)(X.abs().half())) == [FP16]
    lowered = autocast_backend.export.lower(program, device_type="cuda")
    assert dtypes(autocast_backend.export.module(lowered)(X.abs().half())) == [FULL]


def partly_without_grad(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            y = torch.mm(a, w)
        z = torch.mm(y, w)
    return y, z


def test_no_grad_inside_a_region() -> None:
    """Export's passes lose it, TorchScript lets it reach to the end of the region. The region pass
    keeps it, but a program that was exported has lost it before."""

    def grads(run: Callable[..., Any]) -> list[bool]:
        return [t.requires_grad for t in run(X, nn.Parameter(torch.ones(4, 4)))]

    assert grads(partly_without_grad) == [False, True]

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, a: Tensor) -> Any:
            return partly_without_grad(a, self.weight)

    program = torch.export.export(Partly(), (X,))
    for module in (program.module(), ours(program)):
        assert [t.requires_grad for t in module(X)] == [True, True]
    assert grads(torch.jit.script(partly_without_grad)) == [False, False]
    graph = make_fx(partly_without_grad, pre_dispatch=True)(X, nn.Parameter(torch.ones(4, 4)))
    assert grads(regions_to_hops(graph)[0]) == [False, True]
