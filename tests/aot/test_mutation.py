"""What a compiled region writes into its inputs: data, metadata, views of them, and gradients
through all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from autocast_backend.backend import smart_autocast
from tests.aot.harness import (
    AOT_EAGER,
    STOCK,
    Case,
    assert_like_the_oracle,
    backward_inside,
    each_way,
    geometry,
    island,
    leaves,
    mixed,
)
from tests.support import BF16, assert_same_bits


def not_leaves(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    return x * 1, w


def without_grad(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    return x.detach().clone(), w


def with_a_view(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    base = x * 1
    return base, base[1:3], w


def two_views(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    base = x.detach().clone()
    return base[:2], base[1:3], w


def writes_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return mixed(x, w)


def writes_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = mixed(x.clone(), w)
    x.add_(y.detach().float())
    x.sigmoid_()
    return y * mixed(x, w)


def writes_a_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.copy_(mixed(x.clone(), w))
    return x.cos()


def writes_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x[1:3].add_(1)
    x.t()[0].mul_(3)
    return mixed(x, w)


def writes_a_table(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x[torch.tensor([0, 2])] = island(x.clone(), w)[:2]
    x.index_fill_(1, torch.tensor([3]), 0.5)
    return mixed(x, w)


def writes_and_returns_it(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.mul_(2)
    return x, mixed(x, w), x[0]


def writes_the_argument_that_is_a_view(
    base: torch.Tensor, view: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    view.mul_(2)
    return island(base, w)


def writes_overlapping_views(
    first: torch.Tensor, second: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    first.add_(1)
    second.mul_(2)
    return island(first, w)


def writes_an_intermediate(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = mixed(x, w)
    y[0].mul_(2)
    y.t_()
    z = y.clone()
    z.unsqueeze_(0).add_(1)
    return y, z


def turns_it(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.transpose_(0, 1)
    return island(x, w)


def turns_and_writes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.t_()
    x[0].mul_(2)
    y = mixed(x.clone(), w)
    x.unsqueeze_(0)
    return y


def half_without_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.copy_(x.clone() @ w)
    return mixed(x, w)


def writes_what_it_has_read(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = mixed(w, w)
    cast, sine = x.double(), x[1:].t().sin()
    with torch.no_grad():
        x.mul_(2)
    return y * cast + y[:, 1:] @ sine.t()


def writes_what_a_call_took_two_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = mixed(w, w)
    largest, places = x.max(1)
    with torch.no_grad():
        x.mul_(-1)
    return y * largest + y.gather(1, places[:, None])


def reads_what_it_has_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = mixed(w, w)
    with torch.no_grad():
        x.add_(1)
    return y * x + y * x.sin()


def writes_under_a_view_without_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        view = y[:]
    y.mul_(w.sum())
    with torch.no_grad():  # elsewhere PyTorch refuses to read it
        product = view @ w
        same = torch.nn.functional.dropout(view, training=False) + torch.einsum("ij->ij", view)
        view.mul_(w)
    return mixed(y, w) + product + same


def fills_what_is_turned(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """PyTorch's op of the same name that writes nothing returns a contiguous tensor."""
    turned = mixed(x, w).t()
    filled = turned.abs()
    filled.masked_fill_(filled > 1, 1)
    return filled, filled.t().view(-1)


