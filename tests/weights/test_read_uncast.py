"""Gradients of weights that calls read without a cast, too, in the graph that casts them: eager's,
in eager's order of additions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import assert_same_bits

from .support import EAGER, bf16, casts_made, data, make, ours


def test_a_weight_that_is_read_without_a_cast_too() -> None:
    """A tied embedding: one gradient from the lookup, one from the cast for the output layer."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 8)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.table(i), self.table.weight)

    def run(**arguments: Any) -> torch.Tensor | None:
        torch._dynamo.reset()
        model = make(Tied)
        compiled = torch.compile(model, **arguments)
        with bf16():
            loss = sum(compiled(torch.tensor([0, 3, i])).float().square().sum() for i in (1, 2))
        loss.backward()  # type: ignore[union-attr]
        return model.table.weight.grad  # type: ignore[union-attr,return-value]

    expected = run(**EAGER)
    assert casts_made(lambda: assert_same_bits(run(**ours()), expected)) == 1


@pytest.mark.parametrize("joined_first", [True, False])
@pytest.mark.parametrize(
    "join",
    [
        lambda q, k, low: torch.cat([q, k]),
        lambda q, k, low: torch.stack([q, k]),
        lambda q, k, low: torch.cat([q, low, k]),
    ],
    ids=["cat", "stack", "cat_mixed"],
)
def test_weights_that_are_joined_too(join: Any, joined_first: bool) -> None:
    """Two weights are read by `cat`, which promotes, and by a linear layer each."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)
            self.k = nn.Linear(8, 8)
            self.register_buffer("low", data(8, 8).bfloat16())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if not joined_first:
                apart = self.q(x), self.k(x)
            joined = x @ join(self.q.weight, self.k.weight, self.low).mT
            if joined_first:
                apart = self.q(x), self.k(x)
            return joined, *apart

    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model = make(Joined)
        compiled = torch.compile(model, **arguments)
        with bf16():
            results = [*compiled(data(3, 8)), *compiled(data(3, 8) * 2)]
        sum(y.float().square().sum() for y in results).backward()  # type: ignore[union-attr]
        return [p.grad for p in model.parameters()]

    expected = run(**EAGER)
    assert casts_made(lambda: assert_same_bits(run(**ours()), expected)) == 4


def _assigned(y: torch.Tensor, w: torch.Tensor) -> None:
    y[:] = y * w.detach() + w


def _set(y: torch.Tensor, w: torch.Tensor) -> None:
    y[:4] = w.detach()[4:]
    y[:] = w


@pytest.mark.parametrize(
    "write",
    [
        lambda y, w: y.addmm_(y.detach().cos(), w),
        lambda y, w: y.mul_(w),
        lambda y, w: y.copy_(w),
        _assigned,
        _set,
    ],
    ids=["addmm_", "mul_", "copy_", "assigned", "setitem"],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_weight_that_a_call_reads_and_writes_elsewhere(before: bool, write: Any) -> None:
    """Two contexts and one backward: two gradients from reads without a cast, two from casts."""

    def run(**arguments: Any) -> torch.Tensor | None:
        torch._dynamo.reset()

        def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 1
            if before:
                write(y, w)
            z = torch.sin(x @ w) @ w
            if not before:
                write(y, w)
            return y, z

        weight, loss = nn.Parameter(data(8, 8)), torch.zeros(())
        compiled = torch.compile(function, **arguments)
        for x in torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(2)):
            with bf16():
                y, z = compiled(x, weight)
            loss = loss + y.float().square().sum() * 1.1 + z.float().square().sum()
        loss.backward()
        return weight.grad

    assert_same_bits(run(**ours()), run(**EAGER))


@pytest.mark.parametrize("lookup_first", [True, False])
@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_a_weight_that_several_calls_read_without_a_cast_too(
    lookup_first: bool, lifetime: str
) -> None:
    """A tied embedding in three calls before one backward: one gradient from each lookup, and one
    from the cast, in the place of the order that the first call gives it."""

    def function(w: torch.Tensor, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not lookup_first:
            x = nn.functional.linear(x, w).float().mean(-1, keepdim=True)
        found = nn.functional.embedding(i, w).sin()
        return nn.functional.linear((found * x).tanh(), w) if lookup_first else found * x

    def run(**arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        w, rows = nn.Parameter(data(50, 16)), torch.arange(60)
        compiled = torch.compile(function, **arguments)
        with bf16():
            loss = sum(
                compiled(w, (rows + call) % 50, data(3, 60, 16)[call]).float().square().mean()
                for call in range(3)
            )
        loss.backward()  # type: ignore[union-attr]
        assert w.grad is not None
        return w.grad

    expected = run(**EAGER)
    assert casts_made(lambda: assert_same_bits(run(**ours(weight_cache=lifetime)), expected)) == 1


@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("same", [lambda w: w.float(), lambda w: w.to(w.dtype).contiguous()])
def test_a_weight_that_a_call_returns_as_it_is(same: Any, frozen: bool, lifetime: str) -> None:
    """The router of a mixture of experts asks for a float32 weight in float32, and autocast casts
    that."""

    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        x, w = data(3, 8, 16).requires_grad_(), nn.Parameter(data(5, 16), requires_grad=not frozen)
        compiled = torch.compile(
            lambda x, w: nn.functional.linear(x, same(w)).float().softmax(-1), **arguments
        )
        with bf16():
            loss = sum((compiled(part, w) * data(8, 5)).square().mean() for part in x)
        loss.backward()  # type: ignore[union-attr]
        return [x.grad, w.grad]

    expected = run(**EAGER)
    made = casts_made(lambda: assert_same_bits(run(**ours(weight_cache=lifetime)), expected))
    assert made == (lifetime == "version" or not frozen)


def test_a_weight_that_a_call_reads_beside_a_dynamic_size() -> None:
    """What a call takes in may be a number that is not known yet."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, w) * w.repeat(x.shape[0], 1).mean()

    def run(**arguments: Any) -> torch.Tensor | None:
        torch._dynamo.reset()
        w = nn.Parameter(data(5, 8))
        compiled = torch.compile(function, dynamic=True, **arguments)
        with bf16():
            loss = sum(compiled(data(n, 8), w).float().square().mean() for n in (3, 4))
        loss.backward()  # type: ignore[union-attr]
        return w.grad

    expected = run(**EAGER)
    assert casts_made(lambda: assert_same_bits(run(**ours()), expected)) == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda y, w: torch.cat([y, w]),
        lambda y, w: torch.addcmul(y, y, w),
        lambda y, w: nn.functional.mse_loss(y, w, reduction="none"),
    ],
    ids=["cat", "addcmul", "mse_loss"],
)
def test_a_weight_that_a_call_reads_beside_a_product_with_it(read: Any) -> None:
    """The product is cast to float32 for a call that reads the weight without a cast."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return read(x @ w, w)

    def run(**arguments: Any) -> torch.Tensor | None:
        torch._dynamo.reset()
        w = nn.Parameter(data(8, 8).mul(0.3))
        compiled = torch.compile(function, **arguments)
        with bf16():
            loss = sum(compiled(x, w).float().square().mean() for x in data(2, 8, 8))
        loss.backward()  # type: ignore[union-attr]
        return w.grad

    expected = run(**EAGER)
    assert casts_made(lambda: assert_same_bits(run(**ours()), expected)) == 1


def casts_with_eagers_gradient(function: Callable[..., torch.Tensor]) -> int:
    """How many casts one call and its backward make, whose gradient of the weight is eager's."""

    def run(**arguments: Any) -> torch.Tensor | None:
        torch._dynamo.reset()
        x, w = data(8, 8), data(8, 8).mul(0.3).requires_grad_()
        with bf16():
            loss = torch.compile(function, **arguments)(x, w).float().square().mean()
        loss.backward()
        return w.grad

    expected = run(**EAGER)
    return casts_made(lambda: assert_same_bits(run(**ours()), expected))


