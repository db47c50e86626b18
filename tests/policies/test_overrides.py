"""The option `policies`: it changes the calls it names, and nothing else."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autocast_backend import AutocastState, explain, lower_autocast
from autocast_backend.policies.overrides import parse_overrides
from tests.support import BF16, FP16, assert_same_bits, capture, graph_of, targets, train_step

from .models import TO_BF16, TO_FP16, TO_FP32, Block, Model, compile_model, lowered


class RouterInFloat32(Model):
    class block(Block):
        def gate(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.router(x.float())


class RouterInFloat16(Model):
    class block(Block):
        def gate(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(**FP16):
                return self.router(x)


class HeadOff(Model):
    def head(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.lm_head(x)


class SoftmaxInFloat32(Model):
    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x))
            return x + h * torch.softmax(self.gate(h).float(), -1)


@pytest.mark.parametrize(
    ("policies", "by_hand"),
    [
        ({"module": {"blocks.*.router": "fp32"}}, RouterInFloat32),
        ({"module": {"**.router": "fp32"}}, RouterInFloat32),
        ({"module": {"blocks": "off", "blocks.*": {"dtype": torch.bfloat16}}}, Model),
        ({"module": {"blocks.?.router": {"dtype": torch.float16}}}, RouterInFloat16),
        (
            {"module": {"**.router": {"policy": "lower_precision_fp", "dtype": torch.float16}}},
            RouterInFloat16,
        ),
        ({"module": {"lm_head": "off"}}, HeadOff),
        ({"op": {"aten::softmax": "fp32"}}, SoftmaxInFloat32),
        ({"op": {"aten::linear": "fp32"}, "module": {"**": "lower_precision_fp"}}, Model),
    ],
    ids=str,
)
def test_an_override_is_what_one_would_write_by_hand(policies: dict, by_hand: Any) -> None:
    check_override(policies, by_hand, "strict")


@pytest.mark.parametrize("validate", ["dtype", "off"])
def test_an_override_without_strict_validation(validate: str) -> None:
    check_override({"module": {"blocks.*.router": "fp32"}}, RouterInFloat32, validate)


def check_override(policies: dict, by_hand: Any, validate: str) -> None:
    """Outputs and all gradients, bit for bit: so nothing but the named calls has changed."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    options = {"inner": "aot_eager", "policies": policies, "validate": validate}
    actual = train_step(Model, (x,), backend="smart_autocast", options=options)
    assert_same_bits(actual, train_step(by_hand, (x,), backend="eager"))
    plain = train_step(Model, (x,), backend="eager")
    changed = any(
        not torch.equal(a, e) for a, e in zip(actual["gradients"], plain["gradients"], strict=True)
    )
    assert changed == (by_hand is not Model)


def test_the_nodes_that_are_written() -> None:
    def function(x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            y = x @ x
            return torch.softmax(y, -1), torch.cat([y, x]), y.sin()

    x = torch.randn(8, 8)
    matmul = [TO_BF16, TO_BF16, "matmul"]
    cat = ["promote.default", "getitem", "getitem", "cat"]
    cast = {"policy": "lower_precision_fp", "dtype": torch.float16}
    assert lowered({}, function, x) == [*matmul, "softmax", *cat, "sin"]
    for asked, softmax in (
        ("lower_precision_fp", [TO_BF16, "softmax"]),
        ("fp32", [TO_FP32, "softmax"]),
        (cast, [TO_FP16, "softmax"]),
        ("promote", ["promote.default", "getitem", "softmax"]),
        ("off", ["softmax"]),
        ({"dtype": torch.float16}, ["softmax"]),
    ):
        assert lowered({"op": {"aten::softmax": asked}}, function, x) == [
            *matmul,
            *softmax,
            *cat,
            "sin",
        ]
    assert lowered({"op": {"aten::sin": "fp32"}}, function, x)[-2:] == [TO_FP32, "sin"]
    assert lowered({"op": {"aten::matmul": "off"}}, function, x)[:1] == ["matmul"]


def test_the_innermost_match_wins() -> None:
    for policies, casts in (
        ({"module": {"blocks": "off", "blocks.*.router": "fp32", "blocks.*.router.2": "off"}}, 6),
        ({"op": {"aten::linear": "fp32"}, "module": {"blocks": "off"}}, 3),
        ({"module": {"lm_head": "off", "*": "fp32"}}, 21),
        ({"module": {"*": "fp32", "lm_head": "off"}}, 18),
    ):
        calls = lowered(policies)
        assert calls.count(TO_FP32) == casts, policies


def test_the_body_of_a_checkpoint_knows_its_modules() -> None:
    model = Model()

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return checkpoint(model.blocks[0], x, use_reentrant=False)

    calls = lowered({"module": {"**.router": "fp32"}}, function, torch.randn(4, 8))
    assert (calls.count(TO_BF16), calls.count(TO_FP32), calls.count("linear")) == (3, 6, 3)


def test_cuda_policies_are_overridden() -> None:
    state = AutocastState.of({"device_type": "cuda", "dtype": torch.float16})
    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, 8, dtype=torch.float16, device="cuda")
        for asked, expected in (
            ("lower_precision_fp", [TO_FP16, "softmax"]),
            ("off", ["softmax"]),
            ("fp32", [TO_FP32, "softmax"]),
        ):
            graph = graph_of(F.softmax, (x, -1), {}, state)
            policies = {"op": {"aten::softmax": asked}}
            assert targets(lower_autocast(graph, ambient=state, policies=policies)) == expected


