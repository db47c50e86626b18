"""Calls inside `torch.func` transforms: proved as one, or left under autocast as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autocast_backend import AutocastState, lower_autocast
from tests.support import BF16, assert_same_bits, capture, lower_with_report, targets, tensors

Function = Callable[..., Any]


def under(function: Function) -> Function:
    def region(*inputs: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            return function(*inputs)

    return region


def mapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda v: F.linear(v, w * 2).sin())(x) @ x[0]


def over_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda v, u: F.mse_loss(v @ u, v))(x, y.expand(3, 8, 8))


def nested(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = torch.func.vmap(lambda v, u: (v * u).sum(), in_dims=(None, 0))
    return torch.func.vmap(lambda v: inner(v[0], y))(x)


def nothing_to_cast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda v: v.sin() * y + v)(x)


@pytest.mark.parametrize(
    ("function", "casts"), [(mapped, 4), (over_both, 4), (nested, 0), (nothing_to_cast, 0)]
)
def test_a_span_is_lowered(function: Function, casts: int) -> None:
    """Outputs and gradients by bits, through a graph without brackets."""

    def results(run: Function) -> list[Any]:
        x, y = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.eye(8) / 3
        inputs = [t.clone().requires_grad_() for t in (x, y)]
        outputs = tensors(run(*inputs))
        torch.cat([t.float().flatten() for t in outputs]).square().mean().backward()
        return [*outputs, *(t.grad for t in inputs)]

    # Of values that are no leaves: eager's cache has nothing to do with them.
    region = under(lambda x, y: function(x.exp(), y.exp()))
    inputs = torch.randn(3, 8, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
    graph = capture(region, *inputs)
    report = lower_with_report(graph, AutocastState.off())
    assert report.bracketed == []
    assert report.casts == casts, graph.code
    assert_same_bits(results(graph), results(region))


def test_a_gradient_inside_that_casts_its_leaf_twice_stays_under_autocast() -> None:
    """As one bracket around the whole span."""
    loss = torch.func.grad(lambda v: (v @ v).sin().sum())
    graph = capture(under(loss), torch.randn(8, 8))
    report = lower_with_report(graph, AutocastState.off())
    assert report.bracketed
    assert all("of a leaf of the transform" in b.reason for b in report.bracketed)
    names = targets(graph)
    assert names.count("_enter_autocast") == 1
    assert names.index("_enter_autocast") < names.index("_grad_increment_nesting")
    assert names.index("_exit_autocast") > names.index("_grad_decrement_nesting")


def test_a_gradient_inside_is_lowered() -> None:
    """With its backward, which runs where it stands, under autocast too."""
    region = under(torch.func.grad(lambda v: (v @ v.cos()).sin().sum()))
    x = torch.randn(8, 8)
    graph = capture(region, x)
    report = lower_with_report(graph, AutocastState.off())
    assert (report.bracketed, report.lowered, report.casts) == ([], 1, 2)
    assert_same_bits(tensors(graph(x)), tensors(region(x)))


def test_a_span_is_proved_without_validation_too() -> None:
    """No table has it, and the casts of weights that it shares with other calls are found so."""
    graph = capture(under(lambda x: mapped(x, torch.eye(8))), torch.randn(3, 8, 8))
    assert lower_with_report(graph, AutocastState.off(), validate="off").bracketed == []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda v: v @ w)(x).float().sin() + (x.cos() @ w).float()

    def gradient(function: Function) -> torch.Tensor:
        w = torch.linspace(-2, 2, 64).view(8, 8).requires_grad_()
        output = under(function)(torch.linspace(-1, 3, 64).view(8, 8), w)
        return torch.autograd.grad(output.square().sum(), w)[0]

    options = {"inner": "aot_eager", "validate": "off"}
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="smart_autocast", options=options)
    assert_same_bits(gradient(compiled), gradient(function))


def dot(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum()


def over_weights(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda v, u: (v @ u).tanh())(x, w)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (over_weights, 3),
        (lambda x, w: over_weights(over_weights(x, w), w), 1),
        (lambda x, w: over_weights(x, w) + (x.cos() @ w), 1),
        (lambda x, w: (x.cos() @ w) + over_weights(x, w).sin(), 1),
        (lambda x, w: torch.func.vmap(over_weights)(x[None], w[None]) + (x @ w), 1),
        (lambda x, w: over_weights(x, w.transpose(0, 1)) + over_weights(x, w), 1),
        (lambda x, w: over_weights(x, w) * w.sum(), 1),
        (lambda x, w: torch.func.vmap(lambda v, u: v @ u + u.mm(v) * u)(x, w) + x @ w, 1),
        (lambda x, w: torch.func.vmap(torch.func.grad(dot))(x, w) + x @ w, 1),
    ],
)
def test_weights_that_a_transform_slices(function: Function, calls: int) -> None:
    """Eager's cache has the cast of the whole one, below the transform."""

    def gradients(function: Function) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(4, 4, 4, generator=generator) for _ in range(2))
        w.requires_grad_()
        outputs = under(lambda: [function(x + i, w) for i in range(calls)])()
        sum(y.float().square().sum() for y in outputs).backward()
        return tensors([outputs, w.grad])

    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend="smart_autocast", options={"inner": "aot_eager"}, dynamic=False
    )
    assert_same_bits(gradients(compiled), gradients(function))


def leaf_of_a_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(under(lambda v: ((v @ w).sin() @ v).sum()))(x)


def weight_read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(under(lambda v: v @ w @ w))(x)


def weight_read_outside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def island(v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = v @ w
        return y + v @ w

    return under(lambda: torch.cat([torch.func.vmap(island)(x), x.sin() @ w]))()


@pytest.mark.parametrize("function", [leaf_of_a_gradient, weight_read_twice, weight_read_outside])
def test_a_part_of_a_transform_under_another_state(function: Function) -> None:
    """No call is asked about alone, and what eager's cache shares is shared, or left to eager."""

    def results(function: Function) -> list[torch.Tensor]:
        x, data = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
        w = data.clone().requires_grad_()  # a view is no weight
        output = function(x, w)
        return [output, *torch.autograd.grad(output.float().square().sum(), w)]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="smart_autocast", options={"inner": "aot_eager"})
    assert_same_bits(results(compiled), results(function))


def test_a_lowered_span_serves_other_dtypes() -> None:
    region = under(lambda x: mapped(x, torch.eye(8)))
    x = torch.randn(3, 8, 8)
    lowered = lower_autocast(capture(region, x))
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(tensors(lowered(x.to(dtype))), tensors(region(x.to(dtype))))


def test_a_transform_that_raises_leaves_forward_mode_ad_off() -> None:
    """The casts of the policy table do not fit a hessian's tangents: what is tried on fake tensors
    raises half-way, between the graph's enter and exit of forward-mode AD."""

    def curvature(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.func.hessian(lambda x: (w @ (w @ x).tanh()).float().sum())(x)

    x, w = torch.randn(6), torch.randn(6, 6, requires_grad=True)
    arguments = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}
    with torch.autocast(**BF16):
        assert_same_bits(torch.compile(curvature, **arguments)(x, w), curvature(x, w))
    with torch.autograd.forward_ad.dual_level():  # raises where one is open
        pass