@pytest.mark.parametrize("read", [lambda w: w @ w, nn.functional.normalize])
def test_a_weight_that_one_call_reads_twice_without_a_cast(read: Any) -> None:
    """Two gradients from one call, and one from the cast: a sum that depends on their order."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with bf16(enabled=False):
            y = read(w)
        return x @ w + w @ (y @ w)

    assert casts_with_eagers_gradient(function) == 0


@pytest.mark.parametrize("first", [True, False])
def test_a_weight_that_is_assigned_inside_of_a_transform(first: bool) -> None:
    """What the transform makes of its gradient is not known: its casts stay in the graph."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def assigned(row: torch.Tensor) -> torch.Tensor:
            y = row * 1
            y[:] = w
            return y.sin()

        def mapped() -> torch.Tensor:
            return torch.vmap(assigned)(torch.stack([x, x])).sum(0)

        return mapped() + x @ w if first else x @ w + mapped()

    assert casts_with_eagers_gradient(function) == 0


@torch._dynamo.allow_in_graph
def _reads_it_once(w: torch.Tensor) -> torch.Tensor:
    sine = w.sin()
    return sine * sine.cos()


def test_a_weight_that_calls_read_one_after_another_without_a_cast() -> None:
    """Each reads it once, though there are more ways to it: through the calls before, or through
    what a call has made of it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w + x.cos() @ (_reads_it_once(w) * w + w)

    assert casts_with_eagers_gradient(function) == 1


@pytest.mark.parametrize("together", [False, True])
def test_a_weight_that_two_calls_read_without_a_cast(together: bool) -> None:
    """As T5's table, by two lookups and the output layer. From the second call of a scope on,
    eager's cast is older than what the call adds, and its gradient comes last."""

    def function(w: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        found = nn.functional.embedding(i, w) + nn.functional.embedding(j, w).sin()
        return nn.functional.linear(found, w)

    def run(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        w = data(50, 16).requires_grad_()
        compiled = torch.compile(function, **arguments)

        def loss(call: int) -> torch.Tensor:
            found = compiled(w, torch.arange(12) % (7 + call), torch.arange(12) % 5)
            return found.float().square().mean()

        with bf16():
            if together:
                total = loss(0) + loss(1) + loss(2)
                return list(torch.autograd.grad(total, w))
            return [torch.autograd.grad(loss(call), w)[0] for call in range(3)]

    expected = run(**EAGER)
    assert casts_made(lambda: assert_same_bits(run(**ours()), expected)) == 1


@pytest.mark.parametrize(
    ("read", "equal"),
    [
        (lambda w: w.detach().square().sum(), True),
        (lambda w: w[:1].square().sum(), False),  # Known, as above.
    ],
    ids=["detached", "a view"],
)
def test_a_weight_that_is_also_read_through_a_view(read: Any, equal: bool) -> None:
    def run(**arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        w, x = data(50, 16).requires_grad_(), data(30, 50)
        compiled = torch.compile(lambda w: (x @ w).float().square().mean() + read(w), **arguments)
        with bf16():
            return torch.autograd.grad(sum(compiled(w) for _ in range(3)), w)[0]

    expected, results = run(**EAGER), []
    casts = casts_made(lambda: results.append(run(**ours())))
    assert (casts, torch.equal(results[0], expected)) == (int(equal), equal)


def test_a_weight_that_one_call_reads_twice_from_the_second_call_of_a_scope_on() -> None:
    """Known: the day this fails, take it out of docs/weights.md."""

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ w + x @ nn.functional.normalize(w)

    def run(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        w, x = data(50, 16).requires_grad_(), data(30, 50)
        compiled = torch.compile(function, **arguments)
        with bf16():
            losses = [compiled(w, x).float().square().mean() for _ in range(2)]
            return list(torch.autograd.grad(losses[0] + losses[1], w))

    expected, actual = run(**EAGER), run(**ours())
    assert not torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-2, atol=1e-2)


def test_a_weight_that_two_calls_read_without_a_cast_after_no_grad() -> None:
    """Known: the day this fails, take it out of docs/weights.md."""

    def function(w: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        found = nn.functional.embedding(i, w) + nn.functional.embedding(j, w).sin()
        return nn.functional.linear(found, w)

    def run(**arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        w, i, j = data(50, 16).requires_grad_(), torch.arange(12) % 7, torch.arange(12) % 5
        compiled = torch.compile(function, **arguments)
        with bf16():
            with torch.no_grad():
                compiled(w, i, j)
            return torch.autograd.grad(compiled(w, i, j).float().square().mean(), w)[0]

    expected, actual = run(**EAGER), run(**ours())
    assert not torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
