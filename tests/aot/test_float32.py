"""With Inductor on the CPU, float32 is computed as ATen does it: where products are added before
they are rounded, where powers are products, and near 0."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import BF16, assert_same_bits

Program = Callable[[Tensor, Tensor, Tensor], Tensor]

PROGRAMS: dict[str, Program] = {
    "alpha": lambda x, y, z: torch.add(x, y, alpha=0.3) + torch.sub(z, x, alpha=0.7),
    "alpha of a number": lambda x, y, z: torch.add(x, 0.7, alpha=0.3),
    "alpha of float64": lambda x, y, z: torch.add(x.double(), y.double(), alpha=0.3),
    "a product added": lambda x, y, z: torch.addcmul(x, y, z),
    "a scaled product added": lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
    "a scaled quotient added": lambda x, y, z: torch.ops.aten.addcdiv(x, y, z + 2, value=0.3),
    "between two": lambda x, y, z: torch.lerp(x, y, 0.2) * torch.lerp(z, x, 0.8),
    "between two by a tensor": lambda x, y, z: torch.lerp(x, y.detach(), z.sigmoid()),
    "tanh": lambda x, y, z: torch.ops.aten.tanh_backward(x, y),
    "sigmoid": lambda x, y, z: torch.sigmoid(x),
    "silu": lambda x, y, z: F.silu(x),
    "mish": lambda x, y, z: F.mish(x),
    "powers": lambda x, y, z: (x.abs() + 0.5) ** -2 + y**4 + (z.abs() + 0.5) ** -3,
    "reciprocal root": lambda x, y, z: (x.detach().abs() + 0.5) ** -0.5 + y,
    "decimals": lambda x, y, z: torch.round(x, decimals=3) + y,
    "steps": lambda x, y, z: torch.linspace(-3, 5, 64) * x,
    "steps of bfloat16": lambda x, y, z: torch.linspace(-1, 1, 64, dtype=torch.bfloat16) * x,
    "a grid": lambda x, y, z: F.grid_sample(
        x[None, None], y[None, :, :20].reshape(1, 20, -1, 2), align_corners=False
    ),
}


OF_LISTS = torch.__version__ >= "2.13"
"""Before, Inductor has formulas of its own for lists, some of which it takes in their place."""

if OF_LISTS:
    PROGRAMS["lists"] = lambda x, y, z: torch.cat(torch._foreach_addcmul([x], [y], [z], value=0.3))


@functools.cache
def results(backend: str | None) -> dict[str, list[Tensor]]:
    """Of each program its result and its gradients. (Of sizes that are multiples of 16: what is
    left of others ATen computes by functions of single numbers, whose last bits are others.)"""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [torch.randn(20, 64, generator=generator).requires_grad_() for _ in range(3)]
        for _ in PROGRAMS
    ]

    def function(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [f(*own) for f, own in zip(PROGRAMS.values(), inputs, strict=True)]

    torch._dynamo.reset()
    with torch.autocast(**BF16):
        made = (torch.compile(function, backend=backend) if backend else function)(inputs)
    sum((y.double() * torch.linspace(1, 2, y.shape[-1]).double()).sum() for y in made).backward()
    grads = ([x.grad for x in own if x.grad is not None] for own in inputs)
    return {n: [y.detach(), *g] for n, y, g in zip(PROGRAMS, made, grads, strict=True)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_modes_bits(name: str) -> None:
    assert_same_bits(results("smart_autocast")[name], results(None)[name])


@pytest.mark.slow
@pytest.mark.skipif(not "2.13" <= torch.__version__ < "2.14", reason="stock Inductor of torch 2.13")
@pytest.mark.parametrize("name", PROGRAMS)
def test_stock_has_others(name: str) -> None:
    pairs = zip(results("inductor")[name], results(None)[name], strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def stepped(backend: str | None, **arguments: Any) -> list[Tensor]:
    """Parameters and their averages, after two steps of an optimizer."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in ((33, 20), (33,))]
    averages = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(parameters, 0.1, **arguments)

    def step() -> None:
        optimizer.step()
        torch._foreach_lerp_(averages, [p.detach() for p in parameters], 0.1)

    torch._dynamo.reset()
    call = torch.compile(step, backend=backend) if backend else step
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn_like(p)
        call()
    return [p.detach() for p in parameters] + averages


@pytest.mark.skipif(not OF_LISTS, reason="Inductor's formulas for lists")
def test_steps_of_an_optimizer() -> None:
    arguments = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    assert_same_bits(stepped("smart_autocast", **arguments), stepped(None, **arguments))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "expm1": torch.expm1,
    "atanh": torch.atanh,
    "erf": torch.erf,
    "acosh": lambda x: torch.acosh(1e30 * x.abs() + 1),
    "elu": lambda x: F.elu(-x.abs()),
    "selu": lambda x: F.selu(-x.abs()),
    "celu": lambda x: F.celu(-x.abs(), 1.5),
}


@functools.cache
def of_numbers(backend: str | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of what is near 0."""

    def function(x: Tensor) -> list[Tensor]:
        return [f(x) for f in FUNCTIONS.values()]

    torch._dynamo.reset()
    call = torch.compile(function, backend=backend) if backend else function
    x = torch.randn(320, generator=torch.Generator().manual_seed(0)) * 1e-8
    return dict(zip(FUNCTIONS, call(x.to(dtype)), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_near_0(name: str, dtype: torch.dtype) -> None:
    """Stock Inductor has 0 for all, and for acosh infinity."""
    found, expected = (of_numbers(b, dtype)[name] for b in ("smart_autocast", None))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    if (name, dtype) != ("erf", torch.bfloat16):  # there eager mode has 0, too
        assert expected.isfinite().all()
        assert (expected != 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decimals_of_low_precision(dtype: torch.dtype) -> None:
    """1000 times the number is infinite in float16."""

    def function(x: Tensor) -> list[Tensor]:
        return [torch.round(x, decimals=n) for n in (-1, 1, 3)]

    torch._dynamo.reset()
    x = (torch.randn(640, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    assert_same_bits(torch.compile(function, backend="smart_autocast")(x), function(x))


@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.5, 4, -3])
def test_powers_of_float16(exponent: float) -> None:
    """The CPU has roots of it as powers, which of -inf and of -0 are others."""
    torch._dynamo.reset()
    x = torch.randn(61, generator=torch.Generator().manual_seed(0)).half().abs()
    x = torch.cat([x, torch.tensor([0, -0.0, torch.inf, -torch.inf]).half()])
    found = torch.compile(lambda x: x**exponent, backend="smart_autocast")(x)
    torch.testing.assert_close(found, x**exponent, rtol=1e-3, atol=0, equal_nan=True)


def test_gelu_is_no_call_of_erf() -> None:
    """Only what a program calls is left to ATen."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    x = torch.randn(64, 33)
    both = torch.compile(lambda x: (F.gelu(x), torch.erf(x)), backend="smart_autocast")
    _, codes = run_and_get_code(both, x)
    code = "".join(codes)
    assert code.count("aten.erf.default(") == 1
    assert ".erf()" in code or "std::erf(" in code
