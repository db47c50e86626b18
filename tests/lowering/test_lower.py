"""The lowering pass: the nodes it writes, what it leaves alone, and what it refuses to claim."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import autocast_backend
from autocast_backend import AutocastState, lower_autocast
from autocast_backend.regions import RegionError
from autocast_backend.validation import verdicts as verdict_store
from tests.support import (
    BF16,
    FP16,
    assert_same_bits,
    capture,
    graph_of,
    lower_with_report,
    targets,
)

CPU_BF16 = AutocastState.of(BF16)


@pytest.fixture(autouse=True)
def _fresh_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask validation every question anew, whatever earlier runs left in memory and on disk."""
    monkeypatch.setattr(verdict_store, "compile_cache_dir", lambda: None)
    verdict_store.forget()


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.cat([self.down(F.gelu(self.up(x))), x])


def test_a_region_becomes_smart_casts() -> None:
    """Before: enter, linear, gelu, linear, cat, exit. After: no region, no dtype, casts before each
    policy op, `gelu` untouched."""
    lowered = lower_autocast(capture(TwoLayers(), torch.randn(4, 8)))
    assert targets(lowered) == [
        *["autocast_to_bf16.default"] * 3,
        "linear",
        "gelu",
        *["autocast_to_bf16.default"] * 3,
        "linear",
        "promote.default",
        "getitem",
        "getitem",
        "cat",
    ]
    dtypes = [a for n in lowered.graph.nodes for a in n.args if isinstance(a, torch.dtype)]
    assert dtypes == []


@pytest.mark.parametrize("region", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_lowered_graph_serves_every_dtype(region: dict, given: torch.dtype) -> None:
    """One graph, captured once with float32, run with other dtypes: eager autocast's dtypes and
    values for each."""

    def function(
        b: torch.Tensor, x: torch.Tensor, w: torch.Tensor, with_cat: bool = True
    ) -> list[torch.Tensor]:
        h = torch.addmm(b, x, w)  # Dynamo's graph takes its inputs in the order of their use
        out = [h, h.relu() @ w, F.softmax(h, -1), F.mse_loss(h, x), x.sum()]
        return [*out, torch.cat([x, w])] if with_cat else out

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 8, generator=generator) for _ in range(3)]
    lowered = lower_autocast(capture_under(region, function, *inputs), ambient=region)
    cast = [t.to(given) for t in inputs]
    actual = list(lowered(*cast))
    if given in (torch.bfloat16, torch.float16) and given is not region["dtype"]:
        # Eager refuses to promote the other low-precision dtype; the smart cast takes it.
        cat = actual.pop(CAT)
        assert cat.dtype is given
    with torch.autocast(**region):
        assert_same_bits(actual, function(*cast, with_cat=len(actual) > CAT))


class PaddedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(self.layer(x)[None], (1, 1), mode="reflect")  # float32 under autocast


def _mse(x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, x + 1, weight=x.abs())


