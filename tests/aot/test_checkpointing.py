"""Activation checkpointing inside a compiled region, around it, and both."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from autocast_backend.validation import verdicts
from tests.aot.harness import (
    AOT_EAGER,
    BACKWARDS,
    ORACLE,
    WAYS,
    Case,
    assert_like_the_oracle,
    autocast,
    backward_inside,
    differences,
    each_way,
    inside_region,
    island,
    leaves,
    loss_of,
)
from tests.support import BF16, assert_same_bits, autocast_put_right


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island((x @ w).sin(), w).cos()


def random_block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(F.dropout(x @ w, 0.3), w)


def saves_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def recomputes(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def not_reentrant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, w, use_reentrant=False).sin()


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = checkpoint(block, x, w, use_reentrant=False)
    return checkpoint(island, y, y.t(), use_reentrant=False)


def nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(not_reentrant, x, w, use_reentrant=False).sin()


def _selective(policy: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, w, use_reentrant=False, context_fn=contexts).sin()


def selective_saving(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _selective(saves_products, x, w)


def selective_recomputing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _selective(recomputes, x, w)


def selective_kernels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Kernels that call `bmm`: as eager mode has it, autocast does not act inside of them here."""

    def kernels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid((x @ w)[None, :2, :3].float(), [1, 1, 2, 2], align_corners=False)
        return grid.float().square().sum() + F.bilinear(x, x.sin(), w[None]).float()

    contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)
    return checkpoint(kernels, x, w, use_reentrant=False, context_fn=contexts).sin()


def region_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(inside_region(block), x, w, use_reentrant=False).sin()


CASES = {
    f.__name__: Case(f)
    for f in (
        not_reentrant,
        twice,
        nested,
        selective_saving,
        selective_recomputing,
        selective_kernels,
        region_inside,
    )
}


@pytest.mark.parametrize(("name", "way"), each_way(CASES))
def test_checkpoints_inside(name: str, way: str) -> None:
    assert_like_the_oracle(CASES[name], way)


