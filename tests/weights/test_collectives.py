"""What a process receives from others is written without being counted. (The one process of these
tests receives from itself.)"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autocast_backend._torch.writes import RECEIVING
from autocast_backend.weights import cache, cast
from autocast_backend.weights.graph_weights import GraphWeights
from tests.support import assert_same_bits

from .support import Plain, bf16, casts_made, data, make, ours

pytestmark = pytest.mark.usefixtures("one_process_group")


def scatters(to: Tensor, values: Tensor) -> None:
    dist.scatter(to, [values])


def scatters_in_inference_mode(to: Tensor, values: Tensor) -> None:
    with torch.inference_mode():
        dist.scatter(to, [values])


def exchanges(to: Tensor, values: Tensor) -> None:
    dist.all_to_all_single(to, values)


def receives_later(to: Tensor, values: Tensor) -> None:
    dist.scatter(to, [values], async_op=True).wait()


def before_and_after(
    receive: Callable[[Tensor, Tensor], None], weight_cache: str
) -> tuple[Tensor, Tensor]:
    """A call, new weights, and a second call in the same autocast context."""
    torch._dynamo.reset()
    model, x = make(Plain), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache=weight_cache))
    with bf16():
        before = compiled(x).detach()
        for p in model.parameters():
            version = p._version
            receive(p.detach(), p.detach() * 2)
            assert p._version == version, "it is counted: what is this test for?"
        return before, compiled(x).detach()


@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize(
    "receive", [scatters, scatters_in_inference_mode, exchanges, receives_later]
)
def test_received_weights_are_cast_again(
    receive: Callable[[Tensor, Tensor], None], lifetime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = before_and_after(receive, lifetime)
    assert_same_bits((before, after), before_and_after(receive, "off"))
    assert not torch.equal(after, before)
    monkeypatch.setattr(cache, "all_casts", lambda: iter(()))
    _, unnoticed = before_and_after(receive, lifetime)
    assert torch.equal(unnoticed, before)


@pytest.fixture
def two_ranks() -> list[dist.ProcessGroup]:
    """Two processes, as they see each other, in this one."""
    store, groups = dist.HashStore(), {}

    def join(rank: int) -> None:
        group = dist.ProcessGroup(dist.PrefixStore("group", store), rank, 2)
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), rank, 2, datetime.timedelta(seconds=60)
        )
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        groups[rank] = group

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_calls_while_a_weight_is_being_received(
    two_ranks: list[dist.ProcessGroup], lifetime: str, trained: bool
) -> None:
    """A server whose next weights are on their way: none of its casts is one of those."""
    model, x = make(Plain).requires_grad_(trained), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache=lifetime))

    def expected() -> Tensor:
        with bf16(cache_enabled=False):
            return model(x)  # type: ignore[no-any-return]

    weight = model.first.weight.detach()
    with bf16():
        compiled(x)
        work = two_ranks[1].recv([weight], 0, 0)
        before = [compiled(x) for _ in range(2)]
        assert_same_bits(before, [expected()] * 2)
        two_ranks[0].send([weight * 2], 1, 0).wait()
        work.wait()
        after = compiled(x)
        assert_same_bits(after, expected())
        assert not torch.equal(after, before[0])
        compiled(x)
        assert casts_made(lambda: compiled(x)) == 0


def test_works_are_forgotten(two_ranks: list[dist.ProcessGroup]) -> None:
    """Those that are done; gradients of DDP are many in each step, and may be large."""
    with bf16():
        torch.compile(make(Plain), **ours())(data(3, 8))
    to, most = torch.zeros(2), 0
    for _ in range(3 * cache.MOST_WORKS):
        work = two_ranks[1].recv([to], 0, 0)
        two_ranks[0].send([to + 1], 1, 0).wait()
        work.wait()
        most = max(most, len(cache.Shared.works))
    assert most == cache.MOST_WORKS


class Pending:
    """A work that is never done."""

    def is_completed(self) -> bool:
        return False


def test_a_weight_that_earlier_scopes_knew_is_being_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its casts are made of what is there at each call, which nobody counts."""
    graph = GraphWeights([torch.bfloat16], [True], lasting=False, scoped=True)
    weight = nn.Parameter(data(8, 8))
    for _ in range(2):
        with bf16():
            graph.casts([weight], graph.scope())
    monkeypatch.setattr(cache.Shared, "works", [(Pending(), [cast.ref_to_storage(weight)])])
    with bf16():
        for _ in range(2):
            weight.data.mul_(2)
            assert_same_bits(graph.casts([weight], graph.scope()), [weight.bfloat16()])


def test_sparse_tensors_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no storage that could be a weight's."""
    monkeypatch.setattr(cache.Shared, "works", [])
    cache._received([torch.eye(2).to_sparse()], [Pending()])
    assert cache.being_received() == set()


def test_a_tensor_that_is_freed_before_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    freed, held = torch.zeros(2), torch.zeros(2)
    storages = [cast.ref_to_storage(freed), cast.ref_to_storage(held)]
    monkeypatch.setattr(cache.Shared, "works", [(Pending(), storages)])
    del freed
    assert cache.being_received() == {held.untyped_storage()._cdata}


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_activations_received_into_one_buffer(lifetime: str) -> None:
    """As a stage of a pipeline gets them: in a leaf that requires grad, as weights are. So its cast
    is kept like theirs."""
    layer = make(Plain).requires_grad_(False)
    compiled = torch.compile(layer, **ours(weight_cache=lifetime))
    buffer = torch.zeros(3, 8, requires_grad=True)
    with bf16():
        for x in data(3, 3, 8):
            scatters(buffer.detach(), x)
            assert torch.equal(compiled(buffer), layer(x))


def test_nothing_received_costs_no_casts() -> None:
    """Others than the weights: gradients, metrics."""
    model, x = make(Plain), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache="version"))
    with bf16():
        compiled(x)
        scatters(torch.empty(8), torch.ones(8))
        assert casts_made(lambda: compiled(x)) == 0


def receives_several(values: list[Tensor]) -> None:
    torch._dynamo.graph_break()
    for v in values:
        dist.scatter(torch.empty_like(v), [v])


def hides_several(values: list[Tensor]) -> None:
    torch._dynamo.graph_break()
    for v in values:
        hidden = torch.autograd._unsafe_preserve_version_counter(v)
        hidden.__enter__()
        v.add_(1)
        hidden.__exit__()


@pytest.mark.parametrize("write", [receives_several, hides_several])
def test_what_looks_at_writes_is_not_compiled(write: Callable[[list[Tensor]], None]) -> None:
    """After a graph break, as in DDP's forward, Dynamo looks at all functions that are called."""
    compiled = torch.compile(make(Plain), **ours())
    with bf16(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled(data(3, 8))  # there is a cast to look for
        torch.compile(write, **ours())([data(3), data(3, 8), data(2, 3, 8)])


def test_all_ops_that_receive_are_known() -> None:
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("c10d::")}
    others = {"barrier", "check_for_nan", "monitored_barrier_", "send"}
    assert {name.removeprefix("c10d::") for name in names} - others <= set(RECEIVING)