def _pooled(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool3d(x, 2, return_indices=True)[0]


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("call", [_mse, _pooled])
def test_a_call_that_is_not_the_op_of_its_name_serves_every_dtype(
    call: Any, given: torch.dtype
) -> None:
    """With float32 arguments, the casts to float32 that the ops have are none, and look right."""

    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return call(x)

    x = torch.randn(2, 4, 4, 4)
    lowered = lower_autocast(capture(region, x))
    assert_same_bits(lowered(x.to(given))[0], region(x.to(given)))


def test_an_ambient_state_that_the_graph_was_not_captured_under() -> None:
    """What autocast does to a call follows from the dtypes that it gets there."""
    model, x = PaddedLayer(), torch.randn(4, 8)
    exported = torch.export.export(model, (x,)).graph_module
    lowered = lower_autocast(exported, ambient=BF16)
    with torch.autocast(**BF16):
        assert_same_bits(lowered(*model.parameters(), x)[0], model(x))
    *_, padded, _ = lowered.graph.nodes
    assert padded.meta["val"].dtype is torch.float32


CAT = 5  # the position of `torch.cat` among the outputs of the function above


def capture_under(region: dict, function: Any, *inputs: Any) -> fx.GraphModule:
    with torch.autocast(**region):
        return capture(function, *inputs)


def test_lower_autocast_leaves_its_argument_alone() -> None:
    graph = capture(TwoLayers(), torch.randn(4, 8))
    before = targets(graph)
    lower_autocast(graph)
    assert targets(graph) == before
    assert "_enter_autocast" in before


def test_a_weight_is_cast_once_per_region_and_an_activation_at_each_use() -> None:
    """As eager's cache does: gradients of all uses of a weight add up in the lower precision."""
    weight = nn.Parameter(torch.randn(8, 8))

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = x @ weight + x @ weight
        with torch.autocast(**BF16):
            return y + x @ weight

    calls = targets(lower_autocast(capture(function, torch.randn(8, 8))))
    assert calls.count("autocast_to_bf16.default") == 3 + 2


def test_without_the_weight_cache_every_use_is_cast() -> None:
    weight = nn.Parameter(torch.randn(8, 8))

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16, cache_enabled=False):
            return x @ weight + x @ weight

    calls = targets(lower_autocast(capture(function, torch.randn(8, 8))))
    assert calls.count("autocast_to_bf16.default") == 4


def test_a_disabled_region_inside_is_left_alone() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = x @ x
            with torch.autocast("cpu", enabled=False):
                return y.float() @ x

    calls = targets(lower_autocast(capture(function, torch.randn(8, 8))))
    assert calls == ["autocast_to_bf16.default"] * 2 + ["matmul", "float", "matmul"]


