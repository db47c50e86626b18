"""Kernels of Inductor's that are put right, and what AOTAutograd makes of ops for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support import assert_same_bits, weighted_sum

WAYS: list[dict[str, Any]] = [
    {"backend": "smart_autocast"},
    {"backend": "smart_autocast", "options": {"inner": "aot_eager"}},
]


@pytest.mark.parametrize("way", WAYS, ids=["inductor", "aot_eager"])
def test_the_gradient_of_average_pooling_whose_last_window_stands_out(way: dict[str, Any]) -> None:
    def pools(x: torch.Tensor) -> list[torch.Tensor]:
        images, volumes = x[None], x[None, :, :, :5, None].expand(-1, -1, -1, -1, 3)
        return [
            F.avg_pool1d(x[0], 3, 2, ceil_mode=True),
            F.avg_pool2d(images, 2, 2, ceil_mode=True),
            F.avg_pool2d(images, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            F.avg_pool3d(volumes, 2, 2, ceil_mode=True),
        ]

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        x = torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return torch.autograd.grad(weighted_sum(function(x)), x)[0]

    torch._dynamo.reset()
    torch.testing.assert_close(gradient(torch.compile(pools, **way)), gradient(pools))


def test_the_least_and_the_largest_of_bytes() -> None:
    def extremes(low: torch.Tensor, high: torch.Tensor) -> Any:
        return (
            [low.amax(1), low.max(), low.argmax(), low.max(1), low.argmax(1)],
            [high.amin(1), high.min(), high.argmin(), high.min(1), torch.aminmax(high)],
        )

    numbers = torch.arange(2, 72).repeat(5, 1)
    low, high = (-numbers).to(torch.int8), numbers.to(torch.uint8)
    torch._dynamo.reset()
    assert_same_bits(
        torch.compile(extremes, backend="smart_autocast")(low, high), extremes(low, high)
    )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("way", WAYS, ids=["inductor", "aot_eager"])
def test_multilabel_margins_where_targets_end_early(way: dict[str, Any], reduction: str) -> None:
    targets = torch.tensor([[3, 0, -1, 1], [1, -1, 2, 3], [0, 1, 2, 3], [-1, 0, 0, 0]])

    def losses(x: torch.Tensor) -> list[torch.Tensor]:
        loss = torch.nn.MultiLabelMarginLoss(reduction=reduction)
        return [loss(x, targets), loss(x[0], targets[0])]

    def results(function: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.arange(-5.0, 11).view(4, 4).div(4).requires_grad_()
        found = function(x)
        return [*found, *torch.autograd.grad(weighted_sum(found), x)]

    torch._dynamo.reset()
    torch.testing.assert_close(results(torch.compile(losses, **way)), results(losses))


@pytest.mark.parametrize("way", WAYS, ids=["inductor", "aot_eager"])
@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_returns_what_it_is_given(
    p: float, training: bool, way: dict[str, Any]
) -> None:
    def adds(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, p, training)
        y += 1
        return x + y

    torch._dynamo.reset()
    x = torch.zeros(3)
    assert torch.compile(adds, **way)(x).tolist() == [2.0] * 3
    assert x.tolist() == [1.0] * 3


def test_index_ops_on_what_is_expanded() -> None:
    def adds(rows: torch.Tensor) -> list[torch.Tensor]:
        zeros, places = torch.zeros(1, 4).expand(4, -1), torch.tensor([0, 2])
        return [zeros.index_add(0, places, rows), zeros.index_copy(0, places, rows)]

    torch._dynamo.reset()
    rows = torch.arange(8.0).view(2, 4)
    assert_same_bits(torch.compile(adds, backend="smart_autocast")(rows), adds(rows))
