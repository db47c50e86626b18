"""Two threads that come to the weight cache at once: the second waits for the first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from autocast_backend import multi_cast
from autocast_backend.weights import graph_weights
from tests.support import BF16, FP16, assert_same_bits

from .support import bf16, casts_made, data, make, ours

WEIGHTS = 4  # of a Net


def compiled_net() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache="version"))

    def call() -> Tensor:
        with torch.no_grad(), bf16():
            return compiled(x)  # type: ignore[no-any-return]

    call()
    return model, call


def meanwhile(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Start a thread for `work` once casts have been made and nobody knows of them yet. It gets
    half a second before they are stored."""
    thread = threading.Thread(target=work)

    def made(weights: Sequence[Tensor], *args: Any, **arguments: Any) -> Any:
        casts = multi_cast(weights, *args, **arguments)
        monkeypatch.setattr(graph_weights, "multi_cast", multi_cast)
        thread.start()
        thread.join(0.5)
        return casts

    monkeypatch.setattr(graph_weights, "multi_cast", made)
    return thread


def changes(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def test_casts_are_made_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = compiled_net()
    changes(model)
    results: list[Tensor] = []
    thread = meanwhile(lambda: results.append(call()), monkeypatch)

    def both() -> None:
        results.append(call())
        thread.join()

    assert casts_made(both) == WEIGHTS
    assert_same_bits(*results)


def test_a_step_waits_for_the_casts_that_it_spoils(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = compiled_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    changes(model)
    thread = meanwhile(optimizer.step, monkeypatch)
    before = call()
    thread.join()
    after = call()
    assert not torch.equal(after, before)
    with torch.no_grad(), bf16():
        assert_same_bits(after, model(data(3, 8)))


def test_the_second_call_of_a_scope_is_compiled_by_one_of_them() -> None:
    x, compiled_graphs = data(3, 8), 0
    results: list[Tensor] = []

    def call() -> None:
        with torch.no_grad(), bf16():
            results.append(compiled(x))

    thread = threading.Thread(target=call)

    def inner(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal compiled_graphs
        compiled_graphs += 1
        if compiled_graphs == 2:  # with casts outside: until then nobody knows of it
            thread.start()
            thread.join(0.5)
        return graph_module.forward

    compiled = torch.compile(make(), **ours(inner=inner))
    with torch.no_grad(), bf16():
        results += [compiled(x), compiled(x)]
        thread.join()
    assert compiled_graphs == 2
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_what_is_compiled_late_tells_other_threads_so_as_dynamo_does() -> None:
    """PyTorch takes the trace of a graph for `torch.fx.symbolic_trace` otherwise, and has compiled
    functions that another thread calls meanwhile raise."""
    told = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        told.append(torch.compiler.is_compiling())
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    inner = aot_autograd(fw_compiler=compiler)
    model = torch.nn.Linear(4, 4)
    options = {"inner": inner}
    compiled = torch.compile(model, backend="smart_autocast", options=options)
    with torch.no_grad(), torch.autocast(**BF16):
        compiled(torch.randn(2, 4))
        compiled(torch.randn(2, 4))  # compiles again: the casts are made outside
    first, *late = told
    assert late == [first]

    told.clear()
    with torch.autocast(**BF16):
        loss = compiled(torch.randn(2, 4)).float().square().sum()
    with torch.autocast(**FP16):
        loss.backward()
    first, _, variant = told  # the first backward's compiler is called as stock calls it
    assert variant == first
