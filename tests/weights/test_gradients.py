"""Gradients with the casts of weights outside of the graph: eager's, in eager's order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autocast_backend import weight_cache_info
from autocast_backend.weights import cast
from tests.support import assert_same_bits

from .support import EAGER, STOCK, Net, Plain, bf16, casts_made, data, make, ours

LIFETIMES = pytest.mark.parametrize("lifetime", ["scope", "version"])


def gradients(kind: Any, calls: int, joint: bool, **arguments: Any) -> list[torch.Tensor | None]:
    """Of several calls in one context, with one backward for all or one for each."""
    torch._dynamo.reset()
    model, x = make(kind), data(calls, 3, 8)
    compiled = torch.compile(model, **arguments)
    with bf16():
        losses = [compiled(row).float().square().mean() for row in x]
    for loss in [sum(losses)] if joint else losses:
        loss.backward()  # type: ignore[union-attr]
    return [p.grad for p in model.parameters()]


@LIFETIMES
@pytest.mark.parametrize("joint", [True, False], ids=["one-backward", "backward-each"])
@pytest.mark.parametrize("calls", [1, 3])
def test_a_weight_shared_by_calls(calls: int, joint: bool, lifetime: str) -> None:
    """The sum over the calls of a scope is made in bfloat16, as eager's cached cast makes it."""
    expected = gradients(Plain, calls, joint, **EAGER)
    assert_same_bits(gradients(Plain, calls, joint, **ours(weight_cache=lifetime)), expected)
    if calls > 1 and joint:
        stock = gradients(Plain, calls, joint, **STOCK)
        assert any(not torch.equal(s, e) for s, e in zip(stock, expected, strict=True))


@LIFETIMES
def test_a_weight_used_twice_in_a_graph(lifetime: str) -> None:
    assert_same_bits(
        gradients(Net, 1, True, **ours(weight_cache=lifetime)), gradients(Net, 1, True, **EAGER)
    )


class OnManifold(nn.Parameter):
    """A class with what an optimizer asks for, and no behavior of its own, such as geoopt's."""


