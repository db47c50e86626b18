"""Ops that AOTAutograd takes apart above autograd, where eager mode runs them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from autocast_backend._torch.whole_ops import ops_kept_whole
from tests.support import BF16, assert_same_bits, weighted_sum

EXACT = [
    {"backend": "smart_autocast", "options": {"inner": "aot_eager"}},
    {"backend": "smart_autocast", "mode": "lite"},
]
INTERPOLATIONS = {
    "linear": ((2, 3, 9), {"scale_factor": 2.0}),
    "bilinear": ((2, 3, 9, 10), {"size": (13, 7)}),
    "bicubic": ((2, 3, 9, 10), {"scale_factor": (0.6, 1.7), "align_corners": True}),
    "trilinear": ((1, 2, 5, 6, 7), {"size": (8, 4, 9), "align_corners": True}),
}


def interpolated(how: str, dtype: torch.dtype, **arguments: Any) -> list[torch.Tensor]:
    shape, given = INTERPOLATIONS[how]
    torch._dynamo.reset()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.requires_grad_()
    call = torch.compile(lambda x: F.interpolate(x, mode=how, **given), **arguments)
    with torch.autocast(**BF16):
        y = call(x)
    return [y, *torch.autograd.grad(weighted_sum([y]), x)]


@pytest.mark.parametrize(
    "exact", [*EXACT, {"backend": "smart_autocast"}], ids=["aot_eager", "lite", "inductor"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", INTERPOLATIONS)
def test_interpolation(how: str, dtype: torch.dtype, exact: dict[str, Any]) -> None:
    assert_same_bits(interpolated(how, dtype, **exact), interpolated(how, dtype, backend="eager"))


@pytest.mark.parametrize("how", INTERPOLATIONS)
def test_sizes_that_change(how: str) -> None:
    """ATen's backward ops do not take them: there the parts are left, and round elsewhere."""
    stock = interpolated(how, torch.float32, backend="aot_eager")
    assert not all(map(torch.equal, stock, interpolated(how, torch.float32, backend="eager")))
    assert_same_bits(interpolated(how, torch.float32, dynamic=True, **EXACT[0]), stock)


@pytest.mark.parametrize("exact", EXACT, ids=["aot_eager", "lite"])
@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
def test_losses(loss: Any, exact: dict[str, Any]) -> None:
    def results(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 50, generator=generator).requires_grad_()
        shape = (64, 50) if loss is F.multilabel_margin_loss else (64,)
        target = torch.randint(0, 50, shape, generator=generator)
        with torch.autocast(**BF16):
            y = torch.compile(loss, **arguments)(x, target)
        return [y, *torch.autograd.grad(y, x)]

    assert_same_bits(results(**exact), results(backend="eager"))


@pytest.mark.parametrize("exact", EXACT, ids=["aot_eager", "lite"])
def test_the_gradient_of_what_is_not_a_number(exact: dict[str, Any]) -> None:
    def results(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        x = torch.tensor([float("nan"), 0.2, 3.0], requires_grad=True)
        compiled = torch.compile(lambda x: (F.softshrink(x), F.hardshrink(x)), **arguments)
        shrunk = compiled(x)
        return [*shrunk, *(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in shrunk)]

    assert_same_bits(results(**exact), results(backend="eager"))


def test_only_where_it_is_asked_for() -> None:
    """Stock Inductor makes one kernel of the parts."""
    graphs: list[fx.GraphModule] = []

    def note(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    x = torch.randn(2, 3, 9, 10)
    for whole in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
            backend=aot_autograd(fw_compiler=note),
        )
        if whole:
            with ops_kept_whole():
                compiled(x)
        else:
            compiled(x)
    op = torch.ops.aten.upsample_bilinear2d.default
    assert [bool(g.graph.find_nodes(op="call_function", target=op)) for g in graphs] == [
        True,
        False,
    ]
