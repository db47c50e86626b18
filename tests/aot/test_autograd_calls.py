"""Every way to ask autograd for gradients of a compiled region, from outside and from inside."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch import config

from tests.aot.harness import (
    AOT_EAGER,
    ORACLE,
    STOCK,
    autocast,
    each_way,
    inside_region,
    island,
    leaves,
    mixed,
    same_bits,
)
from tests.support import assert_same_bits, needs_torch

Gradients = list[Any]
Ask = Callable[[torch.Tensor, list[torch.Tensor]], Gradients]


def copies(given: list[torch.Tensor]) -> Gradients:
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in given]


def retains_under_two_states(loss: torch.Tensor, given: list[torch.Tensor]) -> Gradients:
    found = []
    for inside in (True, False, True):
        with autocast(inside):
            loss.backward(retain_graph=True)
        found.append(copies(given))
        for leaf in given:
            leaf.grad = None
    return found


def accumulates(loss: torch.Tensor, given: list[torch.Tensor]) -> Gradients:
    for inside in (False, True, True):
        with autocast(inside):
            loss.backward(retain_graph=True)
    return copies(given)


def asks_for_gradients(loss: torch.Tensor, given: list[torch.Tensor]) -> Gradients:
    with autocast(True):
        both = torch.autograd.grad(loss, given, retain_graph=True)
    first = torch.autograd.grad(loss, given[:1], retain_graph=True)
    with autocast(True):
        second = torch.autograd.grad(loss, given[1:])
    return [both, first, second]


def gives_a_gradient(loss: torch.Tensor, given: list[torch.Tensor]) -> Gradients:
    with autocast(True):
        return list(torch.autograd.grad(loss, given, torch.full((), 0.3)))


def backward_in_another_thread(loss: torch.Tensor, given: list[torch.Tensor]) -> Gradients:
    """Autocast is per thread: on around this one, off in the other."""
    thread = threading.Thread(target=loss.backward)
    with autocast(True):
        thread.start()
        thread.join()
    return copies(given)


def writes_hooks(loss: torch.Tensor, given: list[torch.Tensor]) -> Gradients:
    seen: Gradients = []
    for leaf in given:
        leaf.register_hook(seen.append)
        leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    with autocast(True):
        loss.backward()
    return seen


ASKS = {
    ask.__name__: ask
    for ask in (
        retains_under_two_states,
        accumulates,
        asks_for_gradients,
        gives_a_gradient,
        backward_in_another_thread,
        writes_hooks,
    )
}


def compiled_loss(way: str, **arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch._dynamo.reset()
    given = leaves()
    function = inside_region(mixed) if way == "region" else mixed
    with autocast(way == "ambient"):
        product = torch.compile(function, fullgraph=True, **arguments)(*given)
    return product.float().square().sum(), given


@pytest.mark.parametrize(("name", "way"), each_way(ASKS))
def test_gradients_however_they_are_asked_for(name: str, way: str) -> None:
    # A donated buffer is used up by the first backward; see below.
    with config.patch(donated_buffer=False):
        expected = ASKS[name](*compiled_loss(way, **ORACLE))
        actual = ASKS[name](*compiled_loss(way, **AOT_EAGER))
    assert_same_bits(actual, expected)


def test_the_two_states_of_a_retained_graph_differ() -> None:
    inside, outside, again = retains_under_two_states(*compiled_loss("off", **ORACLE))
    assert not same_bits(inside, outside)
    assert_same_bits(again, inside)


def grad(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    loss = mixed(x, w).float().square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [x, w])]


def grad_if_used(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    loss = mixed(x, w).float().square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, inputs=(w,), allow_unused=True)]


def backward(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    loss = mixed(x, w).float().square().sum()
    loss.backward()
    return [loss.detach()]


def gradient_penalty(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    """A loss of gradients; the caller goes back through them, to `w` as well."""
    score = mixed(x, w).float().sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    return [(gradient.square().sum() - 1).square()]


def island_alone(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    return list(torch.autograd.grad(island(x, w).sum(), [x, w], retain_graph=True))


def products_of_elements(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    """The call of `island_alone`, of a backward on which autocast does not act."""
    with torch.autocast("cpu", enabled=False):
        product = x.cos() * w.sin()
    return list(torch.autograd.grad(product.sum(), [x, w], retain_graph=True))


def pullback_of_island(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    output, pullback = torch.func.vjp(island, x, w)
    return [gradient.detach() for gradient in pullback(torch.ones_like(output))]


def pullback_of_products(x: torch.Tensor, w: torch.Tensor) -> Gradients:
    def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.cos() * w.sin()

    output, pullback = torch.func.vjp(products, x, w)
    return [gradient.detach() for gradient in pullback(torch.ones_like(output))]


def inside_the_graph(function: Any, way: str, **arguments: Any) -> Gradients:
    """What a function that calls autograd itself returns, and leaves in `grad`, in two calls."""
    torch._dynamo.reset()
    given = leaves()
    function = inside_region(function) if way == "region" else function
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        compiled = torch.compile(function, fullgraph=True, **arguments)
        with autocast(way == "ambient"):
            found = [compiled(*given) for _ in range(2)]
    for results in found:
        if results[0].requires_grad:
            results[0].backward()
    return [found, copies(given)]


def requires_grad_between_two_reads(x: torch.Tensor, w: torch.Tensor) -> Any:
    d = x.detach()
    before = d @ w
    d.requires_grad_()
    after, again = d @ w, (2 * d) @ w
    (gradient,) = torch.autograd.grad((after.sin() * again + d @ w).float().sum() + d.sum(), d)
    return [gradient.detach(), before.detach()]


@pytest.mark.parametrize("way", ["off", "ambient", "region"])
@pytest.mark.parametrize(
    "function",
    [
        *(grad, grad_if_used, backward, gradient_penalty),
        pytest.param(
            requires_grad_between_two_reads,
            marks=needs_torch(2, 13, because="Dynamo does not trace requires_grad_"),
        ),
    ],
)
def test_calls_of_autograd_inside_the_graph(function: Any, way: str) -> None:
    expected = inside_the_graph(function, way, **ORACLE)
    assert_same_bits(inside_the_graph(function, way, **AOT_EAGER), expected)


@pytest.mark.parametrize("validate", ["strict", "dtype", "off"])
@pytest.mark.parametrize(
    ("products", "alone"),
    [(products_of_elements, island_alone), (pullback_of_products, pullback_of_island)],
)
def test_what_a_backward_inside_the_graph_does_hangs_on_the_calls_before_it(
    products: Any, alone: Any, validate: str
) -> None:
    """A verdict on the first call must not be that on the second, equal one."""
    backend = {**AOT_EAGER, "options": {"inner": "aot_eager", "validate": validate}}
    for function in (products, alone):
        expected = inside_the_graph(function, "ambient", **ORACLE)
        assert_same_bits(inside_the_graph(function, "ambient", **backend), expected)
    outside = inside_the_graph(alone, "off", **ORACLE)
    assert not same_bits(outside, expected)  # the state matters


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_donated_buffers_and_a_retained_graph(inside: bool) -> None:
    """torch's own error for a graph compiled to use its buffers up, or the right result."""

    def outcome(**arguments: Any) -> tuple[str, Gradients]:
        with config.patch(donated_buffer=True):
            loss, given = compiled_loss("off", **arguments)
            with autocast(inside):
                try:
                    loss.backward(retain_graph=True)
                except RuntimeError as error:
                    return str(error).splitlines()[0], copies(given)
        return "", copies(given)

    error, gradients = outcome(**AOT_EAGER)
    assert error == outcome(**STOCK)[0]
    if not error:
        assert_same_bits(gradients, outcome(**ORACLE)[1])


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_double_backward_is_torchs_error(inside: bool) -> None:
    loss, given = compiled_loss("ambient", **AOT_EAGER)
    with autocast(inside):
        gradient, _ = torch.autograd.grad(loss, given, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradient.square().sum().backward()


def test_two_threads_in_two_states_at_once() -> None:
    """One compiled function; each thread forward and backward, with its own state around both."""
    states = {"off": False, "on": True}
    rounds = 8

    def work(compiled: Any, inside: bool, meet: Callable[[], Any]) -> Gradients:
        found = []
        for _ in range(rounds):
            given = leaves()
            meet()
            loss = compiled(*given).square().sum()
            meet()
            with autocast(inside):
                loss.backward()
            found.append(copies(given))
        return found

    torch._dynamo.reset()
    expected = {
        n: work(torch.compile(island, **ORACLE), s, lambda: None) for n, s in states.items()
    }
    torch._dynamo.reset()
    compiled = torch.compile(island, **AOT_EAGER)
    barrier = threading.Barrier(len(states), timeout=60)
    found: dict[str, Gradients] = {}

    def in_thread(name: str) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            try:
                found[name] = work(compiled, states[name], barrier.wait)
            except BaseException:
                barrier.abort()
                raise

    threads = [threading.Thread(target=in_thread, args=(name,)) for name in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == expected.keys(), "a thread raised"
    for name, values in expected.items():
        assert_same_bits(found[name], values, name)
    assert not same_bits(found["off"], found["on"])
