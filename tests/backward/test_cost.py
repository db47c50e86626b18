"""What following the state costs: nothing where no state can change the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autocast_backend.backward.region import Backward
from tests.backward.support import ours


@pytest.mark.parametrize(
    ("function", "wrapped"),
    [
        (lambda x: (x.relu() * 2).sin(), 0),
        (lambda x: torch.nn.functional.max_pool2d(x[None], 2).exp(), 0),
        (lambda x: x @ x, 1),
    ],
    ids=["pointwise", "pooling", "product"],
)
def test_the_compiled_backward_is_left_alone_where_autocast_cannot_change_it(
    function: Callable[[torch.Tensor], torch.Tensor],
    wrapped: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    take_over = Backward.take_over

    def spy(backward: Backward) -> None:
        calls.append(backward)
        take_over(backward)

    monkeypatch.setattr(Backward, "take_over", spy)
    torch._dynamo.reset()
    x = torch.randn(4, 4, requires_grad=True)
    torch.compile(function, **ours())(x).sum().backward()
    assert len(calls) == wrapped