def test_what_stands_outside_of_all_regions_is_not_named() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    asked = {"op": {"aten::softmax": "lower_precision_fp"}, "module": {"**": "fp32"}}
    assert lowered(asked, function, torch.randn(4, 8)) == ["softmax"]


def test_calls_that_write_to_their_arguments_are_left_alone() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = x @ x
            y.add_(x)
            return torch.add(y, x, out=torch.empty_like(y)) + y

    calls = lowered({"op": {"aten::add": "fp32"}}, function, torch.randn(8, 8))
    assert calls == [
        TO_BF16,
        TO_BF16,
        "matmul",
        "add_",
        "empty_like",
        "add",
        TO_FP32,
        TO_FP32,
        "add",
    ]


@pytest.mark.parametrize(
    ("policies", "error", "words"),
    [
        (["aten::sum"], TypeError, r"expected a dict such as .*; got \['aten::sum'\]"),
        ({"ops": {}}, ValueError, r"unknown key 'ops'; expected 'op' or 'module'"),
        (
            {"op": {"aten::sofmax": "fp32"}},
            ValueError,
            r"called 'aten::sofmax'; expected .*softmax",
        ),
        ({"op": {"softmax": "fp32"}}, ValueError, r"called 'softmax'; expected 'aten::softmax'"),
        ({"op": {"aten::sum.dim_IntList": "fp32"}}, ValueError, r"expected 'aten::sum'"),
        (
            {"op": {"aten::sum": "fp64"}},
            ValueError,
            r"unknown policy 'fp64'; expected one of .*'fp32', .*torch\.float16",
        ),
        ({"op": {"aten::sum": 1}}, TypeError, r"op 'aten::sum': expected one of .*; got 1"),
        ({"op": {"aten::sum": {}}}, ValueError, r"expected 'policy' or 'dtype' or both"),
        ({"op": {"aten::sum": {"type": 1}}}, ValueError, r"unknown key 'type'"),
        ({"op": {"aten::sum": {"dtype": torch.float32}}}, ValueError, r'For float32 use "fp32"'),
        (
            {"op": {"aten::sum": {"dtype": torch.float16, "policy": "fp32"}}},
            ValueError,
            r"a dtype goes with 'lower_precision_fp'",
        ),
        ({"module": {"blocks..router": "fp32"}}, ValueError, r"expected names with dots between"),
        ({"module": {3: "fp32"}}, TypeError, r"expected strings as keys, as in .*; got 3"),
    ],
)
def test_an_impossible_override(policies: Any, error: Any, words: str) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("compiled")

    with pytest.raises(error, match=words):
        parse_overrides("option 'policies'", policies)
    options = {"inner": never, "policies": policies}
    torch._dynamo.reset()
    with pytest.raises(error, match=words):
        torch.compile(torch.sin, backend="smart_autocast", options=options)(torch.ones(2))


