"""Inductor rounds to bfloat16 and float16 where eager mode does, inside of its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import BF16

Chain = Callable[[Tensor, Tensor, Tensor], Tensor]
CHAINS: dict[str, Chain] = {
    "gated": lambda x, w, v: F.silu(x @ w) * (x @ v),
    "two gates": lambda x, w, v: (x @ w).tanh() * (x @ v).sigmoid() + (x @ w) * 0.1,
    "residual": lambda x, w, v: x.bfloat16() + F.relu(x @ w) * 0.3 - (x @ v),
    "a cast and back": lambda x, w, v: x.bfloat16().float() * 3 + 1,
    "float16": lambda x, w, v: (x.half() * 0.3 + 0.1) * x.half(),
    "sum": lambda x, w, v: ((x @ w) * 0.3).sum(1) + 0.1,
    "softmax": lambda x, w, v: F.softmax(x @ w, -1) * 1.3,
    "joined": lambda x, w, v: torch.cat([(x @ w) * 0.3, (x @ v) * 0.7]) * 1.3 + 1,
}


def results(backend: str, **options: Any) -> list[list[Tensor]]:
    """Of each chain its result and its gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [torch.randn(n, 64, generator=generator).div_(k).requires_grad_() for n, k in sizes]
        for sizes in [((32, 1), (64, 8), (64, 8))] * len(CHAINS)
    ]

    def function(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [chain(*own) for chain, own in zip(CHAINS.values(), inputs, strict=True)]

    torch._dynamo.reset()
    with torch.autocast(**BF16):
        made = torch.compile(function, backend=backend, **options)(inputs)
    torch.stack([y.float().square().sum() for y in made]).sum().backward()
    grads = [[x.grad for x in own if x.grad is not None] for own in inputs]
    return [[y.detach(), *own] for y, own in zip(made, grads, strict=True)]


@functools.cache
def compared() -> dict[str, list[list[Tensor]]]:
    apart = {"inductor": {"emulate_precision_casts": False}}
    return {
        "eager": results("eager"),
        "compiled": results("smart_autocast"),
        "not rounded": results("smart_autocast", options=apart),
    }


@pytest.mark.parametrize("name", CHAINS)
def test_eager_modes_bits(name: str) -> None:
    expected, found, not_rounded = (of[list(CHAINS).index(name)] for of in compared().values())
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, not_rounded, expected))
