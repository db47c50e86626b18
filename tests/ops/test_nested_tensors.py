"""Nested tensors: what takes them, and what says that it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autocast_backend import (
    autocast_to_bf16,
    cast_with_stats,
    multi_cast,
    promote,
    unscale_cast,
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

bf16, f32 = torch.bfloat16, torch.float32

REFUSING: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "multi_cast": ("tensors", lambda x: multi_cast([x], bf16)),
    "multi_cast, others beside it": (
        "tensors",
        lambda x: multi_cast([torch.ones(9)] * 20 + [x], bf16),
    ),
    "multi_cast, out": ("out", lambda x: multi_cast([torch.ones(9)], f32, out=[x])),
    "multi_cast, stochastic": (
        "tensors",
        lambda x: multi_cast([x], bf16, rounding="stochastic", seed=0),
    ),
    "cast_with_stats": ("tensor", lambda x: cast_with_stats(x, bf16)),
    "unscale_cast": ("grads", lambda x: unscale_cast([x], torch.ones(()))),
    "unscale_cast, scale": ("scale", lambda x: unscale_cast([torch.ones(9)], x)),
    "unscale_cast, out": (
        "out",
        lambda x: unscale_cast([torch.ones(9)], torch.ones(()), out=[x]),
    ),
}


@pytest.fixture(params=[torch.strided, torch.jagged], ids=["strided", "jagged"])
def nested(request: pytest.FixtureRequest) -> Tensor:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    return torch.nested.nested_tensor(parts, layout=request.param)


@pytest.mark.parametrize("name", REFUSING)
def test_ops_on_memory_say_that_they_take_none(name: str, nested: Tensor) -> None:
    argument, call = REFUSING[name]
    expected = rf"'{argument}' must be a dense tensor .* got a nested tensor; pass .*values\(\)"
    with pytest.raises(RuntimeError, match=expected):
        call(nested)
    with torch.no_grad(), pytest.raises(RuntimeError, match=expected):
        call(nested)
    if name == "multi_cast":  # the others take none that require grad
        with pytest.raises(RuntimeError, match=expected):
            call(nested.requires_grad_())


def test_smart_casts_take_them(nested: Tensor) -> None:
    low = autocast_to_bf16(nested)
    assert low.is_nested
    assert low.dtype == bf16
    torch.testing.assert_close(low.values(), nested.values().to(bf16), rtol=0, atol=0)
    wide, _ = promote([low, torch.ones(2)])
    assert wide.dtype == f32
    torch.testing.assert_close(wide.values(), low.values().float(), rtol=0, atol=0)
