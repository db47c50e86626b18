"""Indices and numbers that Inductor computes with while it compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import assert_same_bits


def masks(n: int) -> list[Tensor]:
    i = torch.arange(-4, n)
    return [
        i.bool(),
        i.logical_not(),
        i.float().logical_not(),
        (i - i[:, None]).bool(),
        i.logical_and(i - 3),
        i.logical_or(i - i),
        torch.where(i.bool(), i, 7),
        i[4:].any(),
        i[5:].bool().all(),
    ]


def ends(n: int) -> list[Tensor]:
    """Numbers that other dtypes do not hold."""
    i = torch.arange(n)
    narrow = [i.to(torch.uint8), (i * 10).to(torch.int8), (i * 5000).to(torch.int16)]
    rounded = [i.bfloat16(), (i * 100).bfloat16(), (i * 13).half(), (i + 2**24).float()]
    rounded += [torch.arange(n, dtype=torch.bfloat16), i.bfloat16() * 3]
    return [
        *narrow,
        *rounded,
        *(x.long() for x in narrow + rounded),
        *(x + x for x in narrow + rounded),
        (i.int() * 2**26).long(),
    ]


def numbers(n: int) -> list[Tensor]:
    """The same of tensors of one number."""
    tenth = torch.full((2, n), 0.1).t()
    three = tenth + torch.full((2, n), 0.2).t()
    low = torch.ones(2, n, dtype=torch.bfloat16).t() * 0.1
    return [
        *(tenth.to(d).float() for d in (torch.bfloat16, torch.float16, torch.float64)),
        *(x.double() for x in (tenth, three, low)),
        torch.full((2, n), 7e4).t().half().float(),
    ]


@pytest.mark.parametrize("make", [masks, ends, numbers])
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_what_other_dtypes_hold(make: Callable[[int], list[Tensor]], dynamic: bool) -> None:
    """For masks, what held for the first index of a vector held for all; nothing had an end."""

    def with_its_size(x: Tensor) -> list[Tensor]:
        return [*make(x.shape[0]), x + 1]

    torch._dynamo.reset()
    compiled = torch.compile(with_its_size, backend="smart_autocast", dynamic=dynamic)
    for n in (40, 600) if dynamic else (600,):
        x = torch.ones(n)
        assert_same_bits(compiled(x), with_its_size(x))
