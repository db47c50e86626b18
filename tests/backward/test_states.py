"""The state at forward, the state at backward and `backward_pass_autocast`: all of them, against
eager run the way the option promises.

    "auto"      eager with backward in the state it really runs in
    pinned      eager with backward in the assumed state, whatever is on

What "would have changed the backward" means is taken from eager as well: its gradients in the two
states differ.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import nop
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel

from autocast_backend import BackwardAutocastWarning
from autocast_backend.backward import region
from autocast_backend.backward.differences import Call
from tests.backward.support import (
    EAGER,
    OFF,
    STATES,
    STOCK,
    Steps,
    forget_variants,
    ours,
    same_bits,
    variants,
)
from tests.support import BF16, FP16, HalvesProducts, assert_same_bits


class Island(nn.Module):
    """Every two states give another backward: products in float32 between products in low
    precision."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        with torch.autocast("cpu", enabled=False):
            return self.inside(y.float())


class Product(nn.Linear):
    """What the forward has saved is in its own low precision: autocast to the same changes
    nothing."""

    def __init__(self) -> None:
        super().__init__(8, 8)


class Elementwise(nn.Module):
    """No state changes the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 3.1).relu() + x.sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "island": Island,
    "product": Product,
    "elementwise": Elementwise,
}
OPTIONS: dict[str, Any] = {
    "auto": "auto",
    "same_as_forward": "same_as_forward",
    "off": "off",
    "dict": FP16,
    "list": [BF16],
}


def _x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Run:
    """A step: what it computed, the warnings it gave, the variants compiled for it."""

    values: list[Any]
    warned: int
    variants: int


def run(steps: Steps, forward: str, backward: str) -> Run:
    forget_variants()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = steps.step(STATES[forward], STATES[backward])
    warned = sum(issubclass(w.category, BackwardAutocastWarning) for w in caught)
    return Run(values, warned, variants())


@functools.cache
def eager(model: str, forward: str) -> dict[str, Run]:
    steps = Steps(MODELS[model], _x, **EAGER)
    return {backward: run(steps, forward, backward) for backward in STATES}


@functools.cache
def compiled(model: str, forward: str, option: str) -> list[tuple[str, Run]]:
    """One compilation and two steps in every state, not two of the same state in a row."""
    steps = Steps(MODELS[model], _x, **ours(backward_pass_autocast=OPTIONS[option]))
    return [(backward, run(steps, forward, backward)) for backward in [*STATES, *STATES]]


def promised(option: str, forward: str, backward: str) -> str:
    pinned = {"same_as_forward": forward, "off": "off", "dict": "fp16", "list": "bf16"}
    return pinned.get(option, backward)


def differ(model: str, forward: str, first: str, second: str) -> bool:
    """Whether eager's backward is another in these two states."""
    in_state = eager(model, forward)
    return not same_bits(in_state[first].values, in_state[second].values)


ALL = pytest.mark.parametrize(
    ("model", "forward", "option"),
    [
        (model, forward, option)
        for model in MODELS
        for forward in STATES
        for option in OPTIONS
        if model == "island" or isinstance(OPTIONS[option], str)
    ],
)


def test_the_models_are_what_they_say() -> None:
    pairs = [("off", "bf16"), ("off", "fp16"), ("bf16", "fp16")]
    for forward in STATES:
        assert all(differ("island", forward, *pair) for pair in pairs)
        assert not any(differ("elementwise", forward, *pair) for pair in pairs)
    assert [differ("product", "bf16", *pair) for pair in pairs] == [False, True, True]
    assert [differ("product", "fp16", *pair) for pair in pairs] == [True, False, True]


@ALL
def test_bits(model: str, forward: str, option: str) -> None:
    for backward, actual in compiled(model, forward, option):
        expected = eager(model, forward)[promised(option, forward, backward)]
        assert_same_bits(actual.values, expected.values, f"backward under {backward}")


@pytest.mark.parametrize("forward", STATES)
def test_bits_in_inductors_lite_mode(forward: str) -> None:
    """It runs op by op, and AOTAutograd traces its joint graph once more."""
    steps = Steps(Island, _x, backend="smart_autocast", mode="lite")
    for backward in STATES:
        expected = eager("island", forward)[backward]
        assert_same_bits(run(steps, forward, backward).values, expected.values, backward)


@ALL
def test_a_mismatch_warns_where_it_matters_and_only_there(
    model: str, forward: str, option: str
) -> None:
    """Once for each state; "auto" never does."""
    runs = compiled(model, forward, option)
    expected = [
        differ(model, forward, promised(option, forward, backward), backward) for backward in STATES
    ]
    assert [step.warned for _, step in runs[:3]] == expected
    assert [step.warned for _, step in runs[3:]] == [0, 0, 0]


@ALL
def test_variants_are_compiled_for_states_that_matter_once(
    model: str, forward: str, option: str
) -> None:
    """The backward compiled with autocast off serves every state that changes nothing. A pinned
    one is counted in the first state it meets."""
    runs = compiled(model, forward, option)
    needed = {promised(option, forward, backward) for backward in STATES}
    expected = sum(differ(model, forward, "off", state) for state in needed)
    met = runs[:3] if option in ("auto", "off") else runs[:1]
    assert sum(step.variants for _, step in met) == expected
    assert [step.variants for _, step in runs[3:]] == [0, 0, 0]