def copies_before_it_writes(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = mixed(x, w)
    y.t().index_add_(0, torch.tensor([2, 1]), w[:2])
    copied = y.t().flatten()  # a view, were the strides of y turned by the line above
    y.relu_()
    return copied, y


CASES = {
    case.function.__name__: case
    for case in (
        Case(writes_data, not_leaves),
        Case(writes_twice, without_grad),
        Case(writes_a_product, not_leaves),
        Case(writes_a_view, not_leaves),
        Case(writes_a_table, not_leaves),
        Case(writes_and_returns_it, not_leaves),
        Case(writes_the_argument_that_is_a_view, with_a_view),
        Case(writes_overlapping_views, two_views),
        Case(writes_an_intermediate),
        # Dynamo breaks the graph at metadata mutations of inputs; see the tests below.
        Case(turns_it, not_leaves, fullgraph=False),
        Case(turns_and_writes, not_leaves, fullgraph=False),
        Case(half_without_grad, without_grad),
        Case(writes_what_it_has_read, without_grad),
        Case(writes_what_a_call_took_two_of, without_grad),
        Case(reads_what_it_has_written, without_grad),
        Case(writes_under_a_view_without_grad, without_grad),
        Case(fills_what_is_turned),
        Case(copies_before_it_writes),
    )
}


@pytest.mark.parametrize(("name", "way"), each_way(CASES))
def test_bits_of_everything_written(name: str, way: str) -> None:
    assert_like_the_oracle(CASES[name], way)


def stretches(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
    x.transpose_(0, 1)
    y = x.clone() @ w
    x.unsqueeze_(0).mul_(2)
    return (y,)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_metadata_of_inputs_in_a_graph(inside: bool) -> None:
    """Dynamo breaks its graphs at such mutations; the backend takes them all the same."""

    def step(function: Callable[..., Any]) -> tuple[Any, ...]:
        x, w = leaves()
        given = x * 1
        (y,) = function(given, w)
        backward_inside(y.sin().sum() + given.square().sum(), inside)
        return y, given, geometry([y, given]), x.grad, w.grad

    fake = [leaf.detach().clone().requires_grad_() * 1 for leaf in leaves()]
    compiled = smart_autocast(fx.symbolic_trace(stretches), fake, options={"inner": "aot_eager"})
    assert_same_bits(step(compiled), step(stretches))


def test_what_is_written_after_the_forward() -> None:
    """Compilers that keep writes out of their graphs: the backward would find another version of
    the input, and be refused."""
    case = CASES["writes_what_it_has_read"]
    inner = aot_autograd(fw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
    assert_like_the_oracle(case, "region", options={"inner": inner})


def test_what_is_overwritten_is_saved_with_no_memory_for_it() -> None:
    with functorch_config.patch(activation_memory_budget=0.0):
        assert_like_the_oracle(CASES["writes_what_it_has_read"], "region")


def test_what_need_not_be_copied_is_not() -> None:
    """Of two that Inductor might take away, one is read by the backward. A sum it does not take
    away."""
    copies: list[int] = []

    def count(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        copy = torch.ops.prims.clone.default
        copies.append(sum(node.target is copy for node in graph_module.graph.nodes))
        return graph_module.forward

    def step(x: torch.Tensor, w: torch.Tensor, buffer: torch.Tensor) -> Any:
        read, not_read = buffer.repeat(1, 1), buffer**1
        y = x @ w * read * buffer.sum(1, keepdim=True)
        with torch.no_grad():
            buffer.mul_(-1)
        return y, not_read + 1

    torch._dynamo.reset()
    inner = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    x, w = leaves()
    torch.compile(step, backend="smart_autocast", options={"inner": inner})(x, w, w.detach() + 2)
    assert copies[0] == 1


def test_what_a_checkpoint_reads_is_read_again() -> None:
    """In eager mode its backward finds what was written meanwhile. (The oracle of the tests above
    raises: PyTorch runs the graph's checkpoint another way.)"""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = checkpoint(lambda w: (w @ w) * x.sin(), w, use_reentrant=False)
        with torch.no_grad():
            x.mul_(2)
        return y

    def gradient(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        x, w = leaves()
        (gradient,) = torch.autograd.grad(function(x.detach(), w).sum(), w)
        return gradient

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="smart_autocast", options={"inner": "aot_eager"})
    assert_same_bits(gradient(compiled), gradient(step))


def test_known_a_write_after_a_graph_break_is_refused() -> None:
    """In eager mode the cast is saved. The first graph does not know of the write, and PyTorch's
    partitioner may save what was cast; with stock, too."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = (w @ w) * x.double()
            torch._dynamo.graph_break()
            with torch.no_grad():
                x.mul_(2)
        return y

    def loss(**compile_arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        x, w = leaves()
        return torch.compile(step, **compile_arguments)(x.detach(), w).sum()

    loss(backend="eager").backward()
    for arguments in (STOCK, AOT_EAGER):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss(**arguments).backward()


@pytest.mark.slow
def test_a_queue_that_is_copied_and_then_written_through_inductor() -> None:
    """The negatives of a contrastive loss: Inductor takes the copy away, so that a backward reads
    what the step has put into the queue (stock's does, PyTorch #197039)."""

    def negatives(x: torch.Tensor, w: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
        y = x @ w
        scores = y @ queue.clone().detach()
        with torch.no_grad():
            queue[:, :8] = y.t()
        return scores

    def gradients(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        x, w, queue = (
            torch.randn(*shape, generator=generator) for shape in ((8, 16), (16, 16), (16, 32))
        )
        leaves = [x.requires_grad_(), w.requires_grad_()]
        scores = torch.compile(negatives, **compile_arguments)(*leaves, queue)
        return [*torch.autograd.grad(scores.sin().sum(), leaves), queue]

    expected = gradients(backend="eager")
    for actual, wanted in zip(gradients(backend="smart_autocast"), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_reads_that_inductor_takes_away() -> None:
    """What they return is what they read, which is written to: gradients were those of the new
    numbers, as with stock."""

    def step(x: torch.Tensor, w: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        y = x @ w
        reads = buffer.double().float(), buffer**1, buffer.repeat(1, 1), buffer + torch.zeros(4)
        products = [y * read for read in (*reads, buffer.bfloat16().half())]
        with torch.no_grad():
            buffer.mul_(-1)
        return torch.cat(products)

    def gradients(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, w = leaves()
        y = function(x, w, w.detach() + 2)
        return torch.autograd.grad(y.sum(), [x, w])

    torch._dynamo.reset()
    compiled = gradients(torch.compile(step, backend="smart_autocast"))
    for actual, expected in zip(compiled, gradients(step), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class Counts(nn.Module):
    """Dynamo's graph returns the counter, in order to set the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layer(h.relu_())


def returns_one_of_two(n: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counted = n.add_(1)
    w.detach().mul_(0.5)
    return counted, w * 2


def looks_up(n: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counted = n.add_(1)
    return counted, F.embedding(torch.arange(4), w, max_norm=1.0)


@pytest.mark.parametrize("function", [returns_one_of_two, looks_up])
def test_an_input_that_is_written_and_returned_beside_another(function: Any) -> None:
    """torch before 2.15, stock too: the weight was overwritten by the counter."""

    def run(call: Any) -> list[torch.Tensor]:
        n, w = torch.zeros(()), nn.Parameter(torch.arange(16.0).view(4, 4))
        counted, result = call(n, w)
        assert counted is n
        (gradient,) = torch.autograd.grad(result.sum(), w)
        return [n, w, result, gradient]

    torch._dynamo.reset()
    assert_same_bits(run(torch.compile(function, **AOT_EAGER)), run(function))


def test_a_counter_beside_an_activation_that_is_written_to() -> None:
    def run(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Counts()
        call = torch.compile(model, **arguments) if arguments else model
        results = []
        for backward in (False, True):
            h = torch.randn(2, 4, requires_grad=True) * 1
            with torch.autocast(**BF16):
                y = call(h)
            with torch.autocast(**BF16, enabled=backward):
                y.float().square().sum().backward()
            results += [y, h, model.steps.clone(), model.layer.weight.grad.clone()]
        return results

    assert_same_bits(run(**AOT_EAGER), run())
