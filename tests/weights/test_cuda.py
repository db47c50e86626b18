"""The weight plan on a GPU: casts and gradients, and CUDA graphs that are not recorded anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autocast_backend import weight_cache_info
from tests.support import assert_same_bits

from .support import EAGER, Plain, data, make, ours

pytestmark = pytest.mark.gpu


def bf16() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_gradients_and_casts(lifetime: str) -> None:
    def run(**arguments: object) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model = make(Plain).cuda()
        compiled = torch.compile(model, **arguments)  # type: ignore[call-overload]
        with bf16():
            loss = sum(compiled(row).float().square().mean() for row in data(3, 3, 8).cuda())
        loss.backward()
        return [p.grad for p in model.parameters()]

    before = weight_cache_info().casts
    found = run(**ours(weight_cache=lifetime))
    assert weight_cache_info().casts == before + 4
    assert_same_bits(found, run(**EAGER))


@pytest.mark.slow
@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_cuda_graphs_are_recorded_once(lifetime: str) -> None:
    """Each scope makes the casts anew, at the addresses the recorded graphs read."""
    from torch._inductor.cudagraph_trees import get_container

    model, x = make(Plain).cuda(), data(3, 8).cuda()
    compiled = torch.compile(
        model,
        backend="smart_autocast",
        options={"weight_cache": lifetime, "inductor": {"triton.cudagraphs": True}},
    )
    reference = torch.compile(model, **EAGER)

    def tokens(scopes: int) -> None:
        for _ in range(scopes):
            with torch.no_grad(), bf16():
                for _ in range(3):
                    y = compiled(x).clone()
                torch.testing.assert_close(y, reference(x), rtol=2**-7, atol=2**-8)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)

    def recordings() -> int:
        manager = get_container(0).tree_manager
        assert manager is not None, "no CUDA graph was recorded"
        return manager.new_graph_id().id

    copied = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
    tokens(3)
    before = recordings()
    tokens(5)
    assert recordings() == before + 1  # asking takes an id, too
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == copied + 1  # x


@pytest.mark.slow
def test_training_with_cuda_graphs() -> None:
    from torch._inductor.cudagraph_trees import get_container

    model, x = make(Plain).cuda(), data(3, 8).cuda()
    compiled = torch.compile(model, backend="smart_autocast", mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    losses: list[float] = []

    def steps(n: int) -> int:
        for _ in range(n):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            with bf16():
                loss = compiled(x).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        manager = get_container(0).tree_manager
        assert manager is not None, "no CUDA graph was recorded"
        return manager.new_graph_id().id

    before = steps(4)
    assert steps(6) == before + 1
    plain: nn.Module = make(Plain).cuda()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, fused=True)
    for expected in losses:
        optimizer.zero_grad()
        with bf16():
            loss = plain(x).float().square().mean()
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected, rel=2**-6)
