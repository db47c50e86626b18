"""Which casts leave a graph, and when it pays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from autocast_backend import weight_cache_info
from autocast_backend.reports.report import Report
from autocast_backend.state import AutocastState
from autocast_backend.weights import graph_weights, plan
from autocast_backend.weights.plan import WeightPlan
from tests.support import (
    BF16,
    HalvesProducts,
    assert_same_bits,
    capture,
    lower_with_report,
    targets,
)

from .support import EAGER, Net, Plain, bf16, casts_made, data, make, ours

AMBIENT = AutocastState.of(BF16)
CAST = "autocast_to_bf16"


def plan_of(
    function: Callable[..., Any],
    *inputs: Any,
    weight_cache: str = "scope",
    ambient: AutocastState = AMBIENT,
    inductor: dict[str, Any] | None = None,
) -> tuple[list[fx.GraphModule], Report]:
    """The graphs a plan gives the inner compiler at once, and the report."""
    given: list[Any] = []

    def keep(module: fx.GraphModule, example_inputs: Any) -> Any:
        given.extend(example_inputs)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    with ambient.applied():
        graph = capture(function, *inputs)
    report = lower_with_report(graph, ambient)
    compiled: list[fx.GraphModule] = []

    def compile_graph(module: fx.GraphModule, inputs: Any) -> Any:
        assert len(inputs) == len(module.graph.find_nodes(op="placeholder"))
        compiled.append(module)
        return module.forward

    weight_plan = WeightPlan(
        graph,
        given,
        weight_cache=weight_cache,
        ambient=ambient,
        inductor=inductor,
        report=report,
    )
    weight_plan.compile(compile_graph)
    return compiled, report


def casts_inside(graphs: list[fx.GraphModule]) -> list[int]:
    return [sum(CAST in target for target in targets(graph)) for graph in graphs]


def reasons(report: Report) -> set[str | None]:
    return {weight.inside for weight in report.weights}


def test_a_training_graph_is_compiled_once_with_its_casts_outside() -> None:
    graphs, report = plan_of(make(Plain), data(3, 8))
    assert casts_inside(graphs) == [2]  # of activations
    assert reasons(report) == {None}
    assert [w.weight.rpartition(".")[2] for w in report.weights].count("weight") == 2
    placeholders = graphs[0].graph.find_nodes(op="placeholder")
    assert [str(p.meta["example_value"].dtype) for p in placeholders] == [
        *["torch.float32"],
        *["torch.bfloat16"] * 4,
    ]


def test_the_casts_of_a_frozen_weight_are_one_input() -> None:
    """Eager autocast casts it for each call, to the same."""
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    graphs, report = plan_of(
        nn.Sequential(layer, nn.Tanh(), layer), data(3, 8), weight_cache="version"
    )
    assert len(report.weights) == 2
    assert reasons(report) == {None}
    assert len(graphs[0].graph.find_nodes(op="placeholder")) == 2


def test_a_step_of_the_optimizer_compiles_nothing() -> None:
    model, x = make(Plain), data(3, 8)
    compiled = torch.compile(model, **ours())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiles = []
    for _ in range(3):
        with bf16():
            compiled(x).float().sum().backward()
        optimizer.step()
        compiles.append((counters["stats"]["unique_graphs"], counters["aot_autograd"]["ok"]))
    assert min(compiles[0]) > 0
    assert compiles == [compiles[0]] * 3


def blocks_of_one_code(count: int, **options: Any) -> list[nn.Module]:
    """As large models are compiled: block by block, all with the code of the first."""
    counters["stats"].clear()
    blocks = [make(Plain) for _ in range(count)]
    for block in blocks:
        block.compile(**ours(**options))
    return blocks


def test_uses_are_counted_for_each_block() -> None:
    """Code that runs for several blocks in a scope uses the weights of each once."""
    blocks, x = blocks_of_one_code(3), data(3, 8)

    def loop(times: int) -> None:
        with bf16():
            for _ in range(times):
                for block in blocks:
                    block(x)

    with torch.no_grad():
        assert [casts_made(lambda: loop(1)) for _ in range(3)] == [0, 0, 0]
        assert counters["stats"]["unique_graphs"] == 1
        assert [casts_made(lambda: loop(2)) for _ in range(2)] == [12, 12]  # 4 of each block
        assert casts_made(lambda: loop(1)) == 12  # foretold wrongly
        assert casts_made(lambda: loop(1)) == 0


@pytest.mark.parametrize("weight_cache", ["scope", "version"])
@pytest.mark.parametrize("grad", [False, True])
def test_what_blocks_of_one_code_have_seen_is_remembered_for_each(
    weight_cache: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each call would look at each cast anew, which takes several times as long."""
    looked = 0
    make_casts = graph_weights.GraphWeights._make

    def counted(*args: Any) -> Any:
        nonlocal looked
        looked += 1
        return make_casts(*args)

    monkeypatch.setattr(graph_weights.GraphWeights, "_make", counted)
    blocks, x = blocks_of_one_code(3, weight_cache=weight_cache), data(3, 8)
    with torch.set_grad_enabled(grad), bf16():
        for _ in range(5):
            for block in blocks:
                block(x)
    assert looked == 3
    assert counters["stats"]["unique_graphs"] == 1