def test_the_body_of_a_checkpoint_is_lowered_in_its_scope() -> None:
    layer = nn.Linear(8, 8)

    def function(x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            return checkpoint(lambda v: layer(v).sin(), x, use_reentrant=False)

    lowered = lower_autocast(capture(function, torch.randn(8, 8)))
    assert targets(lowered) == [
        "tag_activation_checkpoint",
        "getitem",
        *["autocast_to_bf16.default"] * 3,
        "linear",
        "sin",
    ]


def test_the_forward_of_an_autograd_function_is_lowered_and_its_backward_left_alone() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x @ y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = ctx.saved_tensors
            return grad.float() @ y.t(), x.t() @ grad.float()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return Product.apply(x, y)

    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    lowered = lower_autocast(capture(function, x, y))
    forward, backward = (
        getattr(lowered, n.target) for n in lowered.graph.nodes if n.op == "get_attr"
    )
    assert targets(forward).count("autocast_to_bf16.default") == 2
    assert "autocast_to_bf16.default" not in targets(backward)


def test_a_composite_is_lowered_as_eager_was_seen_to_cast() -> None:
    """`pad` is in no policy table: inside, it calls a float32 op. Validation sees eager cast its
    argument to float32, and proves that casting it before the call gives the same."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return F.pad(x @ x, (1, 1), "reflect")

    assert targets(lower_autocast(capture(function, torch.randn(8, 8)))) == [
        *["autocast_to_bf16.default"] * 2,
        "matmul",
        "autocast_to_full_precision.default",
        "pad",
    ]


def test_what_cannot_be_proved_stays_in_a_bracket() -> None:
    """Inside `matrix_power` eager casts its argument twice, so that two gradients add up in
    float32; casting it once before the call is not the same."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = torch.linalg.matrix_power(x.sin(), 3)
            return torch.linalg.matrix_power(y.float(), 3) @ x

    graph = capture(function, torch.randn(8, 8))
    report = lower_with_report(graph, AutocastState.off())
    assert [b.call for b in report.bracketed] == ["linalg_matrix_power"] * 2
    assert "autocast gives bfloat16, without it float32" in report.bracketed[0].reason
    assert "test_lower.py" in str(report.bracketed[0])
    names = targets(graph)
    # `float()` stands between the two and is no reason to stay under autocast.
    bracket = ["_enter_autocast", "linalg_matrix_power", "_exit_autocast"]
    assert names[:8] == ["sin", *bracket, "float", *bracket]


def test_neighbours_share_a_bracket() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.linalg.matrix_power(x, 3).sin(), torch.linalg.matrix_power(x, 5)

    graph = capture(function, torch.randn(8, 8))
    sin, second = list(graph.graph.nodes)[3:5]
    sin.prepend(second)
    names = targets(lower_autocast(graph))
    assert names == ["_enter_autocast", *["linalg_matrix_power"] * 2, "_exit_autocast", "sin"]


def test_a_bracketed_call_reads_the_cast_that_others_share() -> None:
    """Cross-attention splits its input projection inside and cannot be lowered; its output
    projection is cast as it is, so it reads the cast that `linear` made, as it would from eager's
    cache."""
    attention = nn.MultiheadAttention(8, 2)
    weight = attention.out_proj.weight

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            attended, _ = attention(x, y, y, need_weights=False)
            return attended, F.linear(x, weight)

    graph = capture(function, torch.randn(3, 8), torch.randn(3, 8))
    report = lower_with_report(graph, AutocastState.off())
    assert [b.call for b in report.bracketed] == ["multi_head_attention_forward"]
    (attend,) = [n for n in graph.graph.nodes if n.name == "multi_head_attention_forward"]
    (linear,) = [n for n in graph.graph.nodes if n.target is F.linear]
    assert linear.args[1] in attend.all_input_nodes, graph.code


def test_a_cast_that_eager_does_not_cache_is_not_shared() -> None:
    """`inner` casts a transposed view of its weight: eager makes a second cast, whose gradient is
    cast back by itself."""
    weight = nn.Parameter(torch.randn(8, 8))

    def function(x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            return F.linear(x, weight), torch.inner(x, weight), torch.tensordot(x, weight, 1)

    lowered = lower_autocast(capture(function, torch.randn(8, 8)))
    readers = [
        n for n in lowered.graph.nodes if n.target is torch.inner or "tensordot" in str(n.target)
    ]
    linear_weight = next(n for n in lowered.graph.nodes if n.target is F.linear).args[1]
    assert all(linear_weight not in reader.all_input_nodes for reader in readers)


def test_a_weight_by_another_name_is_the_same_weight() -> None:
    """`float()` of a float32 tensor is the tensor itself, which eager's cache knows."""
    weight = nn.Parameter(torch.randn(8, 8))

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return x @ weight + x @ weight.float()

    calls = targets(lower_autocast(capture(function, torch.randn(8, 8))))
    assert calls.count("autocast_to_bf16.default") == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.addmm(x, x, x),
        lambda x: x @ x,
        lambda x: torch.linalg.multi_dot([x, x, x]),
        lambda x: torch.cat([x, x, x.double()]),
    ],
    ids=["addmm", "matmul", "multi_dot", "cat"],
)
def test_gradients_of_one_tensor_add_up_in_the_order_of_eager(call: Any) -> None:
    """Three gradients in float32 and more: their sum hangs on the order of the casts."""

    def function(x: torch.Tensor) -> Any:
        x = x.sin()
        with torch.autocast(**BF16):
            return call(x), x.exp() / 3, x.cos()

    def gradient(run: Any, given: torch.Tensor) -> torch.Tensor:
        x = given.clone().requires_grad_()
        torch.cat([t.float().flatten() for t in run(x)]).square().mean().backward()
        return x.grad

    lowered = lower_autocast(capture(function, torch.randn(8, 8).requires_grad_()))
    for seed in range(4):
        given = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        assert_same_bits(gradient(lowered, given), gradient(function, given))


