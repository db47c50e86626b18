from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cast_counter import CastCounter
from torch import nn

COMPILERS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "stock": lambda model: torch.compile(model, backend="aot_eager"),
    "smart_autocast": lambda model: torch.compile(
        model, backend="smart_autocast", options={"inner": "aot_eager"}
    ),
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_counts_forward_and_backward_of_a_linear_layer(compiler: str) -> None:
    model = nn.Linear(4, 4)
    compiled = COMPILERS[compiler](model)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(torch.ones(2, 4)).float().sum()

    forward().backward()  # compiles
    with CastCounter() as counter:
        loss = forward()
    assert counter.casts == 4  # input, weight, bias; the result to float32
    with CastCounter() as counter:
        loss.backward()
    assert counter.casts == 3  # the result's gradient; the gradients of weight and bias


def test_compiled_functions_stay_compiled_under_the_counter() -> None:
    def cast_where_compiled(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() if torch.compiler.is_compiling() else x.clone()

    compiled = torch.compile(cast_where_compiled, backend="aot_eager")
    compiled(torch.ones(3))
    with CastCounter() as counter:
        result = compiled(torch.ones(3))
    assert result.dtype == torch.bfloat16
    assert counter.casts == 1


def test_counts_each_tensor_of_an_op_and_only_changes_between_floating_dtypes() -> None:
    from autocast_backend import multi_cast, promote

    x = torch.ones(3)
    with CastCounter() as counter:
        x.clone()
        x.to(torch.float32, copy=True)
        x.to(torch.int64).float()
        torch.ones(3, dtype=torch.bool).bfloat16()
    assert counter.casts == 0
    with CastCounter() as counter:
        promote([x, x.bfloat16(), x.half(), x.double()])
    assert counter.casts == 3 + 2  # three to make the arguments; bfloat16 and half to float32
    with CastCounter() as counter:
        multi_cast([x, x.double()], torch.bfloat16)
        multi_cast([x], torch.bfloat16, out=[torch.empty(3, dtype=torch.bfloat16)])
    assert counter.casts == 1 + 2 + 1  # one to make an argument


def test_counts_ops_that_take_or_give_more_than_they_cast() -> None:
    from autocast_backend import cast_with_stats, unscale_cast

    x, scale = torch.ones(3), torch.tensor(2.0)
    with CastCounter() as counter:
        cast_with_stats(x, torch.bfloat16)
    assert counter.casts == 1
    half = x.half()
    with CastCounter() as counter:
        unscale_cast([half, x], scale)
        unscale_cast([half, x], scale, out=[torch.empty(3), torch.empty(3)])
    assert counter.casts == 2