class Plane(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = OnManifold(torch.randn(8, 8))
        self.w.manifold = self  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


@LIFETIMES
def test_a_weight_of_a_class_derived_from_parameter(lifetime: str) -> None:
    expected = gradients(Plane, 3, True, **EAGER)
    found: list[Any] = []
    arguments = ours(weight_cache=lifetime)
    assert casts_made(lambda: found.append(gradients(Plane, 3, True, **arguments))) == 1
    assert_same_bits(found, [expected])


class Doubled(nn.Parameter):
    """A class whose products are others."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result * 2 if function is torch.Tensor.matmul else result


def test_a_parameter_that_changes_what_ops_do_keeps_its_casts_in_the_graph() -> None:
    def gradient(compile: Callable[[Any], Any]) -> torch.Tensor | None:
        torch._dynamo.reset()
        weight = Doubled(data(8, 8))
        product = compile(lambda x: torch.Tensor.matmul(x, weight))
        with bf16():
            product(data(3, 8)).float().square().sum().backward()
        return weight.grad

    found: list[Any] = []
    compile = functools.partial(torch.compile, **ours())
    assert casts_made(lambda: found.append(gradient(compile))) == 0
    assert_same_bits(found, [gradient(lambda function: function)])


class Assigns(nn.Module):
    """Tensors have no `@=` of their own: Python writes the product under the name of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x @= self.w
        x = x.sin()
        x @= self.w
        return x


@LIFETIMES
def test_a_product_that_is_written_as_an_assignment(lifetime: str) -> None:
    assert_same_bits(
        gradients(Assigns, 1, True, **ours(weight_cache=lifetime)),
        gradients(Assigns, 1, True, **EAGER),
    )


def test_calls_of_a_region_of_their_own_share_no_sum() -> None:
    """Lasting casts are shared by calls whose gradients add up in float32: no context is around."""

    def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with bf16():
            return x @ weight

    def gradient(**arguments: Any) -> torch.Tensor:
        weight = nn.Parameter(data(8, 8))
        compiled = torch.compile(region, **arguments)
        losses = [compiled(x, weight).float().square().mean() for x in data(3, 3, 8)]
        torch.stack(losses).sum().backward()
        assert weight.grad is not None
        return weight.grad

    found: list[torch.Tensor] = []
    lasting = ours(weight_cache="version")
    assert casts_made(lambda: found.append(gradient(**lasting))) == 1
    assert_same_bits(found, [gradient(**EAGER)])


@LIFETIMES
@pytest.mark.parametrize("around", [False, True], ids=["regions-alone", "inside-a-context"])
def test_regions_of_one_graph_share_no_sum(around: bool, lifetime: str) -> None:
    """Each is a context of its own, whose cast collects its own gradients, unless one is around
    them all. The first call makes the casts, the second one finds them."""

    def regions(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with bf16():
            x = (x @ weight).sin() @ weight
        x = x.float().cos()
        for _ in range(2):
            with bf16():
                x = x @ weight
        return x

    def results(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        weight, x = nn.Parameter(data(8, 8)), data(3, 8)
        compiled = torch.compile(regions, **arguments)
        found = []
        for _ in range(2):
            with bf16() if around else contextlib.nullcontext():
                y = compiled(x, weight)
            found += [y.detach(), *torch.autograd.grad(y.float().square().sum(), weight)]
        return found

    assert_same_bits(results(**ours(weight_cache=lifetime)), results(**EAGER))


@pytest.mark.parametrize("eager_first", [False, True])
def test_a_weight_that_eager_code_casts_too(eager_first: bool) -> None:
    """Two casts, whose gradients add up in float32. Known: the day this fails, take it out of
    docs/weights.md."""

    def gradient(**arguments: Any) -> torch.Tensor:
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        compiled = torch.compile(lambda x: (x @ weight).sin(), **arguments)
        calls = [lambda x: x.cos() @ weight, compiled][:: 1 if eager_first else -1]
        with bf16():
            outputs = [call(data(3, 8)).float().square().sum() for call in calls]
        torch.stack(outputs).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected, actual = gradient(**EAGER), gradient(**ours())
    assert not torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_read_inside_and_outside_of_a_transform(count: int) -> None:
    """Its cast stays in the graph, so the gradients of two calls add up in float32. Known: the day
    this fails, take it out of docs/weights.md."""

    def gradient(**arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        weight = nn.Parameter(data(8, 8))

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.func.vmap(lambda row: row @ weight)(x) + x.cos() @ weight

        compiled = torch.compile(function, **arguments)
        with bf16():
            outputs = [compiled(x) for x in data(count, 3, 8)]
        torch.stack(outputs).float().square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected, actual = gradient(**EAGER), gradient(**ours())
    assert torch.equal(actual, expected) == (count == 1)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-5)


def test_used_twice_and_shared_differs() -> None:
    """Four bfloat16 numbers are added in another order: by graph first. Known: the day this fails,
    take it out of docs/weights.md."""
    expected = gradients(Net, 2, True, **EAGER)
    actual = gradients(Net, 2, True, **ours())
    differing = [not torch.equal(a, e) for a, e in zip(actual, expected, strict=True)]
    assert any(differing[:2])  # `first` is used twice
    assert not any(differing[2:])
    for a, e in zip(actual, expected, strict=True):
        assert a is not None
        assert e is not None
        torch.testing.assert_close(a, e, rtol=2**-7, atol=2**-9)


class Mixes(nn.Module):
    """A weight that autocast does not cast, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(data(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight + x.flip(0) * (1 - self.weight)).tanh()


def test_used_twice_without_a_cast_and_shared_differs_with_stock_as_well() -> None:
    """Known, as above: a compiled backward returns one gradient for each graph and weight."""
    expected, stock, actual = (
        gradients(Mixes, 3, True, **arguments) for arguments in (EAGER, STOCK, ours())
    )
    assert_same_bits(actual, stock)
    assert not torch.equal(actual[0], expected[0])  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected)


class Clamps(Plain):
    """Writes to a weight in each call, as Gemma 3n does."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.data = data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        with torch.no_grad():
            (weight.data if self.data else weight).clamp_(-1, 1)
        return super().forward(x)


@pytest.mark.parametrize("data", [True, False], ids=["data", "no_grad"])
def test_known_a_weight_that_the_graph_writes_to_adds_up_in_float32(data: bool) -> None:
    """Its cast can only be made after the write. Known: the day this fails, take it out of
    docs/weights.md."""

    def kind() -> Clamps:
        return Clamps(data)

    assert_same_bits(gradients(kind, 1, True, **ours()), gradients(kind, 1, True, **EAGER))
    expected, stock, actual = (
        gradients(kind, 3, True, **arguments) for arguments in (EAGER, STOCK, ours())
    )
    assert_same_bits(actual[:1], stock[:1])
    assert not torch.equal(actual[0], expected[0])  # type: ignore[arg-type]
    assert_same_bits(actual[1:], expected[1:])
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-9)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class InBodies(nn.Module):
    """Layers in bodies of higher-order ops, each used once."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.wrap(x, layer.weight, layer.bias).relu()
        return x


def in_bodies(wrap: Any, compiled: bool) -> list[torch.Tensor | None]:
    return gradients(
        lambda: InBodies(wrap if compiled else nn.functional.linear),
        *(2, True),
        **(ours() if compiled else EAGER),
    )


def test_weights_of_a_nested_region_shared_by_calls() -> None:
    """One body has the casts of all layers as operands."""
    region = torch.compiler.nested_compile_region(lambda x, w, b: nn.functional.linear(x, w, b))
    assert_same_bits(in_bodies(region, True), in_bodies(region, False))


def test_weights_of_checkpoints_shared_by_calls() -> None:
    """Each call casts them, and again in its backward. Known: the day this fails, take it out of
    docs/weights.md."""

    def checkpointed(*arguments: torch.Tensor) -> Any:
        return checkpoint(nn.functional.linear, *arguments, use_reentrant=False)

    actual, expected = in_bodies(checkpointed, True), in_bodies(checkpointed, False)
    assert any(not torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-9)


def order_of_gradients(whole: bool, **arguments: Any) -> list[str]:
    """The parameters in the order in which their gradients are ready."""
    torch._dynamo.reset()
    model, order = make(Deep), []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    parts = [model] if whole else list(model.layers)  # type: ignore[arg-type]
    x = data(3, 8)
    with bf16():
        for part in parts:
            x = torch.compile(part, **arguments)(x)
    x.float().sum().backward()
    return order


@LIFETIMES
def test_gradients_are_ready_in_eagers_order(lifetime: str) -> None:
    """DDP and FSDP send each gradient as it gets ready, while others are still computed."""
    expected = order_of_gradients(False, **EAGER)
    assert len(expected) == 6
    assert order_of_gradients(False, **ours(weight_cache=lifetime)) == expected
    assert order_of_gradients(True, **ours(weight_cache=lifetime)) == expected


@LIFETIMES
def test_the_gradient_of_a_leaf_is_ready_in_eagers_order(lifetime: str) -> None:
    """Its cast lasts for the scope alone, and stands between those of weights."""

    def order(**arguments: Any) -> list[str]:
        torch._dynamo.reset()
        model, ready = make(Plain), []
        x = data(3, 8).requires_grad_()
        for name, leaf in [*model.named_parameters(), ("x", x)]:
            leaf.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        with bf16():
            torch.compile(model, **arguments)(x).float().sum().backward()
        return ready

    assert order(**ours(weight_cache=lifetime)) == order(**EAGER)


class Composite(nn.Module):
    """A layer whose call casts its weights one by one inside."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            x = x.unsqueeze(1)  # else it would cast views of its weights, one by one
            return self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        if isinstance(self.layer, nn.ModuleList):
            return torch.linalg.multi_dot([x, *(part.weight for part in self.layer)])
        result = self.layer(x)
        return result[0] if isinstance(self.layer, nn.LSTMCell) else result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind",
    [
        lambda: nn.GRUCell(8, 8),
        lambda: nn.LSTMCell(8, 8),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3)),
    ],
    ids=["GRUCell", "LSTMCell", "MultiheadAttention", "multi_dot"],
)
def test_gradients_of_a_call_that_casts_inside_are_ready_in_eagers_order(kind: Any) -> None:
    def order(**arguments: Any) -> list[str]:
        torch._dynamo.reset()
        model, ready = make(lambda: Composite(kind())), []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        with bf16():
            y = torch.compile(model, **arguments)(data(3, 8))
        y.float().sum().backward()
        return ready

    assert order(**ours()) == order(**EAGER)


