"""A weight that is a view, or whose memory other tensors share: views count writes with what they
are views of, whichever of them is written to, so a cast of one is as safe as that of any weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.support import assert_same_bits

from .support import bf16, casts_made, data, make, ours


class Table(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table  # type: ignore[no-any-return]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda base: base[1],
    "transposed": lambda base: base[0].mT,
    "detached": lambda base: base[0].detach(),
    "every-second": lambda base: base.view(16, 16)[::2, ::2],
    "expanded": lambda base: base[0, 0].expand(8, 8),
    "overlapping": lambda base: base.as_strided((8, 8), (1, 1)),
    "negated": lambda base: torch._neg_view(base[0]),
    "parameter": lambda base: nn.Parameter(base[1], requires_grad=False),
    "no-leaf": lambda base: base.requires_grad_()[1],
    "view-of-one": lambda base: nn.Parameter(base[1:], requires_grad=False)[1],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_is_cast_once_and_again_when_its_memory_is_written_to(kind: str) -> None:
    base, x = data(4, 8, 8), data(3, 8)
    view = VIEWS[kind](base)
    compiled = torch.compile(Table(view), **ours(weight_cache="version"))

    def calls() -> None:
        with torch.no_grad(), bf16():
            assert_same_bits([compiled(x) for _ in range(2)], [x @ view] * 2)

    assert casts_made(calls) == 1, "it stays in the graph"
    with torch.no_grad():
        base.mul_(2)
        assert casts_made(calls) == 1
        base.view(-1)[:].add_(1)  # through another view
        assert casts_made(calls) == 1


def test_a_weight_with_parts_that_count_for_themselves_stays() -> None:
    weight, x = TwoTensor(data(8, 8), data(8, 8)), data(3, 8)
    compiled = torch.compile(Table(weight), **ours(weight_cache="version"))

    def calls() -> None:
        with torch.no_grad():
            for part in (weight.a, weight.b):
                with bf16():
                    assert_same_bits(compiled(x).a, x @ weight.a)
                part.mul_(2)

    assert casts_made(calls) == 0


@pytest.mark.parametrize("kind", ["row", "parameter", "view-of-one"])
def test_one_write_in_the_graph_keeps_it_there(kind: str) -> None:
    """PyTorch makes fake tensors that begin inside of their storage with a write."""

    class Written(Table):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.table.mul_(2)  # type: ignore[operator]
            return y

    view, x = VIEWS[kind](data(4, 8, 8)), data(3, 8)
    compiled = torch.compile(Written(view), **ours(weight_cache="version"))

    def calls() -> None:
        with torch.no_grad():
            for _ in range(2):
                with bf16():
                    expected = x @ view
                    assert_same_bits(compiled(x), expected)

    assert casts_made(calls) == 0


class Pair(nn.Module):
    """Two layers, the second of which is called first."""

    def __init__(self, writes_to: str = "") -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.writes_to = writes_to

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.b(x).relu())
        if self.writes_to:
            with torch.no_grad():
                getattr(self, self.writes_to).weight.mul_(0.5)
        return y


def flattened(model: nn.Module) -> None:
    """Each weight becomes a part of one memory, and counts for itself."""
    memory = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), memory.split(64), strict=True):
        p.data = part.view(8, 8)


def tied_by_their_data(model: nn.Module) -> None:
    model.a.weight.data = model.b.weight.data  # type: ignore[union-attr,assignment]


def tied_and_loaded(model: nn.Module) -> None:
    """The state has one memory under two names, of which `assign` makes two parameters."""
    model.a.weight = model.b.weight  # type: ignore[union-attr,assignment]
    model.load_state_dict(model.state_dict(), assign=True)


SHARED_MEMORY = [flattened, tied_by_their_data, tied_and_loaded]


@pytest.mark.parametrize("share", SHARED_MEMORY)
def test_parameters_in_one_memory_are_cast_outside_of_the_graph(
    share: Callable[[nn.Module], None],
) -> None:
    def gradients(**arguments: Any) -> list[Tensor]:
        model = make(Pair)
        share(model)
        call = torch.compile(model, **arguments) if arguments else model
        with bf16():
            loss = sum(call(x).float().square().mean() for x in data(3, 4, 8))
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    results: list[Tensor] = []
    assert casts_made(lambda: results.extend(gradients(**ours()))) == 2
    assert_same_bits(results, gradients())


@pytest.mark.parametrize("share", SHARED_MEMORY)
@pytest.mark.parametrize("writes_to", ["a", "b"])
def test_writes_in_the_graph_to_parameters_in_one_memory_are_seen(
    share: Callable[[nn.Module], None], writes_to: str
) -> None:
    models = [make(lambda: Pair(writes_to)) for _ in range(2)]
    for model in models:
        share(model)
    compiled = torch.compile(models[0], **ours(weight_cache="version"))
    with torch.no_grad():
        for x in data(3, 4, 8):
            with bf16():
                assert_same_bits(compiled(x), models[1](x))
