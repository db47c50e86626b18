"""The option `policies`: it changes the calls it names, and nothing else."""

from __future__ import annotations

import html
import operator
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from autocast_backend import AutocastState, explain, lower_autocast
from autocast_backend.policies.overrides import module_stack, parse_overrides
from autocast_backend.policies.paths import parse_name
from tests.support import BF16, FP16, assert_same_bits, capture, graph_of, targets, train_step

TO_BF16, TO_FP16 = "autocast_to_bf16.default", "autocast_to_fp16.default"
TO_FP32 = "autocast_to_full_precision.default"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)
        self.router = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + h * torch.softmax(self.gate(h), -1)


class Model(nn.Module):
    """`by_hand` writes down in eager what an override asks for."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.lm_head = nn.Linear(8, 8)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            for block in self.blocks:
                x = block(x)
            return self.head(x)


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


def lowered(policies: dict, function: Any = None, *inputs: Any) -> list[str]:
    graph = capture(function or Model(), *(inputs or (torch.randn(4, 8),)))
    return targets(lower_autocast(graph, policies=policies))


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


def compile_model(model: Any, policies: dict, **arguments: Any) -> Any:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "policies": policies}
    return torch.compile(model, backend="smart_autocast", options=options, **arguments)


def test_a_pattern_that_matches_no_module() -> None:
    x = torch.randn(4, 8)
    for pattern in ("blocks.*.routr", "blocks.router", "router"):
        with pytest.raises(ValueError, match=r"matches no module; expected .*router'"):
            compile_model(Model(), {"module": {pattern: "fp32"}})(x)
        with pytest.raises(ValueError, match=r"matches no module; expected .*router'"):
            lowered({"module": {pattern: "fp32"}})


def test_a_pattern_where_there_is_but_one_module() -> None:
    with pytest.raises(ValueError, match=r"matches no module; expected '\*\*', for there"):
        compile_model(nn.Linear(4, 4), {"module": {"head": "fp32"}})(torch.randn(2, 4))
    whole = compile_model(nn.Linear(4, 4), {"module": {"**": "fp32"}}, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert whole(torch.randn(2, 4)).dtype == torch.float32


def test_a_module_that_is_not_called_is_still_a_module() -> None:
    class Unused(Model):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(8, 8)

    model, x = Unused(), torch.randn(4, 8)
    assert torch.equal(compile_model(model, {"module": {"spare": "fp32"}})(x), model(x))


def test_a_graph_break_between_modules() -> None:
    """Both graphs know the whole model: a pattern for a module of one is no error in the other."""

    class Broken(Model):
        def head(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return self.lm_head(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(**BF16):
                x = self.blocks[0](x)
            torch._dynamo.graph_break()
            with torch.autocast(**BF16):
                return self.lm_head(x)

    torch.manual_seed(0)
    model, x = Broken(), torch.randn(4, 8)
    off = compile_model(model, {"module": {"lm_head": "off", "blocks.*.router": "fp32"}})(x)
    assert off.dtype is torch.float32
    assert compile_model(model, {"module": {"blocks.*.router": "fp32"}})(x).dtype is torch.bfloat16


def test_a_graph_break_inside_a_module_is_not_passed_over() -> None:
    """The module's forward becomes a graph of its own, whose names do not reach up to the model,
    and whose compiled code serves other modules too."""

    class Broken(Model):
        class block(Block):
            def gate(self, x: torch.Tensor) -> torch.Tensor:
                torch._dynamo.graph_break()
                return self.router(x)

    with pytest.raises(ValueError, match=r"matches no module.*'router'.*graph break"):
        compile_model(Broken(), {"module": {"blocks.*.router": "fp32"}})(torch.randn(4, 8))


def test_a_module_that_is_kept_in_a_variable_over_a_graph_break() -> None:
    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            block = self.blocks[0]
            torch._dynamo.graph_break()
            with torch.autocast(**BF16):
                return self.lm_head(block(x))

    with pytest.raises(ValueError, match=r"a part of L\['self'\] is reached as L\['block'\]"):
        compile_model(Broken(), {"module": {"blocks.*.router": "fp32"}})(torch.randn(4, 8))


def test_modules_of_a_function_and_of_an_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Model()

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    x, trainer = torch.randn(4, 8), Trainer()
    model = trainer.model
    assert model(x).dtype is torch.bfloat16
    off = compile_model(trainer.step, {"module": {"model.lm_head": "off"}})(x)
    assert off.dtype is torch.float32
    assert compile_model(step, {"module": {"lm_head": "off"}})(model, x).dtype is torch.float32
    with pytest.raises(ValueError, match=r"expected 'model.lm_head'"):
        compile_model(trainer.step, {"module": {"lm_head": "off"}})(x)


def test_a_module_with_two_names_has_both() -> None:
    class Twice(Model):
        def __init__(self) -> None:
            super().__init__()
            self.output = self.lm_head

    assert Twice()(torch.randn(4, 8)).dtype is torch.bfloat16
    for name in ("lm_head", "output"):
        off = compile_model(Twice(), {"module": {name: "off"}})(torch.randn(4, 8))
        assert off.dtype is torch.float32, name


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


class Active(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.active = self.experts[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.active(x)


@pytest.mark.parametrize("first", [0, 1])
def test_a_module_with_two_names_that_is_replaced(first: int) -> None:
    """Dynamo asks for its class, its sizes and the like: the code of the first would serve."""
    model, x = Active(), torch.randn(4, 8)
    compiled = compile_model(model, {"module": {"experts.0": "fp32"}})
    with torch.autocast(**BF16):
        for i in (first, 1 - first, first):
            model.active = model.experts[i]
            assert compiled(x).dtype is (torch.float32 if i == 0 else torch.bfloat16), i
        model.active, model.experts[0] = model.experts[0], model.experts[1]
        assert compiled(x).dtype is torch.bfloat16


def test_a_global_module_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Active(), torch.randn(4, 8)

    def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chosen(x), model(x)  # type: ignore[name-defined]  # noqa: F821

    compiled = compile_model(step, {"module": {"experts.1": "fp32"}})
    with torch.autocast(**BF16):
        for i in (1, 2, 1):
            monkeypatch.setitem(globals(), "chosen", model.experts[i])
            expected = torch.float32 if i == 1 else torch.bfloat16
            assert [y.dtype for y in compiled(model, x)] == [expected, torch.bfloat16]


def test_a_variable_of_a_function_around_is_no_part_of_a_name() -> None:
    x, model = torch.randn(4, 8), torch.autocast(**BF16)(Active())
    for pattern, expected in (("active", torch.float32), ("experts.1", torch.bfloat16)):
        assert compile_model(model, {"module": {pattern: "fp32"}})(x).dtype is expected


def test_blocks_that_are_compiled_one_by_one_share_their_code() -> None:
    """Also where a module in each of them has two names."""
    torch._dynamo.reset()
    x, blocks = torch.randn(4, 8), [Active() for _ in range(3)]
    options = {"inner": "aot_eager", "policies": {"module": {"experts.0": "fp32"}}}
    compiled = [torch.compile(b, backend="smart_autocast", options=options) for b in blocks]
    counters.clear()
    with torch.autocast(**BF16):
        assert all(block(x).dtype is torch.float32 for block in compiled)
    assert counters["smart_autocast"]["graphs"] == 1


@pytest.mark.parametrize("key", ["a[0]", "it's", "x'y\"z", "a[", "a\\b", "é é"])
def test_a_module_whose_name_has_odd_characters(key: str) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({key: nn.Sequential(nn.Linear(8, 8))})
            self.plain = {"x.y": nn.Linear(8, 8), 3: [nn.Linear(8, 8)]}

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast(**BF16):
                return self.layers[key](x), self.plain["x.y"](x), self.plain[3][0](x)

    x = torch.randn(4, 8)
    model = Keyed()
    graph = capture(model, x)
    names = {name for node in graph.graph.nodes for name in names_of_modules(node)}
    assert names == {("layers", key), ("layers", key, "0"), ("plain", "x.y"), ("plain", "3", "0")}
    for pattern, expected in (
        (f"layers.{key}", 1),
        (f"layers.{key}.0", 1),
        ("plain.x?y", 1),
        ("plain.3", 1),
        ("layers.*", 1),
        ("plain", 2),
    ):
        calls = targets(lower_autocast(capture(model, x), policies={"module": {pattern: "fp32"}}))
        assert calls.count(TO_FP32) == 3 * expected, pattern
    with pytest.raises(ValueError, match="matches no module"):
        compile_model(Keyed(), {"module": {"layers.a": "fp32"}})(x)


def names_of_modules(node: torch.fx.Node) -> list[Any]:
    return [parse_name(path) for _, path in module_stack(node)]


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

    x = torch.randn(8, 8)
    for function, inputs, policies, words in (
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

    x = torch.randn(4, 8)
    for function in (branches, loop):
        for asked in ("fp32", "off", {"dtype": torch.float16}):
            with pytest.raises(ValueError, match=r"call of linear .*a body of the higher-order op"):
                lowered({"op": {"aten::linear": asked}}, function, x)
        assert lowered({"op": {"aten::softmax": "fp32"}}, function, x) == lowered({}, function, x)
    with pytest.raises(ValueError, match=r"module '0' .*a body of the higher-order op cond"):
        lowered({"module": {"0": "fp32"}}, branches, x)


def test_an_override_of_a_call_that_autocast_refuses() -> None:
    """Autocast to float16 raises at a `cat` of bfloat16; the override asks for another state."""
    weight = torch.randn(8, 8)

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(**FP16):
                return torch.cat([F.linear(x, weight), x])

    for asked in ({"op": {"aten::linear": {"dtype": torch.bfloat16}}}, {"module": {}}):
        asked = {**asked, "module": {"**": {"dtype": torch.bfloat16}}}
        x = torch.randn(4, 8)
        with torch.autocast(**BF16):
            expected = torch.cat([F.linear(x, weight), x])
        assert_same_bits(compile_model(Outer(), asked)(x), expected)


def test_a_module_that_is_not_compiled() -> None:
    """Its calls stand in no graph: they would follow autocast, and nobody would know."""

    class Disabled(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(8, 8), Around(inner)

        def forward(self, x: torch.Tensor) -> Any:
            return self.rest(self.first(x))

    x = torch.randn(4, 8)
    for inner, why in ((nn.LSTM(8, 8), "allow_rnn"), (Disabled(8, 8), "torch.compiler.disable")):
        for pattern in ("rest.inner", "rest", "**"):
            with pytest.raises(ValueError, match=rf"names 'rest.inner', .* because .*{why}"):
                compile_model(Outer(inner), {"module": {pattern: "fp32"}})(x)
        compile_model(Outer(inner), {"module": {"first": "fp32"}})(x)


def test_a_module_with_two_names_that_is_not_compiled() -> None:
    """The error names it by the name that the pattern matches."""

    class Disabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.again = self.layer

        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(8, 8), Disabled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.first(x))

    for name in ("inner.layer", "inner.again"):
        with pytest.raises(ValueError, match=rf"names '{name}', whose calls Dynamo does not"):
            compile_model(Outer(), {"module": {name: "fp32"}})(torch.randn(4, 8))


def overridden(function: Any, op: str, *inputs: torch.Tensor, policy: str = "fp32") -> Any:
    """What a function gives under autocast with one op's policy, and how many calls that named."""
    torch._dynamo.reset()
    counters.clear()
    options = {"inner": "aot_eager", "policies": {"op": {op: policy}}}
    compiled = torch.compile(function, backend="smart_autocast", options=options)
    with torch.autocast(**BF16):
        return compiled(*inputs), counters["smart_autocast"]["overridden"]


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.relu(x.bfloat16()), "aten::relu"),
        (nn.ReLU(), "aten::relu"),  # F.relu(x, inplace=False)
        (lambda x: torch.neg(x, out=None), "aten::neg"),
        (lambda x: x / x, "aten::div"),
        (lambda x: x % 2, "aten::remainder"),
        (lambda x: operator.imatmul(x, x), "aten::matmul"),
        (lambda x: F.batch_norm(x.view(2, -1), None, None, training=True), "aten::batch_norm"),
        (lambda x: 1 - x, "aten::rsub"),
        (lambda x: 1 - x, "aten::sub"),
        (lambda x: x.__rsub__(1), "aten::sub"),
        (lambda x: 2 / x, "aten::reciprocal"),
        (lambda x: 2 / x, "aten::div"),
        (lambda x: x.__rtruediv__(2), "aten::div"),
        (lambda x: x.__radd__(1), "aten::add"),
        (lambda x: 2**x, "aten::pow"),
        (lambda x: 2 // x, "aten::floor_divide"),
        (lambda x: F.max_pool2d(x.view(1, 1, 2, 2), 2), "aten::max_pool2d"),
        (lambda x: F.nll_loss(x.view(1, 4), x.new_ones(1).long()), "aten::nll_loss_nd"),
        (lambda x: F.nll_loss(x.view(1, 4), x.new_ones(1).long()), "aten::nll_loss"),
        (lambda x: torch.norm(x, p=1), "aten::linalg_vector_norm"),
        (lambda x: torch.norm(x.view(2, 2), "fro", (0, 1)), "aten::linalg_vector_norm"),
        (lambda x: x.norm(dim=0), "aten::linalg_vector_norm"),
        (lambda x: x.norm(), "aten::norm"),
        (lambda x: F.dropout1d(x.view(1, 2, 2)), "aten::feature_dropout"),
        (lambda x: F.dropout2d(x.view(1, 1, 2, 2)), "aten::feature_dropout"),
        (lambda x: F.dropout3d(x.view(1, 1, 1, 2, 2)), "aten::feature_dropout"),
        (lambda x: F.unfold(x.view(1, 1, 2, 2), 2), "aten::im2col"),
        (lambda x: F.fold(x.view(1, 4, 1), 2, 2), "aten::col2im"),
        (
            lambda x: F.affine_grid(x.new_ones(1, 2, 3), [1, 1, 2, 2], align_corners=False),
            "aten::affine_grid_generator",
        ),
    ],
)
def test_a_call_by_another_spelling_is_named(function: Any, op: str) -> None:
    result, named = overridden(function, op, torch.ones(4).bfloat16())
    assert (result.dtype, named) == (torch.float32, 1)


