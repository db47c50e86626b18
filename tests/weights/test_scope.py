"""How long a cast lives, and who shares it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autocast_backend import clear_weight_cache, weight_cache_info
from autocast_backend.weights import graph_weights
from autocast_backend.weights.cache import SWEEP_AFTER, Shared
from autocast_backend.weights.cast import Cast
from autocast_backend.weights.graph_weights import GraphWeights
from autocast_backend.weights.scope import current_scope
from tests.support import BF16, FP16, assert_same_bits

from .support import Net, bf16, casts_made, data, make, ours

WEIGHTS = 4  # of a Net
BYTES = 2 * (8 * 8 + 8) * 2  # of their casts


class Watching(TorchDispatchMode):
    """A user's dispatch mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def compiled_net(**options: Any) -> nn.Module:
    return torch.compile(make(), **ours(**options))  # type: ignore[return-value]


def casts_of_the_scope() -> list[torch.Tensor]:
    scope = current_scope()
    assert scope is not None
    assert scope.contents is not None
    return [cast.memory.cast for cast in scope.contents.casts.values()]


def test_a_scope_is_one_life_of_eagers_cache() -> None:
    with bf16():
        outermost = current_scope()
        assert outermost is not None
        with torch.autocast(**FP16):
            assert current_scope() is outermost
        with bf16(cache_enabled=False):
            assert current_scope() is None
        assert current_scope() is outermost
        assert outermost.contents is not None
    assert outermost.contents is None
    with bf16():
        assert current_scope() is not outermost


class Adds(TorchFunctionMode):
    """Gives all products of matrices another autograd node."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is torch.mm else result


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, FakeTensorMode, Watching, Adds]
)
def test_a_scope_can_start_in_any_mode(mode: Any) -> None:
    with bf16():
        with mode():
            scope = current_scope()
        assert scope is not None
        assert scope is current_scope()
    assert scope.contents is None


class DoublesCasts(TorchFunctionMode):
    """Autocast casts below it, so it sees none."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if getattr(function, "__name__", "") in CASTS else result


CASTS = ("to", "bfloat16", "half", "alias.default")


class Table(nn.Module):
    """Reads a weight without a cast, too: in a graph, before and after the cast is made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(8, 8)), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = nn.functional.embedding(torch.arange(3), self.weight)
        return nn.functional.linear(self.norm(x + read), self.weight) + self.weight.sum()


@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize("state", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [Net, Table])
def test_modes_of_functions_do_not_see_the_casts(kind: Any, state: Any, lifetime: str) -> None:
    def steps(compiled: bool) -> list[Any]:
        model = make(kind)
        run = torch.compile(model, **ours(weight_cache=lifetime)) if compiled else model
        outputs = []
        for _ in range(2):
            with torch.autocast(**state):
                with DoublesCasts():
                    y = run(data(3, 8))
                with torch.no_grad():
                    outputs += [run(data(3, 8)), run(data(3, 8))]
                    with DoublesCasts():
                        outputs += [run(data(3, 8)), run(data(3, 8))]
            y.float().square().mean().backward()
            outputs.append(y)
        return [*outputs, *(p.grad for p in model.parameters())]

    assert_same_bits(steps(compiled=True), steps(compiled=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("on", [True, False])
def test_a_scope_starts_and_ends_whatever_the_flags_of_the_cpu_are(
    on: bool, dtype: torch.dtype
) -> None:
    """They are off where autocast is on for a GPU. They are left as they were."""
    torch.set_autocast_enabled("cpu", on)
    torch.set_autocast_dtype("cpu", dtype)
    try:
        scope = current_scope()
        assert scope is not None
        assert scope.contents is not None
        assert torch.is_autocast_enabled("cpu") == on
        assert torch.get_autocast_dtype("cpu") is dtype
        torch.clear_autocast_cache()
        assert scope.contents is None
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.clear_autocast_cache()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validate": "dtype"},
        {"validate": "off"},
        {"policies": {"op": {"aten::linear": "lower_precision_fp"}}},
    ],
    ids=str,
)
def test_each_weight_is_cast_once_in_a_scope(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, x = compiled_net(**options), data(3, 8)

    def calls(n: int) -> None:
        with bf16():
            for _ in range(n):
                model(x)

    assert casts_made(lambda: calls(1)) == WEIGHTS
    assert casts_made(lambda: calls(5)) == WEIGHTS


def test_a_weight_that_a_graph_casts_twice_is_cast_once_in_each_scope() -> None:
    """Its gradients add up in one node, as those of eager mode's cached cast do."""
    graph = GraphWeights([torch.bfloat16] * 2, [True, True], lasting=False, scoped=True)
    weight = nn.Parameter(data(8, 8))
    for _ in range(3):
        with bf16():
            one, other = graph.casts([weight, weight], graph.scope())
        assert one is other


