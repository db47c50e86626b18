"""Random numbers of a compiled region: drawn in the forward, met again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from tests.aot.harness import (
    AOT_EAGER,
    Case,
    assert_like_the_oracle,
    island,
    results,
    same_bits,
)
from tests.support import assert_same_bits

MIN_CUT, DEFAULT = "aot_eager", "aot_eager_default_partitioner"


def drops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(F.dropout(x @ w, 0.3), w)


def drops_of_its_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(F.dropout(x.sin(), 0.3), w)


def adds_noise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return island(y * torch.rand_like(y), w) + torch.randn(4, 4)


def leaks_at_random(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return island(F.rrelu(x @ w, training=True), w)


def attends(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = island(x, w).view(1, 2, 2, 4)
    return F.scaled_dot_product_attention(q, q, q.cos(), dropout_p=0.3)


@torch.library.custom_op(
    "smart_autocast_tests::fills", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,)
)
def fills(x: torch.Tensor) -> None:
    x.uniform_()


def draws_in_a_custom_op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    noise = torch.empty_like(x)
    fills(noise)
    return island(x.sin() * noise, w)


def filled(x: torch.Tensor) -> torch.Tensor:
    fills(x)
    return x


@torch.library.custom_op(
    "smart_autocast_tests::noise_like", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise_like(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


noise_like.register_fake(torch.empty_like)
noise_like.register_autograd(lambda ctx, grad: grad)


def draws_in_a_branch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    noise = torch.cond(x.sum() < 9, torch.rand_like, torch.randn_like, (x.detach(),))
    return island(x.sin() * noise, w)


CASES = {
    f.__name__: Case(f) for f in (drops, drops_of_its_input, adds_noise, leaks_at_random, attends)
}


@pytest.mark.parametrize(
    ("way", "partitioner"),
    [("off", MIN_CUT), ("off", DEFAULT), ("ambient", MIN_CUT), ("region", DEFAULT)],
)
@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_as_eager(name: str, way: str, partitioner: str) -> None:
    assert_like_the_oracle(CASES[name], way, options={"inner": partitioner})


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,  # PyTorch's own list has it
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(),
    "normal_": lambda x: torch.zeros_like(x).normal_(),
    "exponential_": lambda x: torch.zeros_like(x).exponential_(),
    "geometric_": lambda x: torch.zeros_like(x).geometric_(0.1),
    "cauchy_": lambda x: torch.zeros_like(x).cauchy_(),
    "log_normal_": lambda x: torch.zeros_like(x).log_normal_(),
    "rrelu": lambda x: F.rrelu(-x.abs(), training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "dirichlet": lambda x: torch._sample_dirichlet(x.float().exp().detach()),
    "custom op": lambda x: noise_like(x),
    "custom op that writes": lambda x: filled(torch.zeros_like(x)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_each_call_draws(draw: str) -> None:
    """Of calls with the same arguments stock makes one call, unless PyTorch's list of random ops
    (`torch._functorch.compile_utils.rand_ops`) has the op, and their numbers are the same."""

    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return island(y + DRAWS[draw](y), w) + DRAWS[draw](y)

    assert_like_the_oracle(Case(twice), "ambient", options={"inner": MIN_CUT})


@pytest.mark.slow
@pytest.mark.parametrize(("grad", "freezing"), [(True, False), (False, True)])
@pytest.mark.parametrize("draw", ["randn_like", "uniform_", "rrelu", "dirichlet", "custom op"])
def test_each_call_draws_with_inductor(draw: str, grad: bool, freezing: bool) -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return DRAWS[draw](y) * w.sum(), DRAWS[draw](y) * w.sum()

    torch._dynamo.reset()
    compiled = torch.compile(
        twice, backend="smart_autocast", options={"inductor": {"freezing": freezing}}
    )
    x, w = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = compiled(x, w)
    assert not torch.equal(first, second)


LITTLE_SAVED = CASES | {f.__name__: Case(f) for f in (draws_in_a_custom_op, draws_in_a_branch)}


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_memory_budget": 0.0},
        {"activation_memory_budget": 0.05},
        {"aggressive_recomputation": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LITTLE_SAVED)
def test_the_same_numbers_where_little_is_saved(
    name: str, dynamic: bool, settings: dict[str, Any]
) -> None:
    """With stock the backward draws others (PyTorch #190758)."""
    with functorch_config.patch(settings):
        assert_like_the_oracle(
            LITTLE_SAVED[name], "ambient", options={"inner": MIN_CUT}, dynamic=dynamic
        )


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_inductor_draws_once_for_a_checkpoint(budget: float) -> None:
    """From a seed, which the state that a checkpoint draws again from has no part in."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * torch.rand_like(x)

    torch._dynamo.reset()
    x = (torch.rand(8, 8) + 0.5).requires_grad_()
    with functorch_config.patch(activation_memory_budget=budget):
        y = torch.compile(
            lambda x: checkpoint(noisy, x, use_reentrant=False) * 1, backend="smart_autocast"
        )(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient / x.cos(), y / x.sin())


def test_another_seed_is_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above seeds each forward alike; here is what that hides."""
    seeded = results(CASES["drops"], "off", **AOT_EAGER)
    seed = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda n: seed(n + 1))
    other = results(CASES["drops"], "off", **AOT_EAGER)
    assert not same_bits(seeded[0]["outputs"], other[0]["outputs"])


@pytest.mark.parametrize("p", [0.15, 0.71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["aot_eager", "lite"])
def test_dropout_is_rounded_as_in_eager_mode(dtype: torch.dtype, p: float, mode: str) -> None:
    """AOTAutograd writes `native_dropout` for it: on the CPU, that rounds elsewhere."""

    def dropped(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(1024, requires_grad=True)
        weights = torch.randn(1024, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.compile(lambda x: F.dropout(x.to(dtype), p), **compile_arguments)(x)
        return [y, *torch.autograd.grad(y, x, weights)]

    ours = AOT_EAGER if mode == "aot_eager" else {"backend": "smart_autocast", "mode": mode}
    eager, stock = dropped(backend="eager"), dropped(backend="aot_eager")
    assert not all(map(same_bits, stock, eager)), "a case that shows nothing"
    assert_same_bits(dropped(**ours), eager)


@torch.compiler.nested_compile_region
def dropped_in_a_region(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.sin(), 0.15).cos()


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.15),
        lambda x: F.dropout(x.transpose(0, 1), 0.15) * 2,
        lambda x: dropped_in_a_region(x) + dropped_in_a_region(x * 2),
    ],
    ids=["input", "transposed", "nested"],
)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_dropout_in_float32(drop: Callable[..., Any], grad: bool, dynamic: bool) -> None:
    def dropped(function: Callable[..., Any]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.randn(64, 32, requires_grad=grad)
        y = function(x)
        return [y, *(torch.autograd.grad(y.square().sum(), x) if grad else ())]

    eager = dropped(drop)
    stock = dropped(torch.compile(drop, dynamic=dynamic, backend="aot_eager"))
    assert not same_bits(stock, eager), "a case that shows nothing"
    assert_same_bits(dropped(torch.compile(drop, dynamic=dynamic, **AOT_EAGER)), eager)