def test_gradients_do_not_wait_for_each_other() -> None:
    """When a layer's gradients are ready, the backward of the layer before has not run."""
    model, events, x = make(Deep), [], data(3, 8)
    with bf16():
        for i, layer in enumerate(model.layers):  # type: ignore[arg-type]
            x = torch.compile(layer, **ours())(x)
            x.register_hook(lambda _, i=i: events.append(f"backward {i}"))
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, i=i: events.append(f"ready {i}")
            )
    x.float().sum().backward()
    assert events == [f"{what} {i}" for i in (2, 1, 0) for what in ("backward", "ready")]


@LIFETIMES
def test_frozen_and_unused_parameters_get_no_gradient(lifetime: str) -> None:
    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model = make(Deep)
        frozen, _, unused = model.layers  # type: ignore[union-attr,misc]
        frozen.requires_grad_(False)
        used = torch.compile(nn.Sequential(*model.layers[:2]), **arguments)  # type: ignore[index]
        with bf16():
            y = used(data(3, 8))
            torch.compile(unused, **arguments)(y)
        y.float().sum().backward()
        return [p.grad for p in model.parameters()]

    before = weight_cache_info().casts
    found = run(**ours(weight_cache=lifetime))
    assert weight_cache_info().casts == before + (6 if lifetime == "version" else 4)
    assert [g is None for g in found] == [True, True, False, False, True, True]
    assert_same_bits(found, run(**EAGER))


