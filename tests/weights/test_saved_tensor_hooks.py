"""Saved-tensor hooks around compiled code: they see what eager autograd saves, and nothing else.

A non-reentrant checkpoint puts such hooks around all that it runs, and raises where its second run
saves another number of tensors than the first, which compiled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support import assert_same_bits

from .support import STOCK, bf16, casts_made, data, ours


class Block(nn.Module):
    """Of sizes that no other test has, so that no verdict about its calls is known."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(19), nn.Linear(19, 23), nn.Linear(23, 19)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.fixture(autouse=True)
def fresh_compilations() -> Any:
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def test_a_call_saves_as_many_tensors_as_with_stock() -> None:
    def saved(**arguments: Any) -> list[int]:
        torch.manual_seed(0)
        compiled = torch.compile(Block(), **arguments)
        seen: list[Any] = []
        counts = []
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda _: None), bf16():
                compiled(data(3, 19))
            counts.append(len(seen))
            seen.clear()
        return counts

    first, second = saved(**STOCK)
    assert first == second > 0
    assert saved(**ours()) == [first, second]


def test_calls_inside_of_hooks_share_a_scope() -> None:
    compiled = torch.compile(Block(), **ours())

    def twice() -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with hooks, bf16():
            compiled(data(3, 19))
            compiled(data(3, 19))

    assert casts_made(twice) == 4  # two weights, two biases


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_compiled_blocks_in_a_checkpoint(inside: bool) -> None:
    """The backward `inside` of the context finds the casts that the forward has made."""

    def gradients(compiled: bool) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(2))
        for block in blocks if compiled else []:
            block.compile(**ours())
        with bf16():
            x = data(3, 19)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)
            loss = x.square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss, *(p.grad for p in blocks.parameters())]

    assert_same_bits(gradients(compiled=True), gradients(compiled=False))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_what_is_cast_without_gradients_in_a_checkpoint(inside: bool) -> None:
    """The second run of a checkpoint finds its casts where the first did, whatever the other calls
    of a scope have done with theirs: it pairs what both save by their order. The backward of this
    graph computes the gate again, and so saves the weight or its cast."""
    weight = nn.Parameter(data(19))

    def gated(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.prelu(x, weight)
        return x.sin() * gate

    def gradient(compiled: bool) -> list[Any]:
        torch._dynamo.reset()
        run = torch.compile(gated, **ours(inner="aot_eager_decomp_partition"))
        found = []
        for _ in range(2):
            x = data(19, 19).requires_grad_()
            with bf16():
                h = x * 1
                for _ in range(3):
                    h = checkpoint(run if compiled else gated, h, use_reentrant=False)
                with torch.autocast("cpu", enabled=False):
                    loss = h.float().square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            found.append(x.grad)
        return found

    assert_same_bits(gradient(True), gradient(False))


def _products_saved() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _casts_saved() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten._to_copy.default])


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("contexts", [_products_saved, _casts_saved])
@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_compiled_blocks_in_a_selective_checkpoint(
    lifetime: str, contexts: Any, inside: bool
) -> None:
    """It pairs the calls of its two runs by their order, and raises where the first found the casts
    of an earlier call of the scope, and the second has to make them. So does eager mode, whose
    gradients here are those without a checkpoint; stock does not."""

    def gradients(compiled: bool) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        first, second = blocks = nn.ModuleList([Block(), Block()])
        frozen = second.up.requires_grad_(False)
        for block in blocks if compiled else []:
            block.compile(**ours(weight_cache=lifetime))

        def both(x: torch.Tensor) -> Any:
            return second(first(x))

        with bf16():
            if lifetime == "scope":
                with torch.no_grad():
                    first(data(3, 19))
            x, loss = data(3, 19) * 1, torch.zeros(())
            for _ in range(2):
                if compiled:
                    x = checkpoint(both, x, use_reentrant=False, context_fn=contexts)
                else:
                    x = both(x)
                loss = loss + x.float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss, *(p.grad for p in blocks.parameters()), *frozen.parameters()]

    assert_same_bits(gradients(compiled=True), gradients(compiled=False))


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_a_selective_checkpoint_takes_no_cast_for_another(lifetime: str) -> None:
    """Inside of the context its second run finds the casts of weights, and the first cast that it
    makes, of the input, had the place of a weight's: of the same shape, so nobody would notice."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(19, 19, bias=False) for _ in range(2)))
    compiled = torch.compile(lambda x: model(x), **ours(weight_cache=lifetime))

    def gradients(checkpointed: bool) -> list[Any]:
        model.zero_grad()
        with bf16():
            x = data(19, 19) * 1
            if checkpointed:
                x = checkpoint(compiled, x, use_reentrant=False, context_fn=_casts_saved)
            else:
                x = model(x)
            x.float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    assert_same_bits(gradients(True), gradients(False))


def test_other_modes_see_the_casts_in_a_selective_checkpoint() -> None:
    class Casts(TorchDispatchMode):
        made = 0

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.made += func is torch.ops.aten._to_copy.default
            return func(*args, **(kwargs or {}))

    model = nn.Linear(19, 19)
    compiled = torch.compile(lambda x: model(x), **ours())
    modes = []
    for context in (_products_saved, None):
        with Casts() as casts, bf16():
            extra = {} if context is None else {"context_fn": context}
            checkpoint(compiled, data(3, 19), use_reentrant=False, **extra)
        assert torch._C._len_torch_dispatch_stack() == 0
        modes.append(casts.made)
    assert modes == [3, 3]  # of the weight, the bias and the input