def test_a_nuclear_norm_is_not_that_of_a_vector() -> None:
    x = torch.ones(2, 2)
    for function in (lambda x: torch.norm(x, "nuc"), lambda x: x.norm(p="nuc")):
        assert overridden(function, "aten::linalg_vector_norm", x)[1] == 0
        assert overridden(function, "aten::linalg_matrix_norm", x)[1] == 1


def test_a_number_minus_a_tensor_is_another_op_than_a_tensor_minus_a_number() -> None:
    for op, expected in (("aten::rsub", torch.bfloat16), ("aten::sub", torch.float32)):
        result, _ = overridden(lambda x: x - 1, op, torch.ones(4).bfloat16())
        assert result.dtype is expected
    graph = capture(torch.autocast(**BF16)(lambda x: 1 - x), torch.ones(4).bfloat16())
    both = {"op": {"aten::sub": "fp32", "aten::rsub": {"dtype": torch.float16}}}
    assert targets(lower_autocast(graph, policies=both)) == ["sub"]  # as `rsub` is asked for


def interpolate(dims: int, mode: str) -> Any:
    return lambda x: F.interpolate(x.reshape(1, 4, *[1] * dims), scale_factor=2, mode=mode)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (interpolate(1, "linear"), "upsample_linear1d"),
        (interpolate(2, "bilinear"), "upsample_bilinear2d"),
        (interpolate(2, "bicubic"), "upsample_bicubic2d"),
        (interpolate(3, "trilinear"), "upsample_trilinear3d"),
        (interpolate(3, "nearest-exact"), "_upsample_nearest_exact3d"),
        (interpolate(1, "area"), "adaptive_avg_pool1d"),
        (interpolate(2, "nearest"), "upsample_nearest2d"),
    ],
)
def test_an_interpolation_is_named_by_its_op(function: Any, op: str) -> None:
    for asked in {op, "upsample_nearest2d"}:
        policy = "lower_precision_fp"
        result, named = overridden(function, f"aten::{asked}", torch.ones(4), policy=policy)
        assert (result.dtype is torch.bfloat16, named) == (op == asked, op == asked)


