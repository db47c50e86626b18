"""Custom autograd functions in a compiled region, and `torch.func` transforms in and around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.aot.harness import (
    AOT_EAGER,
    ORACLE,
    Case,
    assert_like_the_oracle,
    autocast,
    each_way,
    inside_region,
    island,
    leaves,
    same_bits,
)
from tests.support import Product, assert_same_bits


class FullPrecision(torch.autograd.Function):
    """Float32 forward and backward, whatever the state."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class AsInForward(torch.autograd.Function):
    """The backward has the state of the forward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        return (grad @ w.t()).float(), (x.t() @ grad).float()


class ReadsItsResult(torch.autograd.Function):
    """A product of the backward that needs no gradient: nothing but the place where the code stands
    says that it belongs there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = x @ w
        ctx.save_for_backward(x, w, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, result = ctx.saved_tensors
        return (grad.float() @ w.t()).to(x.dtype), (x.t() @ result.to(x.dtype)).to(w.dtype)


class ReadsInThreeDimensions(torch.autograd.Function):
    """A product of the backward that needs no gradient, of a view that it makes: autocast casts
    before that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        grad = (x @ w).cos() * grad
        return (grad @ w.t()).to(x.dtype), (x.flatten(0, 1).t() @ grad.flatten(0, 1)).to(w.dtype)


class DrawsBackwards(Product):
    """Random numbers that are drawn in the backward."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        noisy = grad.float() * torch.rand_like(grad, dtype=torch.float32)
        return (noisy @ w.t()).to(x.dtype), (x.t() @ grad.to(x.dtype)).to(w.dtype)


class NeedsAutocast(ReadsItsResult):
    """A backward that mixes dtypes, which only autocast brings together."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, result = ctx.saved_tensors
        return (grad @ w.t()).float(), (x.t() @ result).float()


def computes_in_float32(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(FullPrecision.apply(x @ w, w), w.t())


def computes_as_in_forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(x, AsInForward.apply(w.sin(), w))


def reads_its_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ReadsItsResult.apply(x, w) @ w


def reads_in_three_dimensions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ReadsInThreeDimensions.apply(x.sin().unflatten(0, (2, -1)), w) @ w


def draws_backwards(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return DrawsBackwards.apply(x, w) @ w


FUNCTIONS = {
    f.__name__: f
    for f in (
        computes_in_float32,
        computes_as_in_forward,
        reads_its_result,
        reads_in_three_dimensions,
        draws_backwards,
    )
}


@pytest.mark.parametrize(("name", "way"), each_way(FUNCTIONS))
def test_custom_functions(name: str, way: str) -> None:
    assert_like_the_oracle(Case(FUNCTIONS[name]), way)


def test_a_custom_backward_that_needs_autocast() -> None:
    """Eager mode raises where such a backward runs outside of autocast, and only there."""

    def gradients(inside: bool, **arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        x, w = leaves()
        compiled = torch.compile(NeedsAutocast.apply, **arguments)
        with autocast(True):
            result = compiled(x, w)
        with autocast(inside):
            result.sum().backward()
        return [x.grad, w.grad]

    assert_same_bits(gradients(True, **AOT_EAGER), gradients(True, **ORACLE))
    for arguments in (ORACLE, AOT_EAGER):
        with pytest.raises(RuntimeError, match="same dtype"):
            gradients(False, **arguments)


def scalar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).float().sin().sum() + island(x[None], w).sum()


def gradient_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(torch.func.grad(lambda v: scalar(v[0], w))(x), w)


def vmap_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(torch.func.vmap(lambda row: (row @ w).sin())(x), w)


@pytest.mark.parametrize(("function", "way"), each_way([gradient_inside, vmap_inside]))
def test_transforms_inside(function: Callable[..., Any], way: str) -> None:
    assert_like_the_oracle(Case(function), way)


TRANSFORMS = {
    "grad": torch.func.grad,
    "grad_and_value": torch.func.grad_and_value,
    "jacrev": lambda f: torch.func.jacrev(f, argnums=1),
    "vmap": lambda f: torch.func.vmap(f, in_dims=(0, None)),
    "vmap_of_grad": lambda f: torch.func.vmap(torch.func.grad(f), in_dims=(0, None)),
}


@pytest.mark.parametrize(("name", "way"), each_way(TRANSFORMS))
def test_transforms_around(name: str, way: str) -> None:
    """The transform's backward runs where it is called: under the state around both."""

    def result(around_autocast: bool, **arguments: Any) -> Any:
        torch._dynamo.reset()
        function = inside_region(scalar) if way == "region" else scalar
        compiled = torch.compile(function, **arguments)
        x, w = (leaf.detach() for leaf in leaves())
        with autocast(around_autocast):
            return TRANSFORMS[name](compiled)(x if "vmap" in name else x[0], w)

    expected = result(way == "ambient", **ORACLE)
    assert_same_bits(result(way == "ambient", **AOT_EAGER), expected)
    if way == "off":
        assert not same_bits(result(True, **ORACLE), expected)