def test_what_is_seen_of_other_weights_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_weights, "MOST_SEEN", 2)
    blocks, x = blocks_of_one_code(5, weight_cache="version"), data(3, 8)
    with torch.no_grad(), bf16():
        for _ in range(2):
            for block in blocks:
                block(x)
        assert casts_made(lambda: [block(x) for block in blocks]) == 0
        expected = [make(Plain)(x)] * 5
        assert_same_bits([block(x) for block in blocks], expected)


@pytest.mark.parametrize("grad", [False, True])
def test_one_call_makes_all_casts(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    name = "cast_each" if grad else "multi_cast"
    call = getattr(graph_weights, name)

    def counted(weights: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        made.append(len(weights))
        return call(weights, *args, **kwargs)

    monkeypatch.setattr(graph_weights, name, counted)
    model, x = make(Plain), data(3, 8)
    compiled = torch.compile(model, **ours())
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            with bf16():
                for _ in range(3):
                    compiled(x)
            with torch.no_grad():
                model.first.weight.mul_(2)  # type: ignore[operator,union-attr]
    assert made == [4, 4]


def test_buffers_are_weights_where_nothing_writes_to_them() -> None:
    class Table(nn.Module):
        def __init__(self, table: torch.Tensor, counts: bool = False) -> None:
            super().__init__()
            self.register_buffer("table", table)
            self.counts = counts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.counts:
                self.table.add_(1)
            return x @ self.table

    with torch.inference_mode():
        uncounted = data(8, 8)
    with torch.no_grad(), bf16():
        for table, casts in (
            (Table(data(8, 8)), 1),
            (Table(data(8, 8), counts=True), 0),
            (Table(uncounted), 0),
        ):
            compiled = torch.compile(table, **ours(weight_cache="version"))
            assert casts_made(lambda c=compiled: c(data(3, 8))) == casts  # type: ignore[misc]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.RNNCell, nn.LSTMCell])
def test_the_second_compilation_casts_what_the_first_does(
    cell: Callable[..., nn.Module], mode: Callable[[], Any]
) -> None:
    """Of a call that stays under autocast. In inference mode, a compiler traces no cast inside of
    composite ops."""
    model = make(lambda: cell(8, 8))
    compiled = torch.compile(model, **ours())
    with mode(), bf16():
        for _ in range(3):
            assert_same_bits(compiled(data(3, 8)), model(data(3, 8)))
    assert weight_cache_info().hits > 0


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_weights_where_nothing_writes_to_them(training: bool) -> None:
    """Batch norm writes to them without counting that."""

    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8).train(training)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) @ self.norm.running_mean

    def run(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(Statistics(), **arguments)
        with torch.no_grad(), bf16():
            return [compiled(data(3, 8) + 4) for _ in range(3)]

    assert_same_bits(run(**ours(weight_cache="version")), run(**EAGER))
    with torch.no_grad(), bf16():
        compiled = torch.compile(Statistics(), **ours(weight_cache="version"))
        assert casts_made(lambda: compiled(data(3, 8))) == (0 if training else 1)


_ATEN = torch.ops.aten
_TRAINING = (True, 0.1, 1e-5)
_NOISE = torch._C._nn.rrelu_with_noise  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "write",
    [
        lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, *_TRAINING),
        lambda x, m, v: torch._native_batch_norm_legit(x, None, None, m, v, *_TRAINING),
        lambda x, m, v: torch._batch_norm_impl_index(x, None, None, m, v, *_TRAINING, False),
        lambda x, m, v: torch.batch_norm_update_stats(x, m, v, 0.1),
        lambda x, m, v: _ATEN.batch_norm.default(x, None, None, m, v, *_TRAINING, False),
        lambda x, m, v: _ATEN.native_batch_norm(x, None, None, m, v, *_TRAINING),
        lambda x, m, v: _NOISE(v, m, 0.1, 0.3, True),
    ],
)
def test_other_functions_that_write_without_counting_it(write: Callable[..., Any]) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("variance", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, *_ = pytree.tree_leaves(write(x, self.mean, self.variance))
            return first.sum() + x @ self.mean

    def run(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = torch.compile(Written(), **arguments)
        with torch.no_grad(), bf16():
            return [compiled(data(3, 8) + 4) for _ in range(3)]

    assert_same_bits(run(**ours(weight_cache="version")), run(**EAGER))


def test_an_inference_graph_starts_with_its_casts_inside() -> None:
    with torch.no_grad():
        graphs, _ = plan_of(make(Plain), data(3, 8))
        assert casts_inside(graphs) == [6]
        lasting, _ = plan_of(make(Plain), data(3, 8), weight_cache="version")
        assert casts_inside(lasting) == [2]


def test_nothing_leaves_where_no_cache_would_be() -> None:
    off = AutocastState.of([BF16, {**BF16, "cache_enabled": False}])
    for arguments, reason in (
        ({"weight_cache": "off"}, 'weight_cache="off"'),
        ({"ambient": off}, "the weight cache is off: cache_enabled=False"),
    ):
        graphs, report = plan_of(make(Plain), data(3, 8), **arguments)  # type: ignore[arg-type]
        assert casts_inside(graphs) == [6]
        assert reasons(report) == {reason}


def test_freezing_keeps_its_constants() -> None:
    with torch.no_grad():
        for weight_cache in ("scope", "version"):
            graphs, report = plan_of(
                make(Plain), data(3, 8), inductor={"freezing": True}, weight_cache=weight_cache
            )
            assert casts_inside(graphs) == [6]
            assert reasons(report) == {"Inductor's freezing makes weights constants"}
    # Nothing is frozen where gradients are asked for.
    graphs, report = plan_of(make(Plain), data(3, 8), inductor={"freezing": True})
    assert casts_inside(graphs) == [2]
    assert reasons(report) == {None}


def writes_the_weight(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x @ w
    with torch.no_grad():
        w.mul_(2)
    return y


def writes_a_view(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        w.detach()[0].mul_(2)
    return x @ w


def writes_the_data(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.data.mul_(2)
    return x @ w


def writes_the_data_of_a_view(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    w.detach()[0].data.mul_(2)
    return x @ w


def writes_a_list(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch._foreach_mul_([w.detach().t()], 2)
    return x @ w


def writes_on_the_memory(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.empty(0).set_(w.detach()).mul_(2)
    return x @ w


class WritesInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w.data.mul_(2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad * 2


def writes_in_a_function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return WritesInside.apply(w, x) @ w


@pytest.fixture(scope="module")
def doubling() -> Iterator[Any]:
    """A custom op that says that it writes; its fake kernel counts nothing."""

    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    library = torch.library.Library("smart_autocast_plans", "FRAGMENT")
    library.define("double(Tensor(a!) x) -> ()")
    library.impl("double", double, "CompositeExplicitAutograd")
    torch.library.register_fake("smart_autocast_plans::double", lambda x: None, lib=library)
    yield torch.ops.smart_autocast_plans.double
    library._destroy()


def writes_by_a_custom_op(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    torch.ops.smart_autocast_plans.double(w.detach())
    return x @ w


@pytest.mark.usefixtures("doubling")
@pytest.mark.parametrize(
    "function",
    [
        *(writes_the_weight, writes_a_view, writes_the_data, writes_the_data_of_a_view),
        *(writes_a_list, writes_on_the_memory, writes_in_a_function, writes_by_a_custom_op),
    ],
)
def test_a_weight_that_the_graph_writes_to_stays(function: Any) -> None:
    """Where the cast is made decides what it sees."""
    _, report = plan_of(function, nn.Parameter(data(8, 8)), data(3, 8))
    assert reasons(report) == {"the graph writes to its memory"}

    def run(**arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        w = nn.Parameter(data(8, 8))
        compiled, results = torch.compile(function, **arguments), []
        with torch.no_grad():
            for _ in range(3):
                with bf16():  # in one context eager would not see the write
                    results.append(compiled(w, data(3, 8)))
        return results

    assert_same_bits(run(**ours(weight_cache="version")), run(**EAGER))


def test_a_weight_written_through_another_input_stays() -> None:
    def function(w: torch.Tensor, alias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        alias.mul_(2)
        return x @ w

    w = nn.Parameter(data(8, 8))
    _, report = plan_of(function, w, w.detach(), data(3, 8))
    assert reasons(report) == {"the graph writes to its memory"}


def test_gradients_that_would_add_up_in_another_order_keep_it_inside() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum() + nn.functional.normalize(w).sum()

    _, report = plan_of(function, nn.Parameter(data(8, 8)), data(3, 8))
    assert reasons(report) == {
        "read without a cast, too, its gradients would add up in another order"
    }
    with torch.no_grad():
        _, report = plan_of(function, nn.Parameter(data(8, 8)), data(3, 8))
    assert reasons(report) == {None}


def read_in_a_transform(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum() + torch.vmap(torch.sin)(w).sum()


def read_in_a_body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum() + torch.cond(x.sum() > 0, lambda: w.sum(), lambda: w.prod())


@pytest.mark.parametrize("function", [read_in_a_transform, read_in_a_body])
def test_without_gradients_it_does_not_matter_what_else_reads_a_weight(function: Any) -> None:
    w, x = nn.Parameter(data(8, 8)), data(3, 8)
    _, report = plan_of(function, w, x)
    assert reasons(report) != {None}
    with torch.no_grad():
        _, report = plan_of(function, w, x)
    assert reasons(report) == {None}

    def three_calls(function: Any) -> Any:
        with bf16(), torch.no_grad():
            return [function(w, x) for _ in range(3)]

    compiled = torch.compile(function, **ours())
    assert casts_made(lambda: three_calls(compiled)) == 1
    assert_same_bits(three_calls(compiled), three_calls(function))


def test_activations_are_no_weights() -> None:
    _, report = plan_of(lambda w, x: x @ w, data(8, 8), data(3, 8))
    assert report.weights == []


def test_casts_of_activations_live_as_long_as_a_scope() -> None:
    """A leaf that requires grad is what eager autocast caches the cast of. It may be an input that
    a sampler moves through `.data`."""
    model, x = make(Plain), data(3, 8).requires_grad_()
    compiled = torch.compile(model, **ours(weight_cache="version"))

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with bf16():
            outputs = [call(x), call(x)]
        sum(outputs).float().square().sum().backward()  # type: ignore[union-attr]
        leaves = [x, *model.parameters()]
        grads = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
        for leaf in leaves:
            leaf.grad = None
        return outputs + grads

    found: list[Tensor] = []
    for made in (4 + 1, 1, 1):
        expected = step(model)
        assert casts_made(lambda: found.extend(step(compiled))) == made
        assert_same_bits(found, expected)
        found.clear()
        x.data.add_(1)


def test_casts_in_a_checkpoint_are_made_again_in_the_backward() -> None:
    model = make(Plain)

    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model.first, x, use_reentrant=False)  # type: ignore[no-any-return]

    graphs, report = plan_of(function, data(3, 8))
    assert casts_inside(graphs) == [3]
    why = "in the graph: the body of tag_activation_checkpoint casts it"
    assert [str(weight) for weight in report.weights] == [
        f"model.first.weight -> bfloat16, {why}",
        f"model.first.bias -> bfloat16, {why}",
    ]


def test_a_checkpoint_reads_the_cast_of_its_surroundings() -> None:
    model = make(Plain)

    def function(x: torch.Tensor) -> torch.Tensor:
        return model.first(checkpoint(model.first, x, use_reentrant=False))

    graphs, report = plan_of(function, data(3, 8))
    assert reasons(report) == {None}
    assert casts_inside(graphs) == [2]  # the activations


def test_the_second_call_of_a_scope_makes_the_casts() -> None:
    model, x = torch.compile(make(), **ours()), data(3, 8)
    compiles: list[int] = []

    def calls(n: int) -> None:
        with bf16(), torch.no_grad():
            for _ in range(n):
                model(x)
                compiles.append(counters["aot_autograd"]["ok"])

    counters.clear()
    assert casts_made(lambda: calls(1)) == 0
    assert casts_made(lambda: calls(1)) == 0  # one call a scope: what comes next is one call
    assert casts_made(lambda: calls(3)) == 4  # by the second
    assert casts_made(lambda: calls(1)) == 4  # three are expected
    assert casts_made(lambda: calls(1)) == 0
    assert compiles[0] == 1
    assert compiles[2:5] == [1, 2, 2]
    assert compiles[-1] == 2


class Uneven(nn.Module):
    """A large weight, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(8, 64, bias=False)
        self.small = nn.Linear(64, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.large(x))


@pytest.fixture
def large_from_1_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LARGE_CAST_BYTES", 2 * 8 * 64)


@pytest.mark.usefixtures("large_from_1_kib")
def test_a_large_cast_is_outside_for_a_single_call_too() -> None:
    with torch.no_grad():
        graphs, _ = plan_of(make(Uneven), data(3, 8))
        assert casts_inside(graphs) == [3]  # two activations and the small weight
        assert len(graphs[0].graph.find_nodes(op="placeholder")) == 3

    model, x = torch.compile(make(Uneven), **ours()), data(3, 8)
    eager = torch.compile(make(Uneven), **EAGER)
    memory: list[int] = []

    def calls(n: int) -> None:
        with bf16(), torch.no_grad():
            for _ in range(n):
                assert_same_bits(model(x), eager(x))
        memory.append(weight_cache_info().bytes)

    before = weight_cache_info()
    assert [casts_made(lambda: calls(1)) for _ in range(3)] == [1, 1, 1]
    assert len(set(memory)) == 1  # each in that of the one before
    after = weight_cache_info()
    assert after.misses - before.misses == 6  # three of a large cast, three of one that was inside
    assert casts_made(lambda: calls(2)) == 2  # the large one, and by the second call the small one


def test_a_cast_is_not_large_by_a_byte(
    large_from_1_kib: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LARGE_CAST_BYTES", plan.LARGE_CAST_BYTES + 1)
    with torch.no_grad():
        graphs, _ = plan_of(make(Uneven), data(3, 8))
    assert casts_inside(graphs) == [4]


@pytest.mark.usefixtures("large_from_1_kib")
def test_where_all_casts_are_large_there_is_one_graph() -> None:
    model, x = torch.compile(nn.Linear(8, 64, bias=False), **ours()), data(3, 8)
    counters.clear()
    with bf16(), torch.no_grad():
        assert casts_made(lambda: [model(x) for _ in range(3)]) == 1
    assert counters["aot_autograd"]["ok"] == 1


@pytest.mark.usefixtures("large_from_1_kib")
@pytest.mark.parametrize("features", [8, 64], ids=["small", "beside-a-large-one"])
def test_a_weight_that_a_graph_casts_twice_is_missed_once(features: int) -> None:
    layer, other = nn.Linear(8, 8, bias=False), nn.Linear(8, features, bias=False)
    weights = list(nn.ModuleList([layer, other]).parameters())
    compiled, x = torch.compile(lambda x: other(layer(layer(x))), **ours()), data(3, 8)
    for _ in range(2):
        before = weight_cache_info()
        with bf16(), torch.no_grad():
            compiled(x)
        after = weight_cache_info()
        assert after.misses - before.misses == len(weights)
        assert after.casts - before.casts == (features == 64)


def test_both_graphs_give_the_same_bits() -> None:
    model, x = make(), data(3, 8)
    compiled, eager = torch.compile(model, **ours()), torch.compile(model, **EAGER)
    with bf16(), torch.no_grad():
        results = [compiled(x) for _ in range(3)]
        assert_same_bits(results, [eager(x)] * 3)


def test_the_second_compilation_is_outside_of_function_modes() -> None:
    """Dynamo has written into the graph what a mode does. Traced again inside of the mode, it would
    be done twice."""
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours())
    with bf16(), torch.no_grad(), HalvesProducts():
        assert_same_bits([compiled(x) for _ in range(3)], [model(x)] * 3)


@pytest.mark.slow
def test_inductor_gives_both_graphs_the_same_bits() -> None:
    class Attention(nn.Module):  # if it does not round, its two calls differ
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(self.attention(x, y, y, need_weights=False)[0])

    torch.manual_seed(0)
    model = Attention().eval()
    inputs = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    compiled = torch.compile(model, backend="smart_autocast")
    with torch.no_grad(), bf16():
        inside, outside = compiled(*inputs), compiled(*inputs)
        assert_same_bits([inside, outside], [model(*inputs)] * 2)


def test_sizes_the_second_graph_was_not_compiled_for() -> None:
    """What the late compilation assumes about sizes is checked; the first graph serves the rest."""

    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ w

    def inner(module: fx.GraphModule, inputs: Any) -> Any:
        late = any(i.dtype is torch.bfloat16 for i in inputs if isinstance(i, torch.Tensor))
        if late:  # an assumption that the first compilation did not make
            sizes = [s for i in inputs if isinstance(i, torch.Tensor) for s in i.shape]
            bool(next(s for s in sizes if isinstance(s, torch.SymInt)) < 6)
        code = make_aot(module, inputs)
        seen.append(late)
        return code

    from torch._dynamo.backends.debugging import aot_eager as make_aot

    seen: list[bool] = []
    compiled = torch.compile(function, dynamic=True, **{**ours(), "options": {"inner": inner}})
    w = nn.Parameter(data(8, 8))
    with bf16(), torch.no_grad():
        for n in (3, 4, 5, 7, 5):
            before = weight_cache_info()
            assert torch.equal(compiled(w, data(n, 8)), data(n, 8).bfloat16() @ w.bfloat16())
            after = weight_cache_info()
            assert (after.hits + after.casts > before.hits + before.casts) == (n in (4, 5))
    assert seen == [False, True]


def test_the_report_names_every_weight() -> None:
    _, report = plan_of(make(Plain), data(3, 8))
    assert len(report.weights) == 4
    assert str(report.weights[0]).endswith("-> bfloat16, outside of the graph")
    _, report = plan_of(make(Plain), data(3, 8), weight_cache="off")
    assert str(report.weights[0]).endswith('-> bfloat16, in the graph: weight_cache="off"')


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_compiled_code_holds_no_weight(grad: bool) -> None:
    model = make(Net)
    compiled = torch.compile(model.forward, **ours())
    with bf16(), torch.set_grad_enabled(grad):
        for _ in range(2):
            y = compiled(data(3, 8))
    if grad:
        y.float().sum().backward()
    storage = weakref.ref(model.first.weight.untyped_storage())
    del model, compiled, y
    gc.collect()
    assert storage() is None


def test_a_weight_that_a_written_subclass_holds_stays() -> None:
    def function(w: torch.Tensor, pair: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        pair.mul_(2)
        return x @ w

    w = nn.Parameter(data(8, 8))
    pair = TwoTensor(w.data, w.detach().clone())
    _, report = plan_of(function, w, pair, data(3, 8))
    assert reasons(report) == {"the graph writes to its memory"}


def test_weights_on_two_devices_with_gradients() -> None:
    """One graph may have parts of a model on several devices; `multi_cast` takes one at a time."""
    devices = ["cpu", "meta", "cpu", "meta"]
    weights = [nn.Parameter(torch.ones(2, device=device)) for device in devices]
    graph = graph_weights.GraphWeights([torch.bfloat16] * 4, [True] * 4, lasting=False, scoped=True)
    for _ in range(2):
        with bf16():
            casts = graph.casts(weights, graph.scope())
        assert [cast.device.type for cast in casts] == devices
        assert all(cast.requires_grad and cast.dtype is torch.bfloat16 for cast in casts)


def test_later_scopes_do_not_look_at_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One list of casts, until somebody asks for one of them: here another graph that shares a
    weight, which gets the cast that is there."""
    model, x = make(Plain), data(3, 8)
    looked_at: list[int] = []
    look = graph_weights.GraphWeights._look_at_each

    def counting(graph: Any, weights: list[Tensor], *args: Any) -> Any:
        looked_at.append(len(weights))
        return look(graph, weights, *args)

    def step(whole: Callable[..., Tensor], first: Callable[..., Tensor]) -> list[Tensor | None]:
        model.zero_grad()
        with bf16():
            loss = whole(x).sum() + whole(x).sum() + first(x).sum()
        loss.backward()
        return [p.grad for p in model.parameters()]

    monkeypatch.setattr(graph_weights.GraphWeights, "_look_at_each", counting)
    expected = step(model, model.first)
    torch._dynamo.reset()
    compiled = [torch.compile(f, **ours()) for f in (model, lambda x: model.first(x))]
    for _ in range(3):
        gradients: list[Any] = []
        assert casts_made(lambda: gradients.extend(step(*compiled))) == 4  # noqa: B023
        assert all(map(torch.equal, gradients, expected))
    assert looked_at == [4, 2, 2, 2]  # those of the model once, the shared ones in each scope


@pytest.mark.parametrize("small", [True, False])
def test_lasting_casts_that_are_made_anew(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are recorded as they are made, when those before are freed; large ones take over
    their memory. What graphs have seen is forgotten once, however many casts became wrong."""
    monkeypatch.setattr(graph_weights, "KEPT_BYTES", 2**20 if small else 0)
    calls: list[None] = []
    forget = graph_weights.forget_seen
    monkeypatch.setattr(graph_weights, "forget_seen", lambda: (calls.append(None), forget()))
    old: list[weakref.ref[Any]] = []

    cast_each = graph_weights.cast_each

    def cast_anew(*args: Any) -> Any:
        assert not small or all(storage() is None for storage in old)
        return cast_each(*args)

    monkeypatch.setattr(graph_weights, "cast_each", cast_anew)
    weights = [nn.Parameter(data(4, 4) * i) for i in range(1, 4)]
    graph = graph_weights.GraphWeights([torch.bfloat16] * 3, [True] * 3, lasting=True, scoped=True)
    places: set[int] = set()
    for step in range(3):
        calls.clear()
        for again in (False, True):  # in another scope: the same casts
            with bf16():
                casts = graph.casts(weights, graph.scope())
            assert_same_bits(casts, [w.bfloat16() for w in weights])
            recorded = {type(cast.grad_fn).__name__ for cast in casts}
            anew = again or (step > 0 and not small)
            assert recorded == {"_TracedBackward" if anew else "ToCopyBackward0"}
            torch.stack(casts).mul(step + 1).sum().backward()
            places.update(cast.data_ptr() for cast in casts)
            old = [weakref.ref(cast.untyped_storage()) for cast in casts]
            del casts
        assert len(calls) == (step > 0)
        for weight in weights:
            assert torch.equal(weight.grad, torch.full((4, 4), 2.0 * (step + 1)))
            weight.grad = None
            with torch.no_grad():
                weight.add_(1)
    assert small or len(places) == 3
