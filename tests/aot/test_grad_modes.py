"""Graphs that switch autograd on and off: what it records is not what the mode around says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.aot.harness import AOT_EAGER, Case, Function, assert_like_the_oracle
from tests.support import BF16, assert_same_bits


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its backward multiplies products by numbers, where a forgotten cast back to float32 shows."""
    with torch.autocast("cpu", enabled=False):
        island = (x.float() * 2.1) @ (w.float() * 1.3)
    return island + x @ w


def recorded_all_the_same(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return scaled(x, w)


def recorded_in_part(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = scaled(x, w)
    with torch.enable_grad():
        return y, y * scaled(x, w)


def casts_a_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Under ambient autocast the cast of `w` is made outside of the graph."""
    with torch.enable_grad():
        y = x.sin() @ w
        with torch.autocast("cpu", enabled=False):
            return y.float() @ y.float().t()


def not_recorded_in_part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = scaled(x, w)
        with torch.enable_grad():
            z = scaled(x.cos(), w)
    return y * z


@pytest.mark.parametrize(
    ("function", "way"),
    [
        (recorded_all_the_same, "ambient"),
        (recorded_in_part, "off"),
        (recorded_in_part, "region"),
        (casts_a_weight, "ambient"),
    ],
)
def test_autograd_switched_on_inside_of_no_grad(function: Function, way: str) -> None:
    assert_like_the_oracle(Case(function, around=torch.no_grad), way)


def test_autograd_switched_off_inside() -> None:
    assert_like_the_oracle(Case(not_recorded_in_part), "ambient")


def inference_inside(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The cast of `w` that is made in inference mode has no gradient to give to the second one."""
    with torch.inference_mode():
        y = scaled(x, w)
        with torch.inference_mode(False):
            z = scaled(x.cos(), w)
    return scaled(x, w), y.clone(), z


@pytest.mark.parametrize("way", ["ambient", "region"])
def test_inference_mode_inside(way: str) -> None:
    assert_like_the_oracle(Case(inference_inside), way)


@pytest.mark.parametrize("validate", ["strict", "dtype", "off"])
def test_what_dynamo_takes_for_a_view_with_gradients(validate: str) -> None:
    """What Dynamo has for `F.pad` of a parameter requires grad, also under `no_grad`. Of a view of
    that PyTorch says no longer whether it is a leaf, once something has been written to it."""
    weight, other = torch.nn.Parameter(torch.randn(3, 4)), torch.randn(4, 4)

    def program(weight: torch.Tensor) -> torch.Tensor:
        view = torch.nn.functional.pad(weight, [0, 0, 0, 1])[-1]
        view += 1.0
        return view @ other

    options = {"inner": "aot_eager", "validate": validate}
    compiled = torch.compile(program, backend="smart_autocast", options=options)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(compiled(weight), program(weight))


@pytest.mark.parametrize("autograd", [True, False])
def test_composites_in_inference_mode_inside(autograd: bool) -> None:
    """What stays under autocast is cast inside of composite ops."""
    cell, layer = nn.GRUCell(4, 4), nn.Linear(4, 4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = layer(x)
        with torch.inference_mode():
            inside = cell(x, x * 2)
            with torch.inference_mode(False):
                again = layer(x.sin())
            inside = inside + layer(x).float()
        return y, again, inside

    def results(function: Function) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 12).view(3, 4)
        with torch.autocast(**BF16), torch.set_grad_enabled(autograd):
            y, again, inside = function(x)
        if autograd:
            layer.zero_grad()
            (y.float().square().sum() + again.float().sum()).backward()
            return [y, again, inside, layer.weight.grad, layer.bias.grad]
        return [y, again, inside]

    torch._dynamo.reset()
    compiled = torch.compile(function, **AOT_EAGER)
    for _ in range(2):
        assert_same_bits(results(compiled), results(function))


@pytest.mark.parametrize("autograd", [True, False])
@pytest.mark.parametrize("nested", [True, False], ids=["region", "checkpoint"])
def test_composites_in_inference_mode_inside_of_a_body(nested: bool, autograd: bool) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = F.bilinear(x, x.sin(), w).float().sum()
        return x @ w[0] * scale.clone()

    region = torch.compiler.nested_compile_region(body)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if nested:
            return region(x, w) - 1
        return checkpoint(body, x, w, use_reentrant=False) - 1

    def results(function: Function) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        w = torch.linspace(-2, 1, 32).view(2, 4, 4).requires_grad_()
        with torch.autocast(**BF16), torch.set_grad_enabled(autograd):
            y = function(x, w)
        return [y, *(torch.autograd.grad(y.float().square().sum(), (x, w)) if autograd else ())]

    torch._dynamo.reset()
    assert_same_bits(results(torch.compile(function, **AOT_EAGER)), results(function))
