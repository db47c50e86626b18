"""What Inductor's ops write to, in place of a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import assert_same_bits

ROWS = torch.tensor([2, 0, 3, 1])


@torch.library.custom_op("smart_autocast_tests::add_rows_", mutates_args=("x",))
def add_rows_(x: torch.Tensor, rows: torch.Tensor) -> None:
    for i in range(len(x)):
        x[i] += rows[i]


@torch.library.custom_op("smart_autocast_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


def shifts(x: torch.Tensor) -> Any:
    x[1:] = x[:-1].clone()


def shifts_what_it_computes(x: torch.Tensor) -> Any:
    y = x @ x
    torch.as_strided(y, (3, 4), (4, 1), 4).copy_(y[:3].clone())
    return y


def adds_itself_turned(x: torch.Tensor) -> Any:
    y = x * 2
    y.index_add_(0, ROWS, y.t().clone())
    return y


def sets_itself_turned(x: torch.Tensor) -> Any:
    y = x @ x
    y[ROWS] = y.t().clone()
    return y


def clears_what_was_scattered_to(x: torch.Tensor) -> Any:
    y = torch.slice_scatter(x, x[1:3] * 0 + 7, 0, 1, 3)
    x.zero_()
    return y


def keeps_what_it_wrote(x: torch.Tensor) -> Any:
    x[1] = 5
    y = x.clone()
    x.mul_(2)
    return y


def divides_by_the_sum(x: torch.Tensor) -> Any:
    x.index_add_(0, ROWS, x.flip(1))
    x.div_(x.sum(0, keepdim=True) + 1)


def turns_what_a_custom_op_wrote(x: torch.Tensor) -> Any:
    double_(x)
    x.copy_(x.flip(0) * 2)


def swaps(x: torch.Tensor, y: torch.Tensor) -> Any:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def returns_a_copy(x: torch.Tensor) -> Any:
    x[1] = 5
    return x.clone()


def copies_and_writes(source: torch.Tensor, x: torch.Tensor) -> Any:
    x[0:, :] = source[0:, :]
    source.add_(1)


def adds_itself_turned_by_a_custom_op(x: torch.Tensor) -> Any:
    add_rows_(x, x.t().clone())


def adds_itself_turned_in_a_list(x: torch.Tensor) -> Any:
    torch._foreach_add_([x], [x.flip(0)])


def swaps_lists(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch._foreach_copy_([x, y], [y.clone(), x.clone()])


def doubles_a_copy(x: torch.Tensor) -> Any:
    y = x.clone()
    double_(y)
    x.zero_()
    return y


def keeps_what_a_custom_op_wrote(x: torch.Tensor) -> Any:
    double_(x)
    y = x.clone()
    x.zero_()
    return y, y.clone()


def run(function: Callable[..., Any], count: int) -> tuple[Any, Any]:
    """Results and what has become of the inputs; then all of these have been written to."""
    numbers = torch.arange(16.0).view(4, 4)
    inputs = (numbers - 3, numbers + 1)[:count]
    results = function(*inputs)
    for x in inputs:
        x.add_(100)
    return results, inputs


@pytest.mark.parametrize("mode", [None, "lite"])
@pytest.mark.parametrize(
    "case",
    [
        shifts,
        shifts_what_it_computes,
        adds_itself_turned,
        sets_itself_turned,
        clears_what_was_scattered_to,
        keeps_what_it_wrote,
        divides_by_the_sum,
        turns_what_a_custom_op_wrote,
        swaps,
        returns_a_copy,
        copies_and_writes,
        adds_itself_turned_by_a_custom_op,
        adds_itself_turned_in_a_list,
        swaps_lists,
        doubles_a_copy,
        keeps_what_a_custom_op_wrote,
    ],
)
def test_numbers_of_what_is_written_in_place(case: Callable[..., Any], mode: str | None) -> None:
    count = case.__code__.co_argcount
    torch._dynamo.reset()
    expected = run(case, count)
    found = run(torch.compile(case, backend="smart_autocast", mode=mode), count)
    assert_same_bits(found, expected)