class Passed(nn.Module):
    """Calls that stand in no module, or that autocast does not treat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8)
        self.out.weight = self.table.weight
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first.forward(x))
        x, _ = self.attention(x, x, x)
        return F.linear(self.out(x), self.table.weight)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("first", ["names 'first', and not the call of linear"]),
        ("norm", ["changes nothing in this graph: .* such as the call of layer_norm"]),
        ("table", ["names 'table', and not the call of linear"]),
        ("attention.out_proj", ["names 'attention.out_proj', and not the call of multi_head"]),
        ("attention", []),
        ("**", []),
        ("*", ["names 'first', .*the same of 1 more"]),
    ],
)
def test_what_a_pattern_seems_to_name_and_does_not_is_told(
    pattern: str, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    policies = {"module": {pattern: "fp32"}, "op": {"aten::rsub": "fp32"}}
    with torch.autocast(**BF16):
        report = explain(Passed(), policies=policies)(torch.randn(4, 8))
    [graph] = report.graphs
    found = graph.summary.passed_over
    assert [bool(re.search(t, f)) for t, f in zip(told, found, strict=True)] == [True] * len(told)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == found
    assert all(text in str(report) and html.escape(text) in report.to_html() for text in found)
    assert "option 'policies': op 'aten::rsub' (fp32) names no call" in str(report)
    unnamed = f"option 'policies': module '{pattern}' (fp32) names no call" in str(report)
    assert unnamed == (pattern not in ("attention", "**", "*"))


def test_a_frozen_weight_in_a_checkpoint_that_is_read_outside_of_its_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Passed().requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    with torch.autocast(**BF16):
        report = explain(Outer(), policies={"module": {"inner.first": "fp32"}})(torch.randn(4, 8))
    [told] = report.graphs[0].summary.passed_over
    assert "names 'inner.first', and not the call of linear" in told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("fp32", True),
        ({"dtype": torch.float16}, True),
        ("lower_precision_fp", False),
    ],
)
def test_a_dtype_that_the_code_has_looked_up_is_told(asked: Any, told: bool) -> None:
    """Attention in Transformers: `softmax(scores, dtype=torch.float32).to(query.dtype)`."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.query(x)
            weights = torch.softmax(query, -1, dtype=torch.float32).to(query.dtype)
            return self.out(weights @ query.t())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x)

    with torch.autocast(**BF16):
        report = explain(Outer(), policies={"module": {"attention": asked}})(torch.randn(8, 8))
    found = report.graphs[0].summary.passed_over
    assert [bool(re.search(r"the call of to .* casts to bfloat16\.", f)) for f in found] == [
        True
    ] * told


