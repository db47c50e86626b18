"""Gradients of what compiled code returns, where its elements share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import BF16, assert_same_bits, weighted_sum

EXACT = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}


def windows(x: Tensor, w: Tensor) -> Tensor:
    """As sequence models cut a series into patches."""
    return (x @ w).unfold(1, 4, 2)


def broken(x: Tensor, w: Tensor) -> Tensor:
    y = windows(x, w)
    torch._dynamo.graph_break()
    return y.sin()


RETURNED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "windows": windows,
    "windows, permuted": lambda x, w: windows(x, w).permute(2, 0, 1),
    "windows, expanded": lambda x, w: windows(x, w).expand(3, *windows(x, w).shape),
    "as_strided": lambda x, w: (x @ w).as_strided((4, 9, 4), (12, 1, 1)),
    "before a graph break": broken,
    "out of a checkpoint": lambda x, w: checkpoint(windows, x, w, use_reentrant=False),
}


def gradients(
    function: Callable[[Tensor, Tensor], Tensor], *, inside: bool = False, **arguments: Any
) -> list[Tensor]:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 12, generator=generator).requires_grad_() for size in (4, 12))
    compiled = torch.compile(function, **arguments)
    with torch.autocast(**BF16):
        loss = weighted_sum([compiled(x, w)])
        if inside:
            return [*torch.autograd.grad(loss, [x, w])]
    return [*torch.autograd.grad(loss, [x, w])]


@pytest.mark.parametrize("name", RETURNED)
def test_gradients_of_what_overlaps_itself(name: str) -> None:
    function = RETURNED[name]
    for inside in (False, True):  # the backward is compiled once more for autocast
        expected = gradients(function, inside=inside, backend="eager")
        assert_same_bits(gradients(function, inside=inside, **EXACT), expected)
        assert_same_bits(gradients(function, inside=inside, dynamic=True, **EXACT), expected)


def test_inductor() -> None:
    """Its products are eager mode's, and nothing else is computed here."""
    expected = gradients(windows, backend="eager")
    assert_same_bits(gradients(windows, backend="smart_autocast"), expected)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="takes them as contiguous")
def test_stock_is_wrong() -> None:
    found = gradients(windows, backend="aot_eager")
    assert not all(map(torch.equal, found, gradients(windows, backend="eager")))