@LIFETIMES
def test_weights_of_results_without_gradients_get_none(lifetime: str) -> None:
    """In a graph that others of its results pass gradients through, of casts that were there."""

    class Chooser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values, self.scores = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.values(x), self.scores(x).argmax(-1)

    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model, x = make(Chooser), data(3, 8)
        compiled = torch.compile(model, **arguments)
        with bf16():
            with torch.no_grad():
                compiled(x)
            values, _ = compiled(x)
        values.float().sum().backward()
        return [p.grad for p in model.parameters()]

    found = run(**ours(weight_cache=lifetime))
    assert [g is None for g in found] == [False, False, True, True]
    assert_same_bits(found, run(**EAGER))


def test_known_unused_outputs_give_zeros_in_place_of_no_gradient() -> None:
    """AOTAutograd's: docs/weights.md says so."""

    def run(**arguments: Any) -> list[float | None]:
        torch._dynamo.reset()
        model = make(Deep)

        def outputs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(layer(x) for layer in model.layers)  # type: ignore[union-attr]

        compiled = torch.compile(outputs, **arguments)
        with bf16():
            compiled(data(3, 8))
            _, used, _ = compiled(data(3, 8))
        used.float().sum().backward()
        return [None if p.grad is None else p.grad.abs().sum().item() for p in model.parameters()]

    expected = run(**EAGER)
    assert [g is None for g in expected] == [True, True, False, False, True, True]
    zeros = [0 if g is None else g for g in expected]
    assert run(backend="aot_eager") == run(**ours()) == zeros