def assert_step_as_in_eager_mode(function: Callable[..., torch.Tensor]) -> None:
    def step(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x, w = leaves()
        with torch.autocast(**BF16):
            y = run(x, w)
        return [y, *torch.autograd.grad(loss_of(y), (x, w))]

    assert_same_bits(step(torch.compile(function, **AOT_EAGER)), step(function))


@pytest.mark.parametrize("option", [False, True], ids=["context", "option"])
def test_selective_checkpoints_without_gradients_are_none(option: bool) -> None:
    """Compared with eager itself, which enters their dispatch modes where autograd records."""
    x, w = leaves()
    options = {"inner": "aot_eager"} | ({"autocast": BF16} if option else {})
    compiled = torch.compile(selective_kernels, backend="smart_autocast", options=options)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with torch.autocast(**BF16):
                expected = selective_kernels(x, w)
            with autocast(not option):
                assert_same_bits(compiled(x, w), expected)


def test_a_checkpoint_between_others_does_not_read_their_weight() -> None:
    """It hands on the cast of it. Compared with eager itself, which Dynamo's graph is not for
    checkpoints in checkpoints."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def third(x: torch.Tensor) -> torch.Tensor:
            return (x @ w).sin()

        def second(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(third, x @ w, use_reentrant=False)

        def first(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(second, x.cos(), use_reentrant=False)

        return checkpoint(first, x @ w, use_reentrant=False).sin()

    assert_step_as_in_eager_mode(function)


def test_brackets_inside_selective_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that change, `bilinear` does not run on fake tensors, and stays under autocast."""
    contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)

    def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.bilinear(x, x.sin(), w)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(products, x, w, use_reentrant=False, context_fn=contexts)

    def step(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        x = torch.linspace(-1, 1, 24).view(2, 4, 3).transpose(1, 2).requires_grad_()
        w = torch.linspace(-2, 1, 64).view(4, 4, 4).requires_grad_()
        run = torch.compile(function, **compile_arguments) if compile_arguments else function
        with torch.autocast(**BF16):
            y = run(x, w)
        return [y, *torch.autograd.grad(loss_of(y), (x, w))]

    verdicts.forget()  # those about sizes that stay
    FakeTensorMode.cache_clear()
    monkeypatch.setattr(verdicts, "compile_cache_dir", lambda: None)
    before = counters["smart_autocast"]["bracketed"]
    compiled = step(**AOT_EAGER, dynamic=True)
    assert counters["smart_autocast"]["bracketed"] == before + 1
    assert_same_bits(compiled, step())


def test_a_checkpoint_of_what_is_the_weight_itself() -> None:
    """`w.float()` is w: they read one cast, and the gradients of the three products add up in it.
    Compared with eager itself, as Dynamo's graph of a checkpoint does not run under autocast."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda a, b: (a @ b).sin(), w.float(), w, use_reentrant=False)
        return (x @ w) @ y

    assert_step_as_in_eager_mode(function)


def test_a_checkpoint_in_a_graph_that_runs_as_in_eager_mode() -> None:
    """Compared with eager itself: Dynamo's graph of this checkpoint raises in its backward."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.gru_cell(w, w, w.repeat(3, 1), w.repeat(3, 1))
        return y + checkpoint(lambda a, b: (a @ b).sin() @ b, x, w, use_reentrant=False) + x @ w

    def step(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        x, w = leaves()
        with torch.autocast(**BF16):
            y = run(x, w)
        return [y, *torch.autograd.grad(loss_of(y), (x, w))]

    torch._dynamo.utils.counters.clear()
    assert_same_bits(step(torch.compile(function, **AOT_EAGER)), step(function))
    assert torch._dynamo.utils.counters["smart_autocast"]["left_eager"] == 1


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_brackets_that_raise_inside_selective_checkpoints(inner: str) -> None:
    """What is compiled after the error knows what autocast does inside of kernels."""
    contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)

    def fails(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for body in graph.modules():
            if body is not graph and isinstance(body, torch.fx.GraphModule):
                (call,) = body.graph.find_nodes(op="call_function", target=torch.gru_cell)
                call.kwargs = {"no_such_argument": 1}
                body.recompile()
        return torch._dynamo.lookup_backend(inner)(graph, inputs)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def cell(v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return torch.gru_cell(v, v, u, u)

        return checkpoint(cell, x, w.view(12, 4), use_reentrant=False, context_fn=contexts)

    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    w = torch.linspace(-2, 1, 48).view(3, 4, 4).requires_grad_()
    options = {"inner": fails}
    torch._dynamo.reset()
    with torch.autocast(**BF16):
        with pytest.raises(Exception, match="no_such_argument"):
            torch.compile(function, backend="smart_autocast", options=options)(x, w)
        compiled = torch.compile(F.bilinear, **AOT_EAGER)
        assert_same_bits(compiled(x, x, w), F.bilinear(x, x, w))


@pytest.mark.parametrize("way", ["off", "ambient", "region"])
def test_random_numbers_are_the_same_when_they_are_computed_again(way: str) -> None:
    """Compared with eager itself: the graph Dynamo makes of a checkpoint does not restore the state
    of the random numbers, AOTAutograd's does."""

    def gradients(compiled: bool) -> list[Any]:
        torch._dynamo.reset()
        function = functools.partial(checkpoint, random_block, use_reentrant=False)
        if way == "region":
            function = inside_region(function)
        if compiled:
            function = torch.compile(function, **AOT_EAGER)
        x, w = leaves()
        torch.manual_seed(1)
        with autocast(way == "ambient"):
            loss = loss_of(function(x, w))
        torch.manual_seed(2)
        loss.backward()
        return [x.grad, w.grad]

    assert_same_bits(gradients(compiled=True), gradients(compiled=False))


def test_random_numbers_where_nothing_has_a_gradient() -> None:
    """PyTorch has nothing to compute again there, but refuses to, from 2.12 on."""
    weight = torch.randn(8, 8)

    def run(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.autocast(**BF16):
            return function(torch.ones(4, 8), weight)

    def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(random_block, x, w, use_reentrant=False)

    torch._dynamo.reset()
    compiled = torch.compile(checkpointed, **AOT_EAGER)
    assert_same_bits(run(compiled), run(checkpointed))


@pytest.fixture
def nesting_restored() -> Iterator[None]:
    """A checkpoint stops computing its body again by an exception. The graph the oracle runs then
    misses its `_exit_autocast`, and autocast's weight cache would never be cleared again."""
    with autocast_put_right():
        yield


@pytest.mark.usefixtures("nesting_restored")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_block_inside_a_checkpoint(way: str, reentrant: bool) -> None:
    """The forward runs again inside the backward, under the state the forward had."""

    def steps(**arguments: Any) -> list[dict[str, Any]]:
        torch._dynamo.reset()
        function = inside_region(random_block) if way == "region" else random_block
        compiled = torch.compile(function, fullgraph=True, **arguments)
        found = []
        for inside in BACKWARDS:
            x, w = leaves()
            torch.manual_seed(1)
            with autocast(way == "ambient"):
                y = checkpoint(compiled, x, w, use_reentrant=reentrant)
            backward_inside(loss_of(y), inside)
            found.append({"outputs": [y.detach()], "gradients": [x.grad, w.grad]})
        return found

    assert not list(differences(steps(**AOT_EAGER), steps(**ORACLE)))


class Blocks(nn.Module):
    """Blocks of one class, each in a checkpoint, with a batch that grows from one to the next."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(self.a(x).sin())

    def __init__(self, *, growing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.growing = growing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False)
            if self.growing:
                x = torch.cat([x, x[: i + 3]])
        return x

    def compile_blocks(self) -> Blocks:
        for block in self.blocks:
            block.compile(**AOT_EAGER)
        return self


EAGER = functools.partial(torch.compiler.set_stance, "force_eager")


@pytest.mark.parametrize("eager_run", ["first", "second", "second, by vmap"])
def test_a_checkpoint_whose_runs_are_not_both_compiled_raises(eager_run: str) -> None:
    """They save as many tensors, of the same shapes, but others: gradients would be wrong by more
    than themselves."""
    model = Blocks().compile_blocks()
    x = torch.randn(8, 8, requires_grad=True)
    with torch.autocast(**BF16):
        with EAGER() if eager_run == "first" else contextlib.nullcontext():
            loss = model(x).float().square().sum()
        if "vmap" in eager_run:
            torch.vmap(model.blocks[0])(x.detach()[None])
    with (
        EAGER() if eager_run == "second" else contextlib.nullcontext(),
        pytest.raises(CheckpointError, match="saved"),
    ):
        loss.backward()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("growing", [False, True])
def test_checkpoints_around_compiled_blocks(growing: bool, early_stop: bool) -> None:
    """Two backwards, and nothing of the checkpoints stays."""

    def step(model: Blocks) -> list[Any]:
        x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
        with torch.autocast(**BF16), set_checkpoint_early_stop(early_stop):
            loss = model(x).float().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]

    def alive() -> int:
        gc.collect()
        return sum(type(o).__module__ == "torch.utils.checkpoint" for o in gc.get_objects())

    before = alive()
    results = step(Blocks(growing=growing).compile_blocks())
    assert alive() == before
    assert_same_bits(results, step(Blocks(growing=growing)))


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch is older"
)
def test_a_memory_budget_for_all_of_a_forward() -> None:
    """PyTorch asks each op whether it is annotated: the casts, too."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.5), torch.autocast(**BF16):
            return ((x @ w).sin() @ w).cos()

    def step(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        x, w = leaves()
        y = torch.compile(function, **compile_arguments)(x, w)
        return [y, *torch.autograd.grad(y.sum(), (x, w))]

    assert_same_bits(step(**AOT_EAGER), step(**ORACLE))