def test_an_override_that_a_call_cannot_take() -> None:
    def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return x @ (w @ w)

    def view(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return (x @ x).view(-1)

    def detached(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return (x @ x).detach()

    def mapped(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.func.vmap(lambda v: v @ v)(x)

    def before(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = torch.softmax(x @ x, -1)
            return (x @ x).scatter(0, index, y)

    def inverse(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.linalg.inv(x)

    x = torch.randn(8, 8)
    for function, inputs, policies, words in (
        (
            inverse,
            (x,),
            {"op": {"aten::linalg_inv": "lower_precision_fp"}},
            r"with its casts .*call of linalg_inv .*raises .*Low precision dtypes not supported",
        ),
        (mixed, (x, x), {"op": {"aten::matmul": "off"}}, None),
        (
            mixed,
            (x, x.bfloat16()),
            {"op": {"aten::matmul": "off"}},
            r"call of matmul .* gets bfloat16 and float32",
        ),
        (view, (x,), {"op": {"aten::view": "fp32"}}, r"returns a view of its argument"),
        (detached, (x,), {"op": {"aten::detach": "fp32"}}, r"returns a view of its argument"),
        (mapped, (x[None],), {"op": {"aten::matmul": "fp32"}}, r"torch.func transform"),
        (
            before,
            (x, torch.zeros(8, 8, dtype=torch.long)),
            {"op": {"aten::softmax": "fp32"}},
            r"the call of scatter .*raises .*after 1 calls that are overridden",
        ),
    ):
        graph = capture(function, *inputs)
        if words is None:
            lower_autocast(graph, policies=policies)
            continue
        with pytest.raises(ValueError, match=words):
            lower_autocast(graph, policies=policies)


def test_the_counters_say_so() -> None:
    torch._dynamo.utils.counters.clear()
    compile_model(Model(), {"module": {"blocks.*.router": "fp32"}})(torch.randn(4, 8))
    assert torch._dynamo.utils.counters["smart_autocast"]["overridden"] == 4


def test_what_is_not_looked_into_can_be_in_another_state() -> None:
    def mapped(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.func.vmap(lambda v: v @ v)(x)

    def branches(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.cond(x.sum() > 0, lambda v: v @ v, lambda v: v.sin() @ v, (x,))

    x = torch.randn(1, 8, 8)
    for function in (mapped, branches):
        calls = lowered({"module": {"**": "off"}}, function, x)
        assert "_enter_autocast" not in calls
        graph = lower_autocast(
            capture(function, x), policies={"module": {"**": {"dtype": torch.float16}}}
        )
        enters = [n.args[1] for n in graph.graph.nodes if "_enter_autocast" in str(n.target)]
        assert set(enters) == {torch.float16} or targets(graph).count(TO_FP16) == 2


def gradient_then_map(x: torch.Tensor) -> torch.Tensor:
    y = torch.func.grad(lambda v: (v @ v).sum())(x)
    return torch.func.vmap(lambda v: v @ x)(y)


def forward_mode(x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda v: v @ v, (x,), (x,))[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [gradient_then_map, forward_mode])
def test_a_transform_in_another_state_is_entered_once(function: Any) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return function(x)

    x = torch.randn(8, 8)
    graph = capture(region, x)
    policies = {"module": {"**": {"dtype": torch.float16}}}
    (result,) = lower_autocast(graph, policies=policies)(x)
    with torch.autocast(**FP16):
        assert_same_bits(result, function(x))


def test_a_call_in_a_body_that_is_not_looked_into() -> None:
    """It would follow autocast, and nobody would know."""
    model = nn.Sequential(nn.Linear(8, 8))

    def branches(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.cond(x.sum() > 0, model, lambda v: v.bfloat16(), (x,))

    def loop(x: torch.Tensor) -> torch.Tensor:
        def step(i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast(**BF16):
                return i + 1, F.linear(v, model[0].weight.detach()).float()

        start = (torch.tensor(0), x)
        return torch._higher_order_ops.while_loop(lambda i, v: i < 3, step, start)[1]

    def branches_in_a_branch(x: torch.Tensor) -> torch.Tensor:
        def inner(v: torch.Tensor) -> torch.Tensor:
            return torch.cond(v.sum() > 0, model, torch.Tensor.bfloat16, (v,))

        with torch.autocast(**BF16):
            return torch.cond(x.sum() > 0, inner, lambda v: v.bfloat16(), (x,))

    x = torch.randn(4, 8)
    for function in (branches, branches_in_a_branch, loop):
        for asked in ("fp32", "off", {"dtype": torch.float16}):
            with pytest.raises(ValueError, match=r"call of linear .*a body of the higher-order op"):
                lowered({"op": {"aten::linear": asked}}, function, x)
        assert lowered({"op": {"aten::softmax": "fp32"}}, function, x) == lowered({}, function, x)
    with pytest.raises(ValueError, match=r"module '0' .*a body of the higher-order op cond"):
        lowered({"module": {"0": "fp32"}}, branches, x)


@pytest.mark.parametrize("join", [torch.cat, torch.concat, torch.hstack, torch.column_stack])
def test_an_override_of_a_call_that_autocast_refuses(join: Any) -> None:
    """Autocast to float16 raises at a `cat` of bfloat16; the override asks for another state."""
    weight = torch.randn(8, 8)

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(**FP16):
                return join([F.linear(x, weight), x])

    for asked in ({"op": {"aten::linear": {"dtype": torch.bfloat16}}}, {"module": {}}):
        asked = {**asked, "module": {"**": {"dtype": torch.bfloat16}}}
        x = torch.randn(4, 8)
        with torch.autocast(**BF16):
            expected = join([F.linear(x, weight), x])
        assert_same_bits(compile_model(Outer(), asked)(x), expected)


def product_of_its_own(size: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, size * size).view(size, size)
    return x @ x + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "off"])
def test_a_graph_without_tensors_for_inputs(policy: str, dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        product_of_its_own,
        backend="smart_autocast",
        dynamic=dynamic,
        options={"inner": "aot_eager", "policies": {"op": {"aten::matmul": policy}}},
    )
    with torch.autocast(**BF16):
        actual = compiled(5)
    assert_same_bits(actual, product_of_its_own(5))