def test_graphs_share_the_casts_of_scopes_whose_weights_they_know() -> None:
    """Those are made at once. The memory of casts for calls without gradients goes then as well."""
    graphs = [GraphWeights([torch.bfloat16], [True], lasting=False, scoped=True) for _ in range(2)]
    without = GraphWeights([torch.bfloat16], [False], lasting=False, scoped=True)
    weight = nn.Parameter(data(8, 8))
    for _ in range(3):
        with bf16(), torch.no_grad():
            without.casts([weight], without.scope())
        assert Shared.kept_on_cpu
        with bf16():
            (one,) = graphs[0].casts([weight], graphs[0].scope())
            assert not Shared.kept_on_cpu
            others = [graph.casts([weight], graph.scope())[0] for graph in graphs]
        assert all(other is one for other in others)


def test_graphs_share_the_casts_of_a_scope() -> None:
    model, x = make(), data(3, 8)
    one, other = (torch.compile(f, **ours()) for f in (model, lambda x: model.first(x)))

    def both() -> None:
        with bf16():
            one(x)
            other(x)

    assert casts_made(both) == WEIGHTS


def test_each_graph_makes_its_casts_anew_in_each_scope() -> None:
    """Also where another graph has made others before it."""
    model, x = make(), data(3, 8)
    functions = (lambda x: model.first(x), lambda x: model.second(x))  # each with code of its own
    first, second = (torch.compile(f, **ours()) for f in functions)

    def both(*layers: Any) -> None:
        with bf16():
            for layer in layers:
                layer(x)

    assert casts_made(lambda: both(first, second)) == WEIGHTS
    assert casts_made(lambda: both(second, first)) == WEIGHTS
    with bf16():
        first(x)
        clear_weight_cache()
        second(x)
        assert casts_made(lambda: first(x)) == WEIGHTS // 2


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_weights_on_the_same_memory_are_two(lifetime: str) -> None:
    """The same code runs for both, and their gradients are not each other's."""
    w, x = nn.Parameter(data(8, 8)), data(3, 8)
    other = nn.Parameter(w.detach())
    assert other.data_ptr() == w.data_ptr()
    compiled = torch.compile(lambda w, x: x @ w, **ours(weight_cache=lifetime))
    with bf16():
        losses = [compiled(weight, x).float().sum() for weight in (w, other)]
    losses[1].backward()
    assert w.grad is None
    assert other.grad is not None


def test_the_memory_goes_when_the_scope_ends() -> None:
    model = compiled_net()
    with bf16():
        model(data(3, 8))
        held = weight_cache_info()
        assert (held.entries, held.bytes) == (WEIGHTS, BYTES)
        storages = [weakref.ref(cast.untyped_storage()) for cast in casts_of_the_scope()]
        gc.disable()  # it must not be needed
    try:
        assert weight_cache_info()[:2] == (0, 0)
        assert [s() for s in storages] == [None] * WEIGHTS
    finally:
        gc.enable()


def test_on_the_cpu_the_next_scope_gets_the_memory_of_casts_without_gradients() -> None:
    model = compiled_net()

    def addresses() -> list[int]:
        with torch.no_grad(), bf16():
            for _ in range(2):
                model(data(3, 8))
            return [cast.data_ptr() for cast in casts_of_the_scope()]

    first = addresses()
    assert weight_cache_info()[:2] == (0, BYTES)
    assert addresses() == first
    clear_weight_cache()
    assert weight_cache_info().bytes == 0
    addresses()
    trained = torch.compile(make(), **ours())
    with bf16():
        trained(data(3, 8))  # for training, of any model, memory is dearer than time
        assert weight_cache_info().bytes == BYTES
    assert weight_cache_info().bytes == 0


def test_on_the_cpu_the_memory_of_small_casts_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_weights, "KEPT_BYTES", 100)
    model = compiled_net()
    with torch.no_grad(), bf16():
        model(data(3, 8))
        model(data(3, 8))
    assert weight_cache_info().bytes == 2 * (8 * 8 * 2)  # without the biases