def test_a_module_below_the_one_that_is_named_counts_whoever_calls_it() -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)  # type: ignore[no-any-return]

        def score(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.head(x), x @ x.mT

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Head()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.a(x), self.a.head(x), *self.a.score(x)

    torch.compiler.reset()
    options = {"inner": "aot_eager", "policies": {"module": {"a": "fp32"}}}
    compiled = torch.compile(Model(), backend="smart_autocast", options=options)
    with torch.no_grad(), torch.autocast(**BF16):
        dtypes = [y.dtype for y in compiled(torch.randn(8, 8))]
    assert dtypes == [torch.float32] * 3 + [torch.bfloat16]


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


@torch._dynamo.allow_in_graph
def softmax(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_users_function_is_not_the_op_whose_name_it_has() -> None:
    result, named = overridden(softmax, "aten::softmax", torch.ones(4).bfloat16())
    assert (result.dtype, named) == (torch.bfloat16, 0)


@torch._dynamo.allow_in_graph
def half() -> torch.Tensor:
    return torch.full((), 0.5)


def test_a_users_function_without_arguments_that_has_the_name_of_a_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    compiled = compile_model(lambda x: model(x) * half(), {"module": {"**": "fp32"}})
    with torch.autocast(**BF16):
        assert compiled(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize(
    ("module", "op", "written"),
    [
        (nn.BatchNorm1d(4).bfloat16(), "aten::batch_norm", "running_mean"),
        (
            nn.InstanceNorm1d(4, track_running_stats=True).bfloat16(),
            "aten::instance_norm",
            "running_mean",
        ),
        (
            nn.Embedding(4, 4, max_norm=0.1).bfloat16().requires_grad_(False),
            "aten::embedding",
            "weight",
        ),
    ],
    ids=["batch_norm", "instance_norm", "embedding"],
)
def test_what_a_call_writes_to_its_arguments_is_not_lost(
    module: nn.Module, op: str, written: str
) -> None:
    module.bfloat16().requires_grad_(False)
    x = torch.arange(4) if op == "aten::embedding" else 2 + torch.rand(2, 4, 8).bfloat16()
    before = getattr(module, written).clone()
    _, named = overridden(module, op, x)
    assert named == 0
    assert not torch.equal(getattr(module, written), before)


class Caller(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class TwoCallers(nn.Module):
    """Of one layer, which is registered in both."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.a, self.b = Caller(layer), Caller(layer)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"a": "fp32"}, (torch.float32, torch.bfloat16)),
        ({"b": "fp32"}, (torch.bfloat16, torch.float32)),
        ({"a": "fp32", "b": {"dtype": torch.float16}}, (torch.float32, torch.float16)),
        ({"b.layer": "fp32"}, (torch.float32, torch.float32)),  # its name, whoever calls it
    ],
)
def test_a_shared_module_is_in_the_module_that_calls_it(modules: Any, expected: Any) -> None:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "policies": {"module": modules}}
    compiled = torch.compile(TwoCallers(), backend="smart_autocast", options=options)
    with torch.autocast(**BF16):
        assert tuple(result.dtype for result in compiled(torch.ones(2, 8))) == expected


class AlsoCalledAlone(nn.Module):
    """A part of a module that is also called by a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.whole = nn.Sequential(self.layer, nn.ReLU())
        self.listed = nn.ModuleList([self.layer])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), self.whole(x), self.layer(x)


@pytest.mark.parametrize(
    ("pattern", "inside"),
    [("whole", [1]), ("layer", [0, 1, 2]), ("whole.0", [0, 1, 2]), ("listed", [0, 2])],
)
def test_a_call_by_another_name_is_not_in_a_module_that_was_not_called(
    pattern: str, inside: list[int]
) -> None:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "policies": {"module": {pattern: "fp32"}}}
    compiled = torch.compile(AlsoCalledAlone(), backend="smart_autocast", options=options)
    with torch.autocast(**BF16):
        results = compiled(torch.ones(2, 8))
    assert [i for i, result in enumerate(results) if result.dtype is torch.float32] == inside
