"""What is compared with its own largest element, by the code or by a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import BF16

Function = Callable[..., torch.Tensor]


def least_angle(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.atan2(x, y).amin(1)


def largest_activation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(x * y).amax(1)


def largest_norm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm((x * y).tanh(), float("inf"), 1)


def pooled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x @ w
    h = h + h @ w
    return h + h.amax(0, keepdim=True)


def largest_of_all(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (F.gelu(x @ w) * 1.1).max()


def twice_the_largest(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(x @ w) * 1.1
    return torch.where(h == h.amax(1, keepdim=True), h * 2, h)


def gradients(function: Function, size: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator).requires_grad_()
    y = torch.randn(size, generator=generator).requires_grad_()
    result = function(x, y)
    return [result.float(), *torch.autograd.grad(result.float().square().sum(), (x, y))]


@pytest.mark.parametrize("function", [least_angle, largest_activation, largest_norm])
def test_gradients_in_float32(function: Function) -> None:
    torch._dynamo.reset()
    found = gradients(torch.compile(function, backend="smart_autocast"), (5, 7))
    torch.testing.assert_close(found, gradients(function, (5, 7)))


@pytest.mark.parametrize("function", [pooled, largest_of_all, twice_the_largest])
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_in_bfloat16(function: Function, checkpointed: bool) -> None:
    def called(*inputs: torch.Tensor) -> Any:
        if checkpointed:
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)

    torch._dynamo.reset()
    with torch.autocast(**BF16):
        expected = gradients(called, (8, 8))
        found = gradients(torch.compile(called, backend="smart_autocast"), (8, 8))
    scale = max(float(t.detach().abs().max()) for t in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * scale)