def test_memory_that_a_lasting_cast_takes_over_is_counted_once() -> None:
    model, x = make(), data(3, 8)
    scoped = torch.compile(lambda x: model(x), **ours())
    lasting = torch.compile(lambda x: model(x), **ours(weight_cache="version"))
    with torch.no_grad():
        with bf16():
            scoped(x)
            scoped(x)
        assert weight_cache_info()[:2] == (0, BYTES)
        with bf16():
            lasting(x)
    assert weight_cache_info()[:2] == (WEIGHTS, BYTES)


def test_memory_that_somebody_holds_is_not_written_over() -> None:
    net = make(Net)
    model = torch.compile(net, **ours())

    def casts() -> list[torch.Tensor]:
        with torch.no_grad(), bf16():
            for _ in range(2):
                model(data(3, 8))
            return [cast.view(-1) for cast in casts_of_the_scope()]

    held = casts()
    values = [cast.clone() for cast in held]
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(1)
    assert {cast.data_ptr() for cast in casts()}.isdisjoint(cast.data_ptr() for cast in held)
    assert_same_bits(held, values)


def test_memory_that_does_not_fit_is_not_used_again() -> None:
    """Something else is in the place of a weight whose old memory lives on."""
    weight = nn.Parameter(data(8, 8))
    cast = Cast(weight)
    cast.memory.cast = weight.detach().bfloat16()
    others = [weight, data(4, 8), weight.mT, weight.to("meta")]
    assert [cast.can_be_replaced(w, {}) for w in others] == [True, False, False, False]


def test_clear_weight_cache_frees_memory_that_is_kept_for_cuda_graphs() -> None:
    """And what autograd traces back to the weight, at once, not when the scope ends."""
    weight = nn.Parameter(data(8, 8))
    weights = GraphWeights([torch.bfloat16], [True], lasting=False, scoped=True, keep_memory=True)
    with bf16():
        (cast,) = weights.casts([weight], weights.scope())
        storage = weakref.ref(cast.untyped_storage())
        del cast
        assert storage() is not None
        clear_weight_cache()
        assert storage() is None


def test_clear_autocast_cache_is_respected() -> None:
    model, x = compiled_net(), data(3, 8)

    def calls() -> None:
        with bf16():
            model(x)
            torch.clear_autocast_cache()
            model(x)

    calls()
    assert casts_made(calls) == 2 * WEIGHTS


def test_another_threads_exit_ends_the_scope_as_in_eager() -> None:
    def nothing() -> None:
        with bf16():
            pass

    with bf16():
        scope = current_scope()
        thread = threading.Thread(target=nothing)
        thread.start()
        thread.join()
        assert scope is not None
        assert scope.contents is None


def test_without_a_cache_the_casts_stay_in_the_graph() -> None:
    model, x = compiled_net(), data(3, 8)

    def call() -> None:
        with bf16(cache_enabled=False):
            model(x)

    assert casts_made(call) == 0


def test_regions_of_the_graphs_own_have_no_scope() -> None:
    inner = make()

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return inner(x)

    compiled = torch.compile(function, **ours())
    assert casts_made(lambda: compiled(data(3, 8))) == 0
    lasting = torch.compile(function, **ours(weight_cache="version"))
    torch._dynamo.reset()
    assert casts_made(lambda: lasting(data(3, 8))) == WEIGHTS
    assert casts_made(lambda: lasting(data(3, 8))) == 0


def test_the_option_autocast_has_no_scope() -> None:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(autocast=BF16))
    assert casts_made(lambda: compiled(x)) == 0
    torch._dynamo.reset()
    lasting = torch.compile(model, **ours(autocast=BF16, weight_cache="version"))
    assert [casts_made(lambda: lasting(x)) for _ in range(2)] == [WEIGHTS, 0]