STOCK_COMPUTES: dict[str, dict[str, str | None]] = {
    "off": {"off": "off", "bf16": None, "fp16": None},
    "bf16": {"off": "bf16", "bf16": "bf16", "fp16": "bf16"},
    "fp16": {"off": "fp16", "bf16": "fp16", "fp16": "fp16"},
}
"""Of stock's backward: the state at forward, the state at backward, and the state in which eager's
backward has these bits. None: it has them in no state."""


@pytest.mark.parametrize("forward", STATES)
def test_what_stock_computes(forward: str) -> None:
    """The state around the forward counts. Where that was off, the compiled backward runs under
    whatever is on, and its ops get casts that eager's do not get."""
    steps = Steps(Island, _x, **STOCK)
    for backward, expected in STOCK_COMPUTES[forward].items():
        values = run(steps, forward, backward).values
        same = [s for s in STATES if same_bits(values, eager("island", forward)[s].values)]
        assert same == ([expected] if expected else []), backward


@pytest.mark.parametrize("order", [("off", "bf16", "fp16"), ("fp16", "bf16", "off")])
def test_one_forward_and_a_backward_in_each_state(order: tuple[str, ...]) -> None:
    """In any order, also where the first backward of all runs in a state that matters."""

    def gradients(**compile_arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Island()
        y = torch.compile(model, **compile_arguments)(_x())
        results = []
        for state in order:
            with torch.autocast(**STATES[state]):
                results += torch.autograd.grad(
                    y, list(model.parameters()), torch.ones_like(y), retain_graph=True
                )
        return results

    with torch._functorch.config.patch(donated_buffer=False):
        forget_variants()
        assert_same_bits(gradients(**ours()), gradients(**EAGER))
    assert variants() == 2


def test_an_inner_compiler_whose_code_takes_its_arguments_one_by_one() -> None:
    """As custom backends for `aot_autograd` return it; PyTorch's own take a list of them."""
    inner = aot_autograd(fw_compiler=lambda graph_module, inputs: graph_module.forward)
    forget_variants()
    for model in (Elementwise, Island):
        values = Steps(model, _x, **ours(inner)).step(STATES["off"], STATES["bf16"])
        assert_same_bits(values, Steps(model, _x, **EAGER).step(STATES["off"], STATES["bf16"]))
    assert variants() == 1


def test_autocast_switched_off_again_around_backward_is_off() -> None:
    forget_variants()
    steps = Steps(Island, _x, **ours())
    with torch.autocast(**BF16):
        actual = steps.step(STATES["bf16"], STATES["off"])
    assert_same_bits(actual, eager("island", "bf16")["off"].values)
    assert variants() == 0


def test_each_size_of_a_dynamic_graph_follows_the_state() -> None:
    def results(**compile_arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Island()
        function = torch.compile(model, dynamic=True, **compile_arguments)
        found = []
        for size in (3, 5, 9):
            for state in STATES.values():
                model.zero_grad()
                x = _x().repeat(3, 1)[:size].clone().requires_grad_()
                with torch.autocast(**BF16):
                    y = function(x)
                with torch.autocast(**state):
                    y.square().sum().backward()
                found += [x.grad, *(p.grad.clone() for p in model.parameters())]
        return found

    forget_variants()
    assert_same_bits(results(**ours()), results(**EAGER))
    assert variants() == 2


def attention(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x.cos()).sin()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return ((x * torch.tensor([0.1, 0.2, 0.3, 0.4] * 2)).float().sin() @ x.mT).sin()


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("forward", [OFF, BF16], ids=["off", "bf16"])
@pytest.mark.parametrize("backward", [OFF, BF16], ids=["off", "bf16"])
@pytest.mark.parametrize(
    ("function", "around_forward", "around_backward"),
    [
        (attention, lambda: sdpa_kernel(SDPBackend.MATH), contextlib.nullcontext),
        (attention, contextlib.nullcontext, lambda: sdpa_kernel(SDPBackend.MATH)),
        (scaled, contextlib.nullcontext, float64_by_default),
        (scaled, contextlib.nullcontext, torch.inference_mode),
    ],
    ids=["sdpa-forward", "sdpa-backward", "default-dtype", "inference"],
)
def test_switches_are_those_of_the_forward(
    function: Any, around_forward: Any, around_backward: Any, forward: Any, backward: Any
) -> None:
    """A backward is traced when it is first called, in another place of the program."""

    def gradient(function: Any) -> torch.Tensor:
        x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with around_forward(), torch.autocast(**forward):
            loss = function(x).float().sum()
        with around_backward(), torch.autocast(**backward):
            loss.backward()
        assert x.grad is not None
        return x.grad

    torch._dynamo.reset()
    expected = gradient(function)
    actual = gradient(torch.compile(function, **ours()))
    assert torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["off", "bf16"])
def test_attention_that_inductor_recognises(forward: str) -> None:
    """In the backward it calls one op, which autocast does not know, for the products."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-2, -1)).div(math.sqrt(q.shape[-1])).softmax(-1) @ v

    def gradients(function: Any, backward: str) -> list[Any]:
        torch.manual_seed(0)
        inputs = [torch.randn(2, 4, 8, 16).requires_grad_() for _ in range(3)]
        with torch.autocast(**STATES[forward]):
            y = function(*inputs)
        with torch.autocast(**STATES[backward]):
            y.float().square().sum().backward()
        return [x.grad for x in inputs]

    torch._dynamo.reset()
    compiled = torch.compile(function, **ours("inductor"))
    for backward in ("bf16", "fp16"):
        actual, expected = gradients(compiled, backward), gradients(function, backward)
        for a, e in zip(actual, expected, strict=True):
            # With AVX2, Inductor's softmax has other last bits, of which a few numbers are rounded
            # to others. One that does not follow is off by a quarter of the dtype's precision.
            bound = torch.finfo(STATES[backward]["dtype"]).eps / 5
            assert a.dtype == e.dtype
            assert (a - e).norm() < bound * e.norm()


@pytest.mark.slow
def test_two_layers_of_attention_that_inductor_recognises() -> None:
    """What follows the first is computed from one op's result in the trace without autocast, and
    from that of several in the other. Taken for another value, it was computed anew, from a bias
    that the forward has not saved."""
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = F.linear(x, w, b).chunk(3, dim=-1)
        q, k, v = (part.view(2, 4, 2, 4).transpose(1, 2) for part in parts)
        y = (q @ k.transpose(-2, -1)).div(2.0).softmax(-1) @ v
        return y.transpose(1, 2).reshape(2, 4, 8)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return layer(layer(x, w, b), w, b)

    def gradients(function: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        shapes = (2, 4, 8), (24, 8), (24,)
        inputs = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
        y = function(*inputs)
        with torch.autocast(**BF16):
            y.square().sum().backward()
        return [x.grad for x in inputs]

    torch._dynamo.reset()
    forget_variants()
    passes_of_inductor = aot_autograd(
        fw_compiler=nop, partition_fn=partition_fn, decompositions=select_decomp_table
    )
    actual = gradients(torch.compile(function, **ours(passes_of_inductor)))
    assert torch._dynamo.utils.counters["inductor"]["fuse_attention"]
    assert variants() == 1
    for a, b in zip(actual, gradients(function), strict=True):
        assert (a - b).abs().max() < 0.01 * b.abs().max()


def test_an_interrupted_first_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(module: fx.GraphModule) -> list[Call]:
        raise KeyboardInterrupt

    steps = Steps(Island, _x, **ours())
    monkeypatch.setattr(region, "calls_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        steps.step(STATES["off"], STATES["bf16"])
    monkeypatch.undo()
    actual = steps.step(STATES["off"], STATES["bf16"])
    assert_same_bits(actual, eager("island", "off")["bf16"].values)


def bmm_for_softmax(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
    dot = torch.bmm(grad.unsqueeze(1), output.unsqueeze(2)).squeeze(2)
    return (output * (grad - dot)).to(dtype)


def test_an_inner_compiler_that_decomposes_into_what_autocast_casts() -> None:
    inner = aot_autograd(
        fw_compiler=lambda module, inputs: module,
        decompositions={torch.ops.aten._softmax_backward_data.default: bmm_for_softmax},
    )

    def gradient(backward: Mapping[str, Any]) -> torch.Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        compiled = torch.compile(lambda x: x.softmax(-1) * torch.arange(8.0), **ours(inner))
        loss = compiled(x).sum()
        with torch.autocast(**backward):
            loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(BF16), gradient(OFF))


def test_variants_are_traced_outside_of_function_modes() -> None:
    """Dynamo has written into the graph what a mode does. `Tensor.backward` leaves the mode itself;
    code that calls autograd's engine does not."""

    def gradients(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Island(), torch.randn(3, 8)
        compiled = torch.compile(model, **arguments) if arguments else model
        with HalvesProducts():
            loss = compiled(x).sin().sum()
            with torch.autocast(**BF16):
                torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
                    (loss,), (torch.ones(()),), False, False, (), True, True
                )
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    assert_same_bits(gradients(**ours()), gradients())


def test_a_graph_with_values_on_a_device_type_that_autocast_does_not_know() -> None:
    def products(
        x: torch.Tensor, w: torch.Tensor, shapes: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return x @ w, shapes @ shapes

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        x, w = torch.randn(2, 4, 4, generator=generator)
        w.requires_grad_()
        with torch.autocast(**BF16):
            result, _ = function(x, w, torch.empty(4, 4, device="meta", requires_grad=True))
            (found,) = torch.autograd.grad(result.float().pow(2).sum(), w)
        return found

    torch._dynamo.reset()
    options = {"inner": "aot_eager"}
    compiled = torch.compile(products, backend="smart_autocast", options=options)
    assert torch.equal(gradient(compiled), gradient(products))
