"""A weight that is a view, or whose memory other tensors share: views count writes with what they
are views of, whichever of them is written to, so a cast of one is as safe as that of any weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support import assert_same_bits

from .support import bf16, casts_made, data, ours


class Table(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table  # type: ignore[no-any-return]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda base: base[0],
    "transposed": lambda base: base[0].mT,
    "detached": lambda base: base[0].detach(),
    "every-second": lambda base: base.view(16, 16)[::2, ::2],
    "expanded": lambda base: base[0, 0].expand(8, 8),
    "overlapping": lambda base: base.as_strided((8, 8), (1, 1)),
    "negated": lambda base: torch._neg_view(base[0]),
    "parameter": lambda base: nn.Parameter(base[0], requires_grad=False),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_is_cast_once_and_again_when_its_memory_is_written_to(kind: str) -> None:
    base, x = data(4, 8, 8), data(3, 8)
    view = VIEWS[kind](base)
    compiled = torch.compile(Table(view), **ours(weight_cache="version"))

    def calls() -> None:
        with torch.no_grad(), bf16():
            assert_same_bits([compiled(x) for _ in range(2)], [x @ view] * 2)

    assert casts_made(calls) == 1
    base.mul_(2)
    assert casts_made(calls) == 1
    base.view(-1)[:].add_(1)  # through another view
    assert casts_made(calls) == 1
