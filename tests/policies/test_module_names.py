"""Which modules the patterns of overrides name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autocast_backend import lower_autocast
from autocast_backend.policies.overrides import module_stack
from autocast_backend.policies.paths import parse_name
from tests.support import BF16, capture, targets

from .models import TO_FP32, Block, Model, compile_model, lowered


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


def test_a_name_that_begins_with_that_of_another() -> None:
    """All modules that a function reaches count, called or not."""
    x = torch.randn(2, 4)

    class Head(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.spare = nn.Linear(4, 4)

    class Trainer:
        def __init__(self) -> None:
            self.head, self.head2 = nn.Linear(4, 4), Head()

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.head2(self.head(x))

    step = compile_model(Trainer().step, {"module": {"head2.spare": "fp32"}})
    with torch.autocast(**BF16):
        assert step(x).dtype is torch.bfloat16


def names_of_modules(node: torch.fx.Node) -> list[Any]:
    return [parse_name(path) for _, path in module_stack(node)]


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
