"""What a backward knows the values of its forward by, should that be traced again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from autocast_backend import BackwardError
from tests.backward.support import ours
from tests.support import BF16, assert_same_bits, needs_torch


def gradients(function: object, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = function(x, w)  # type: ignore[operator]
    with torch.autocast(**BF16):
        return torch.autograd.grad(y.square().sum(), (x, w))


def check_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_size_that_inductor_makes_a_number_of() -> None:
    """The lowering of `glu` does, after the joint graph was traced: of two traces, one has products
    of sizes among those of tensors, and other names for these."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x
        for _ in range(2):
            h = (h @ w + h.cos() @ w) * 0.3
        return F.glu(h @ w, 0)

    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=True, **ours("inductor"))
    generator = torch.Generator().manual_seed(8)
    x, w = (torch.randn(8, 8, generator=generator).requires_grad_() for _ in range(2))
    check_close(gradients(compiled, x, w), gradients(function, x, w))


@pytest.mark.slow
def test_a_call_that_nobody_reads() -> None:
    """Of the first trace, Inductor leaves one in the backward of `select`."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        first = w[:1].expand(x.shape[0], 1, 8)
        return (torch.cat([first, x], 1) @ w).tanh()[:, 0] @ w

    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=True, **ours("inductor"))
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, 8, generator=generator).requires_grad_() for s in ((3, 5), (8,)))
    check_close(gradients(compiled, x, w), gradients(function, x, w))


@needs_torch(2, 13, because="gradients of a convolution's pullback take no symbolic sizes")
def test_sizes_that_became_numbers_are_symbols_again() -> None:
    """AOTAutograd makes a number of a size where it traces the pullback of a convolution, after the
    write. Traced again with the number, `y[:, 0]` would not slice the first dimension."""

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(F.pad(x.transpose(1, 2), (1, 1), mode="reflect"), w[:, :, None])

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).clone()
        y[:, 0].mul_(0.5)
        out, pull = torch.func.vjp(lambda t: convolved(t, w), y)
        return (out + pull(torch.ones_like(out))[0].sum()) * y.sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=True, **ours())
    for rows in (4, 3):
        x = torch.linspace(-1, 1, rows * 24).view(rows, 3, 8).requires_grad_()
        w = torch.linspace(-1, 2, 64).view(8, 8).requires_grad_()
        assert_same_bits(gradients(compiled, x, w), gradients(function, x, w))


@pytest.mark.slow
def test_a_dynamic_backward_out_of_the_cache() -> None:
    """What it was when it was partitioned is in the cache as well, its sizes included."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin() * x.shape[0] @ w

    with fresh_cache():
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(function, dynamic=True, **ours("inductor"))
            for rows in (12, 16):
                generator = torch.Generator().manual_seed(rows)
                x, w = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (rows, 8))
                check_close(gradients(compiled, x, w), gradients(function, x, w))
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert counters["smart_autocast"]["backward_variants"] == 1


FLAG = False


@torch.compiler.allow_in_graph
def hidden(x: Tensor) -> Tensor:
    return x.sin() if not FLAG else (x.cos() * x).sin()


@contextlib.contextmanager
def flag_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "FLAG", True)
        yield


def test_another_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return hidden(hidden(x @ w) @ w).sin() @ w

    torch._dynamo.reset()
    x, w = (torch.randn(8, 8).requires_grad_() for _ in range(2))
    expected = gradients(function, x, w)
    compiled = torch.compile(function, **ours())
    y = compiled(x, w)
    with (
        flag_set(monkeypatch),
        torch.autocast(**BF16),
        pytest.raises(BackwardError, match="traced again, its forward is another one"),
    ):
        y.sum().backward()
    assert_same_bits(gradients(compiled, x, w), expected)  # nothing wrong was kept
