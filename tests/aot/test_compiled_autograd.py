"""Compiled autograd around backwards outside of autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import compiled_autograd

from tests.aot.harness import (
    AOT_EAGER,
    ORACLE,
    STOCK,
    autocast,
    each_way,
    inside_region,
    island,
    leaves,
    loss_of,
    mixed,
)
from tests.support import assert_same_bits


def drops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(F.dropout(x @ w, 0.3), w)


def gradients(
    function: Callable[..., Any], way: str, compiler: dict[str, Any] | None, **arguments: Any
) -> list[Any]:
    torch._dynamo.reset()
    compiled = torch.compile(inside_region(function) if way == "region" else function, **arguments)
    given = leaves()
    torch.manual_seed(1)
    with autocast(way == "ambient"):
        loss = loss_of(compiled(*given))
    around = compiled_autograd._enable(torch.compile(**compiler)) if compiler else nullcontext()
    with around:
        loss.backward()
    return [leaf.grad for leaf in given]


@pytest.mark.parametrize("compiler", [ORACLE, STOCK, AOT_EAGER], ids=["eager", "stock", "ours"])
@pytest.mark.parametrize(("function", "way"), each_way([mixed, drops]))
def test_compiled_autograd(function: Callable[..., Any], compiler: dict, way: str) -> None:
    """Whoever compiles the backward graph."""
    captured = torch._dynamo.utils.counters["compiled_autograd"]
    captured.clear()
    actual = gradients(function, way, compiler, **AOT_EAGER)
    assert captured["captures"] == 1
    assert_same_bits(actual, gradients(function, way, None, **ORACLE))