def test_a_higher_order_op_with_gradients_of_its_own_is_bracketed_whole() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.cond(x.sum() > 0, lambda v: v @ v, lambda v: (v @ v).sin(), (x,))

    graph = capture(function, torch.randn(8, 8).requires_grad_())
    report = lower_with_report(graph, AutocastState.off())
    (bracketed,) = report.bracketed
    assert bracketed.reason == "the higher-order op cond is lowered without gradients only"
    with torch.no_grad():
        report = lower_with_report(capture(function, torch.randn(8, 8)), AutocastState.off())
    assert not report.bracketed


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (torch.mm, lambda x: ((x, x), {"out": x.new_empty(4, 4)})),
        ("addmm_", lambda x: ((x.clone(), x, x), {})),
        ("t_", lambda x: ((x.clone(),), {})),
        (operator.imatmul, lambda x: ((x, x), {})),
        (operator.iadd, lambda x: ((x.clone(), x), {})),
        (operator.setitem, lambda x: ((x.clone(), 0, x[0]), {})),
        (F.relu, lambda x: ((x.clone(),), {"inplace": True})),
    ],
    ids=["out=", "addmm_", "t_", "@=", "+=", "x[0] =", "inplace="],
)
def test_calls_that_write_are_judged_on_copies(call: Any, arguments: Any) -> None:
    with FakeTensorMode() as mode:
        args, kwargs = arguments(torch.empty(4, 4))
        args = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in args)
        copies = [t for t in args if isinstance(t, torch.Tensor)]
        module = graph_of(call, args, kwargs, CPU_BF16)
        before = [(t.shape, t.stride(), t._version) for t in copies]
        assert mode is not None
        report = lower_with_report(module, CPU_BF16)
    assert (report.lowered + report.untouched, report.bracketed) == (1, [])
    assert [(t.shape, t.stride(), t._version) for t in copies] == before


def test_integer_complex_and_sparse_arguments_get_no_cast() -> None:
    with FakeTensorMode():
        index, table = torch.zeros(4, dtype=torch.long), torch.empty(8, 4)
        assert (
            lower_with_report(graph_of(F.embedding, (index, table), {}, CPU_BF16), CPU_BF16).casts
            == 0
        )
        z = torch.empty(4, 4, dtype=torch.complex64)
        report = lower_with_report(graph_of(torch.mm, (z, z), {}, CPU_BF16), CPU_BF16)
        assert (report.casts, report.untouched) == (0, 1)


def test_two_device_types_at_once() -> None:
    state = AutocastState.of([BF16, {"device_type": "cuda", "dtype": torch.float16}])
    with FakeTensorMode(), torch.no_grad():
        cpu, cuda = torch.empty(4, 4), torch.empty(4, 4, device="cuda")
        for x, cast in ((cpu, "autocast_to_bf16.default"), (cuda, "autocast_to_fp16.default")):
            module = graph_of(torch.mm, (x, x), {}, state)
            assert lower_with_report(module, state).lowered == 1
            assert targets(module) == [cast, cast, "mm"]


def test_lower_autocast_refuses_what_it_cannot_lower() -> None:
    with pytest.raises(TypeError, match="GraphModule"):
        lower_autocast(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="example_value"):
        lower_autocast(fx.symbolic_trace(lambda x: torch.sin(x)), ambient=BF16)
    with pytest.raises(ValueError, match="policies"):
        lower_autocast(fx.GraphModule(nn.Module(), fx.Graph()), policies={"op": {"softmax": "off"}})
    graph = capture(TwoLayers(), torch.randn(4, 8))
    exits = [n for n in graph.graph.nodes if "_exit_autocast" in str(n.target)]
    graph.graph.erase_node(exits[0])
    with pytest.raises(RegionError, match="never closes"):
        lower_autocast(graph)


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing a submodule binds its name in the package: it would hide the function."""
    modules = {path.stem for path in Path(autocast_backend.__file__).parent.iterdir()}
    assert modules.isdisjoint(set(autocast_backend.__all__))