def test_a_frozen_weight_or_buffer_is_read_anew_by_each_call() -> None:
    """Eager's cache keeps no cast of theirs. So there a write that PyTorch does not count shows at
    once, as where PEFT merges an adapter into its frozen base."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).requires_grad_(False)
            self.register_buffer("mix", data(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ self.mix

    net, x = Scaled(), data(3, 8)
    model = torch.compile(net, **ours())
    with bf16():
        for _ in range(3):
            model(x)
        assert weight_cache_info()[:2] == (0, 0)
        for tensor in (net.linear.weight, net.linear.bias, net.mix):
            tensor.data.mul_(3)
            assert torch.equal(model(x), net(x))


def test_info_counts_the_weights_of_calls() -> None:
    model, x = compiled_net(), data(3, 8)
    with bf16():
        model(x)
        before = weight_cache_info()
    with bf16():
        for _ in range(3):
            model(x)
    counted = [after - b for after, b in zip(weight_cache_info(), before, strict=True)]
    assert counted[2:] == [2 * WEIGHTS, WEIGHTS, WEIGHTS]  # hits, misses, casts


def test_version_outlives_contexts() -> None:
    model, x = compiled_net(weight_cache="version"), data(3, 8)

    def call() -> None:
        with bf16():
            model(x)

    assert casts_made(call) == WEIGHTS
    assert casts_made(call) == 0
    clear_weight_cache()
    assert casts_made(call) == WEIGHTS


def test_a_cast_dies_with_its_parameter() -> None:
    model = compiled_net(weight_cache="version")
    with torch.no_grad(), bf16():
        model(data(3, 8))
    assert weight_cache_info().entries == WEIGHTS
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight_cache_info()[:2] == (0, 0)


def test_nothing_is_left_of_weights_that_are_freed() -> None:
    """Not even an empty place, or models that come and go would leave ever more of them. They are
    looked for when some times as many casts have been made as there were, so for a while there may
    be more places than weights."""
    functions = [lambda w, x: x @ w, lambda w, x: x @ w]
    lasting, scoped = (
        torch.compile(f, **ours(weight_cache=lifetime))
        for f, lifetime in zip(functions, ("version", "scope"), strict=True)
    )
    x, count = data(3, 8), 20
    for _ in range(10):
        weights = [nn.Parameter(data(8, 8)) for _ in range(count)]
        with torch.no_grad(), bf16():
            for w in weights:
                for compiled in (lasting, scoped, scoped):
                    compiled(w, x)
        places = len(Shared.lasting), len(Shared.kept_on_cpu)
        assert all(count <= n <= (1 + SWEEP_AFTER) * count for n in places), places
        del w, weights


def test_ids_that_are_used_again_mean_nothing() -> None:
    compiled = torch.compile(lambda w, x: x @ w, **ours(weight_cache="version"))
    x, ids, results = data(3, 8), set(), []
    with torch.no_grad(), bf16():
        for i in range(300):
            w = nn.Parameter(torch.full((8, 8), float(i)))
            ids.add(id(w))
            results.append((compiled(w, x), x.bfloat16() @ w.bfloat16()))
            del w
    assert len(ids) < 300, "no id came twice"
    for result, expected in results:
        assert torch.equal(result, expected)


def test_a_model_that_moves_is_cast_again() -> None:
    """To float64 and back: the same parameters with other memory."""
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache="version"))
    with torch.no_grad(), bf16():
        before = compiled(x)
        model.to(torch.float64)
        for p in model.parameters():
            p.data *= 2
        model.to(torch.float32)
        assert not torch.equal(compiled(x), before)
        assert torch.equal(compiled(x), torch.compile(model, **ours(weight_cache="off"))(x))


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_other_parameters_in_the_place_of_the_old(lifetime: str) -> None:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache=lifetime))
    torch.manual_seed(7)
    state = Net().state_dict()
    with torch.no_grad(), bf16():
        before = compiled(x)
        model.load_state_dict(state, assign=True)
        after = compiled(x)
        assert not torch.equal(after, before)
        assert torch.equal(after, torch.compile(model, **ours(weight_cache="off"))(x))


def test_casts_made_in_inference_mode_serve_training() -> None:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours())
    with bf16():
        with torch.inference_mode():
            for _ in range(2):
                compiled(x)
        made = weight_cache_info().casts
        compiled(x).float().sum().backward()
    assert weight_cache_info().casts == made
    assert all(p.grad is not None for p in model.parameters())


def test_parametrized_weights_are_not_cached() -> None:
    """What a parametrization computes is no leaf: it is another tensor at every call."""
    model = make()
    nn.utils.parametrizations.weight_norm(model.first)
    compiled, eager = (
        torch.compile(model, **a) for a in (ours(weight_cache="version"), {"backend": "eager"})
    )
    for _ in range(2):
        with bf16(), torch.no_grad():
            assert torch.equal(compiled(data(3, 8)), eager(data(3, 8)))
        with torch.no_grad():
            next(model.first.parametrizations.weight.parameters()).mul_(2)


def test_two_threads_share_a_model() -> None:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache="version"))
    expected = torch.compile(model, backend="eager")
    failures: list[str] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(50):
                with bf16():
                    if not torch.equal(compiled(x), wanted):
                        failures.append("differs")

    with torch.no_grad(), bf16():
        wanted = expected(x)
        compiled(x)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_net_has_as_many_weights_as_these_tests_say() -> None:
    assert len(list(Net().parameters())) == WEIGHTS