def test_a_cast_that_autograd_holds_is_not_overwritten() -> None:
    """The weight changes between forward and backward; the input's gradient is of the forward."""
    model, x = make(Plain), data(3, 8).requires_grad_()
    compiled = torch.compile(model, **ours(weight_cache="version"))

    def run(disturb: bool) -> torch.Tensor | None:
        x.grad = None
        with bf16():
            loss = compiled(x).float().sum()
        if disturb:
            with torch.no_grad(), bf16():
                for p in model.parameters():
                    p.mul_(2)
                compiled(x)
        loss.backward()
        return x.grad

    expected = run(disturb=False)
    assert_same_bits(run(disturb=True), expected)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_a_weight_that_is_cast_without_gradients_first(off: Any, lifetime: str) -> None:
    """As a teacher and a student of the same weights do. What follows the graph break is a graph
    that begins with autograd off, and switches it on."""

    def distil(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with off():
            teacher = x @ w
            torch._dynamo.graph_break()
            teacher = teacher @ w
        return teacher.clone(), x @ w

    def gradients(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        given = [t.clone().requires_grad_() for t in data(2, 4, 4)]
        compiled = torch.compile(distil, **arguments)
        for _ in range(2):
            with bf16():
                loss = compiled(*given)[1].sum() + compiled(*given)[1].sum()
            loss.backward()
        return [t.grad for t in given]

    expected = gradients(**EAGER)
    assert None not in expected
    assert_same_bits(gradients(**ours(weight_cache=lifetime)), expected)


def test_a_graph_that_switches_autograd_on() -> None:
    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model = make(Plain)

        def function(x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return model(x)

        compiled = torch.compile(function, **arguments)
        with torch.no_grad(), bf16():
            results = [compiled(x) for x in data(2, 3, 8)]
        sum(y.float().square().sum() for y in results).backward()  # type: ignore[union-attr]
        return [p.grad for p in model.parameters()]

    assert_same_bits(run(**ours()), run(**EAGER))


@LIFETIMES
@pytest.mark.parametrize("casts_are_there", [True, False])
def test_a_graph_that_switches_autograd_on_in_inference_mode(
    lifetime: str, casts_are_there: bool
) -> None:
    """There it has no effect, and later calls of the scope have their gradients."""

    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model = make(Plain)

        def function(x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return model(x)

        inference, training = (
            torch.compile(function, **arguments),
            torch.compile(model, **arguments),
        )
        x = data(3, 8)
        with bf16():
            with torch.inference_mode():
                if casts_are_there:
                    training(x)
                    training(x)
                assert not inference(x).requires_grad
            training(x).float().square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert_same_bits(run(**ours(weight_cache=lifetime)), run(**EAGER))


def test_if_one_were_overwritten_autograd_would_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "has_other_holders", lambda *args: False)
    model, x = make(Plain), data(3, 8).requires_grad_()
    compiled = torch.compile(model, **ours(weight_cache="version"))
    with bf16():
        loss = compiled(x).float().sum()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
            compiled(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@LIFETIMES
def test_a_frozen_weights_cast_that_autograd_holds_is_not_overwritten(lifetime: str) -> None:
    """Autograd holds the very tensor that is kept, not another one on its memory."""

    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model, x = make(Plain).requires_grad_(False), data(3, 8).requires_grad_()
        compiled = torch.compile(model, **arguments)
        for _ in range(2):
            with bf16():
                loss = sum(compiled(x).float().square().sum() for _ in range(2))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
            with bf16():
                for _ in range(2):
                    compiled(x)
            loss.backward()  # type: ignore[union-attr]
        return [x.grad]

    assert_same_bits(run(**ours(weight_cache=lifetime)), run(**EAGER))


def test_memory_that_nobody_holds_is_used_again() -> None:
    model, x = make(Plain), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache="version"))

    def addresses() -> list[int]:
        from autocast_backend.weights import cache

        with torch.no_grad(), bf16():
            compiled(x)
        return [cast.memory.cast.data_ptr() for cast in cache.Shared.lasting.values()]

    before = addresses()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert casts_made(lambda: before.extend(addresses())) == 4
    assert before[4:] == before[:4]


@pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.13"),
    reason="compiled autograd under autocast fails in PyTorch itself",
)
def test_compiled_autograd() -> None:
    def run(**arguments: Any) -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model = make(Plain)
        compiled = torch.compile(model, **arguments)
        with bf16():
            loss = compiled(data(3, 8)).float().square().mean()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return [p.grad for p in model.parameters()]

    assert_same_bits(run(**ours()), run(**EAGER))


def test_a_training_call_has_pytorchs_own_nodes() -> None:
    """A function of ours in the backward would be Python, called once for each weight."""
    torch._dynamo.reset()
    model, x = make(Plain), data(1, 3, 8)
    compiled = torch.compile(model, **ours())
    with bf16():
        output = compiled(x[0])
    assert output.grad_fn is not None
    nodes = [type(node).__name__ for node, _ in output.grad_fn.next_functions if node is not None]
    assert nodes == ["ToCopyBackward0"] * len(list(model.parameters()))


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def detached_in_place(compiled: Any, w: torch.Tensor, x: torch.Tensor) -> list[Any]:
    h = w * 2
    loss = compiled(x, h).float().sum()
    h = h.detach_().requires_grad_()
    return [loss + compiled(x, h).float().sum(), h]


def updated(compiled: Any, w: torch.Tensor, x: torch.Tensor) -> list[Any]:
    """As meta-learning does: a step that is recorded, and more calls with what it gives."""
    loss = compiled(x, w).float().square().mean()
    (gradient,) = torch.autograd.grad(loss, w)
    w = w - 0.1 * gradient
    return [sum(compiled(x * k, w).float().sin().mean() for k in range(1, 4))]


def a_row(compiled: Any, w: torch.Tensor, x: torch.Tensor) -> list[Any]:
    row = torch.stack([w.detach(), w.detach()])[1].requires_grad_()
    return [sum(compiled(x * k, row).float().sin().mean() for k in range(1, 4)), row]


@pytest.mark.parametrize("steps", [detached_in_place, updated, a_row])
@pytest.mark.parametrize("leaf_first", [True, False])
def test_a_graph_for_a_leaf_is_not_for_another_tensor(steps: Any, leaf_first: bool) -> None:
    """Dynamo does not ask whether an input is a leaf, or a view. Eager autocast does."""

    def gradients(compiled: Any) -> list[Any]:
        w, x = data(8, 8).requires_grad_(), data(4, 8)
        if leaf_first:
            with bf16():
                compiled(x, w).float().sum().backward()
        with bf16():
            loss, *others = steps(compiled, w, x)
        loss.backward()
        return [w.grad, *(other.grad for other in others)]

    expected = gradients(product)
    for weight_cache in ("scope", "version"):
        torch._dynamo.reset()
        actual = gradients(torch.compile(product, **ours(weight_cache=weight_cache)))
        assert_same_bits(actual, expected, weight_cache)
