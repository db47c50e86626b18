"""The option `policies` and nested compile regions: one body, traced for the first module that
calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import nested_compile_region
from torch.utils.checkpoint import checkpoint

from tests.support import BF16, assert_same_bits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.GELU()

    @nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, in_checkpoints: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.in_checkpoints = in_checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.in_checkpoints else layer(x)
        return x


class Pair(nn.Module):
    """A region that calls regions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    @nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def run(function: Any, model: nn.Module, x: torch.Tensor, grad: bool) -> list[torch.Tensor]:
    x = x.clone().requires_grad_(grad)
    model.requires_grad_(grad)
    with torch.autocast(**BF16):
        result = function(x)
    if not grad:
        return [result]
    inputs = [x, *model.parameters()]
    return [result, *torch.autograd.grad(result.float().square().sum(), inputs)]


def with_layers_in_float32(layers: Any, chosen: set[int]) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(layers):
            if i in chosen:
                with torch.autocast("cpu", enabled=False):
                    x = F.linear(x.float(), layer.linear.weight, layer.linear.bias)
            else:
                x = F.linear(x, layer.linear.weight, layer.linear.bias)
            x = F.gelu(x)
        return x

    return function


def compiled(model: nn.Module, policies: Any) -> Any:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "policies": policies}
    return torch.compile(model, backend="smart_autocast", options=options, fullgraph=True)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("in_checkpoints", [False, True], ids=["called", "in_checkpoints"])
@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("layers.0", {0}),
        ("layers.1", {1}),
        ("layers.3.linear", {3}),
        ("layers.[24]", {2, 4}),
        ("**.linear", {0, 1, 2, 3, 4}),
    ],
)
def test_a_pattern_reaches_the_layers_that_it_names(
    pattern: str, chosen: set[int], in_checkpoints: bool, grad: bool
) -> None:
    model, x = Model(in_checkpoints), torch.randn(3, 4)
    wanted = run(with_layers_in_float32(model.layers, chosen), model, x, grad)
    policies = {"module": {pattern: "fp32"}}
    assert_same_bits(run(compiled(model, policies), model, x, grad), wanted)


class LayerWithCheckpoint(Layer):
    @nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(checkpoint(self.linear, x, use_reentrant=False))  # type: ignore[no-any-return]


def test_a_pattern_reaches_into_checkpoints_in_regions() -> None:
    model, x = nn.Sequential(*(LayerWithCheckpoint() for _ in range(3))), torch.randn(3, 4)
    wanted = run(with_layers_in_float32(model, {1}), model, x, True)
    policies = {"module": {"1.linear": "fp32"}}
    assert_same_bits(run(compiled(model, policies), model, x, True), wanted)


@pytest.mark.slow
def test_regions_in_regions() -> None:
    model, x = nn.Sequential(Pair(), Pair(), Pair()), torch.randn(3, 4)
    layers = [layer for pair in model for layer in (pair.first, pair.second)]
    for pattern, chosen in (("1.second", {3}), ("2", {4, 5}), ("*.first", {0, 2, 4})):
        wanted = run(with_layers_in_float32(layers, chosen), model, x, True)
        policies = {"module": {pattern: "fp32"}}
        assert_same_bits(run(compiled(model, policies), model, x, True), wanted, pattern)


class AtTwoDepths(nn.Module):
    """Of layers whose calls all stand in one module inside."""

    def __init__(self, deep_first: bool) -> None:
        super().__init__()
        self.first, self.rest = Holder(), nn.Sequential(Holder())
        self.deep_first = deep_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.rest(x)) if self.deep_first else self.rest(self.first(x))


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("deep_first", [False, True])
@pytest.mark.parametrize(
    ("modules", "chosen"),
    [
        ({"rest.0.inner": "fp32"}, {"rest.0"}),
        ({"rest.*.inner": "fp32"}, {"rest.0"}),
        ({"rest": "fp32"}, {"rest.0"}),
        ({"first.inner": "fp32"}, {"first"}),
        ({"**.inner": "fp32"}, {"first", "rest.0"}),
        ({"rest.0": "fp32", "rest.0.inner": {"dtype": torch.bfloat16}}, set()),
    ],
)
def test_a_region_that_is_called_at_two_depths(
    modules: Any, chosen: set[str], deep_first: bool
) -> None:
    model, x = AtTwoDepths(deep_first), torch.randn(3, 4)

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        for name in ("rest.0", "first") if deep_first else ("first", "rest.0"):
            with torch.autocast("cpu", torch.bfloat16, enabled=name not in chosen):
                linear = model.get_submodule(name).inner
                x = linear(x.float() if name in chosen else x)
        return x

    wanted = run(by_hand, model, x, True)
    assert_same_bits(run(compiled(model, {"module": modules}), model, x, True), wanted)


def test_a_region_that_is_called_with_other_dtypes_than_it_was_traced_with() -> None:
    """The first layer gets float32; the others what the policy makes of the layer before."""
    model, x = Model(in_checkpoints=False), torch.randn(3, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer.act(layer.linear(x).float())
        return x

    wanted = run(function, model, x, True)
    policies = {"op": {"aten::gelu": "fp32"}}
    assert_same_bits(run(compiled(model, policies), model, x, True), wanted)


@nested_compile_region
def through(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)  # type: ignore[no-any-return]


class ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = through(layer, x)
        return x


def test_tensors_that_a_region_is_given_belong_to_no_module() -> None:
    """An argument of the function is none of its weights, nor is what is made of it."""

    @nested_compile_region
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return region(x, w) + region(x * 2, w)

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    options = {"inner": "aot_eager", "policies": {"module": {"**": {"dtype": torch.float16}}}}
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="smart_autocast", options=options)
    with torch.autocast(**BF16):
        result = compiled(x, w)
    with torch.autocast("cpu", dtype=torch.float16):
        assert_same_bits(result, function(x, w))


def test_modules_that_a_region_is_given_cannot_be_told_apart() -> None:
    model, x = ByFunction(), torch.randn(3, 4)
    wanted = nn.Sequential(*model.layers)(x)
    with torch.autocast(**BF16):
        with pytest.raises(
            Exception, match=r"'policies': a nested compile region .*tell its calls"
        ):
            compiled(model, {"module": {"layers.2": "fp32"}})(x)
        assert_same_bits(compiled(model, {"module": {"layers.*": "fp32"}})(x), wanted)
