"""A weight that changes is cast again, however it changes.

Each way to change a weight runs twice: as it is, where the next call must see the new values; and
without the checks that notice this change, where it must not - so each check is needed.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from autocast_backend import autocast_to_bf16, clear_weight_cache, multi_cast
from autocast_backend.weights import cache, cast, graph_weights
from tests.support import assert_same_bits

from .support import Net, bf16, casts_made, data, make, ours

Change = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Case:
    """A way to change the weights of a `Net` that has gradients.

    Attributes:
        change: does it.
        noticed_by: every check that would notice it.
        prepare: runs before the first call.
    """

    change: Change
    noticed_by: tuple[str, ...]
    prepare: Change = lambda model: None


def steps(kind: Any, **arguments: Any) -> Change:
    def change(model: nn.Module) -> None:
        kind(model.parameters(), lr=0.5, **arguments).step()

    return change


def steps_compiled(kind: Any, **arguments: Any) -> Change:
    def change(model: nn.Module) -> None:
        optimizer = kind(model.parameters(), lr=0.5, **arguments)
        torch.compile(optimizer.step, backend="aot_eager")()

    return change


def steps_scaled(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


def flattens(model: nn.Module) -> None:
    """As optimizers do that step on all weights at once: each becomes a part of one parameter, and
    counts for itself."""
    flat = nn.Parameter(parameters_to_vector(model.parameters()).detach())
    vector_to_parameters(flat.data, model.parameters())
    model.flat = [flat]  # type: ignore[assignment]  (not a parameter of the model)


def steps_on_the_flat_parameter(model: nn.Module) -> None:
    [flat] = model.flat  # type: ignore[misc,union-attr]
    flat.grad = torch.ones_like(flat)
    torch.optim.SGD([flat], lr=0.5).step()


def fails_to_step(model: nn.Module) -> None:
    """Out of memory in the second group, say."""
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others, "lr": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=0.5, fused=True)
    others[0].grad = torch.ones(8).to_sparse()
    with pytest.raises(RuntimeError):
        optimizer.step()


def other() -> nn.Module:
    torch.manual_seed(7)
    return Net()


def assigns_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def on_memory_of_ours(model: nn.Module) -> None:
    for p in model.parameters():
        memory = bytearray(p.detach().numpy().tobytes())
        p.memory = memory  # type: ignore[attr-defined]
        p.data = torch.frombuffer(memory, dtype=torch.float32).view(p.shape)


def assigns_data_at_the_old_address(model: nn.Module) -> None:
    """As an allocator hands out the same memory again."""
    for p in model.parameters():
        doubled = (p.detach() * 2).numpy().tobytes()
        shape, p.data = p.shape, torch.empty(0)
        p.memory[:] = doubled  # type: ignore[attr-defined]
        p.data = torch.frombuffer(p.memory, dtype=torch.float32).view(shape)  # type: ignore[attr-defined]


def two_sets_in_one_storage(model: nn.Module) -> None:
    for p in model.parameters():
        p.both = torch.stack([p.detach(), p.detach() * 2])  # type: ignore[attr-defined]
        p.data = p.both[0]  # type: ignore[attr-defined]


def takes_the_second_set(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.both[1]  # type: ignore[attr-defined]


def writes_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def writes_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for p in model.parameters():
            p.mul_(2)


def swaps(model: nn.Module) -> None:
    for p in model.parameters():
        fresh = nn.Parameter(p.detach() * 2)
        assert fresh._version < p._version  # a lower version is a change, too
        torch.utils.swap_tensors(p, fresh)


def swaps_for_a_lower_version(model: nn.Module) -> None:
    """With a parameter on the same memory that counts for itself."""
    for p in model.parameters():
        alias = nn.Parameter(p.data)
        with torch.no_grad():
            alias.mul_(2)
        assert alias._version < p._version
        torch.utils.swap_tensors(p, alias)


def loads(assign: bool) -> Change:
    return lambda model: model.load_state_dict(other().state_dict(), assign=assign)


def averages(model: nn.Module) -> None:
    theirs = list(other().parameters())
    torch._foreach_lerp_([p.detach() for p in model.parameters()], theirs, 0.5)


def fills_from_a_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 2, model.parameters())


def writes_with_the_version_preserved(model: nn.Module) -> None:
    """As DDP does to the buffers that it sends."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(model.parameters())):
        writes_in_place(model)


def writes_from_another_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=writes_in_place, args=(model,))
    thread.start()
    thread.join()


CASES = {
    **{
        f"{kind.__name__}-{name}": Case(steps(kind, **how), ("version", "step"))
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for name, how in (("plain", {"foreach": False}), ("foreach", {"foreach": True}))
    },
    **{
        f"{kind.__name__}-fused": Case(steps(kind, fused=True), ("step",))
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    },
    "compiled-SGD": Case(steps_compiled(torch.optim.SGD), ("version", "step")),
    "compiled-Adam-fused": Case(steps_compiled(torch.optim.Adam, fused=True), ("version", "step")),
    "grad-scaler": Case(steps_scaled, ("step",)),
    "SGD-flat": Case(steps_on_the_flat_parameter, ("step",), flattens),
    "step-that-raises": Case(fails_to_step, ("step",)),
    "p.data": Case(assigns_data, ("address", "storage")),
    "p.data-same-address": Case(assigns_data_at_the_old_address, ("storage",), on_memory_of_ours),
    "p.data-same-storage": Case(takes_the_second_set, ("address",), two_sets_in_one_storage),
    "in-place": Case(writes_in_place, ("version",)),
    "in-inference-mode": Case(writes_in_inference_mode, ("version",)),
    "swap_tensors": Case(swaps, ("address", "storage", "version", "identity")),
    "swap_tensors-same-memory": Case(
        swaps_for_a_lower_version, ("version", "identity"), writes_in_place
    ),
    "load_state_dict": Case(loads(assign=False), ("version",)),
    "ema": Case(averages, ("version",)),
    "vector_to_parameters": Case(fills_from_a_vector, ("address", "storage", "version")),
    "thread": Case(writes_from_another_thread, ("version",)),
    "version-preserved": Case(writes_with_the_version_preserved, ("step",)),
}


def without(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one check out of the cache."""
    if check == "step":
        monkeypatch.setattr(cache, "all_casts", lambda: iter(()))
    elif check == "storage":
        monkeypatch.setattr(cast, "ref_to_storage", lambda weight, when_freed=None: lambda: True)
    elif check == "identity":
        monkeypatch.setattr(cast, "_is_of", lambda identity, weight: True)
    else:
        monkeypatch.setattr(cast, f"_{check}", lambda weight: 0)


def outputs(case: Case, weight_cache: str, scopes: int = 1) -> tuple[torch.Tensor, ...]:
    """A call, the change, and a second call in the same autocast context, the last of so many; and
    what eager mode computes then."""
    torch._dynamo.reset()
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache=weight_cache))
    case.prepare(model)
    for _ in range(scopes - 1):
        with bf16():
            compiled(x)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with bf16():
        before = compiled(x).detach().clone()
        case.change(model)
        after = compiled(x).detach().clone()
    with bf16(cache_enabled=False):
        return before, after, model(x)


LIVES = pytest.mark.parametrize(
    ("lifetime", "scopes"), [("scope", 1), ("scope", 2), ("version", 1)]
)


@LIVES
@pytest.mark.parametrize("name", CASES)
def test_a_changed_weight_is_cast_again(name: str, lifetime: str, scopes: int) -> None:
    before, after, expected = outputs(CASES[name], lifetime, scopes)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before), "a change that shows nothing"


@LIVES
@pytest.mark.parametrize("name", CASES)
def test_without_its_checks_it_is_not(
    name: str, lifetime: str, scopes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in CASES[name].noticed_by:
        without(check, monkeypatch)
    before, after, _ = outputs(CASES[name], lifetime, scopes)
    assert torch.equal(after, before)


@pytest.mark.parametrize("checked", [True, False])
def test_known_weights_in_another_storage_over_their_memory(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier scope knew of a weight does not tell the storage of today, by which a fused
    step finds its cast."""
    if not checked:
        monkeypatch.setattr(cast.Known, "have_their_storages", lambda known, weights: True)
    model, x = nn.Linear(8, 8, bias=False), data(3, 8)
    memory = bytearray(model.weight.detach().numpy().tobytes())
    model.weight.data = former = torch.frombuffer(memory, dtype=torch.float32).view(8, 8)
    torch._dynamo.reset()
    compiled = torch.compile(model, **ours())
    with bf16():
        compiled(x)
    model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(8, 8)
    assert model.weight.data_ptr() == former.data_ptr()
    model.weight.grad = torch.ones_like(model.weight)
    with bf16():
        before = compiled(x).detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step()
        assert torch.equal(compiled(x), before) != checked


def test_a_change_between_two_kinds_of_graphs() -> None:
    """One graph makes the lasting cast anew; the other must not keep its node of the old one."""
    model, x = make(), data(3, 8)

    def region(x: torch.Tensor) -> torch.Tensor:
        with bf16():
            return model(x)

    ambient, own = (torch.compile(f, **ours(weight_cache="version")) for f in (model, region))
    own(x)
    with bf16():
        before = ambient(x).detach().clone()
        writes_in_place(model)
        with torch.autocast("cpu", enabled=False):
            own(x)
        after = ambient(x).detach().clone()
        expected = torch.compile(model, **ours(weight_cache="off"))(x)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


def test_casts_that_the_closure_of_a_step_makes() -> None:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)

    def closure() -> torch.Tensor:
        loss = compiled(x).float().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with bf16():
        before = compiled(x).detach().clone()
        optimizer.step(closure)
        after = compiled(x).detach().clone()
        expected = torch.compile(model, **ours(weight_cache="off"))(x)
    assert torch.equal(after, expected)
    assert not torch.equal(after, before)


@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("attribute", [None, len], ids=["without_attributes", "with_a_function"])
def test_another_weight_over_the_memory_of_one_that_was_freed(
    lifetime: str, checked: bool, attribute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As code does that streams weights through one buffer. It has the id and the version of the
    other, and no dead storage tells."""
    if not checked:
        without("identity", monkeypatch)
    torch._dynamo.reset()
    trained = lifetime == "scope"  # which keeps no casts of frozen weights
    model, x = nn.Linear(8, 8, bias=False).requires_grad_(trained), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache=lifetime))
    ids, stale = [], []
    with torch.no_grad(), bf16():
        for _ in range(10):
            compiled(x)
            ids.append(id(model.weight))
            values, version = model.weight.data, model.weight._version
            values.mul_(2)
            while values._version < version:
                values.mul_(1)
            del model.weight
            model.weight = nn.Parameter(values, requires_grad=trained)
            model.weight.loader = attribute  # type: ignore[attr-defined]
            # not by autocast, whose cache would keep the ids of weights from being given out again
            expected = torch.nn.functional.linear(x.bfloat16(), model.weight.bfloat16())
            stale.append(not torch.equal(compiled(x), expected))
    assert len(set(ids)) < len(ids), "no id was given out again"
    assert any(stale) != checked


def test_another_weight_over_the_memory_of_one_beside_one_that_is_known() -> None:
    """Casts that are made at once are made of the weights that earlier scopes knew."""
    graph = graph_weights.GraphWeights(
        [torch.bfloat16] * 2, [True, True], lasting=False, scoped=True
    )
    same, former = nn.Parameter(data(8, 8)), nn.Parameter(data(8, 8))
    for _ in range(2):
        with bf16():
            graph.casts([same, former], graph.scope())
    another = nn.Parameter(former.detach())
    with bf16():
        for _ in range(2):
            casts = graph.casts([same, another], graph.scope())
            assert_same_bits(casts, [same.bfloat16(), another.bfloat16()])
            with torch.no_grad():
                another.mul_(2)


def test_a_cast_does_not_keep_the_model_that_attributes_of_a_weight_lead_to() -> None:
    model = nn.Linear(8, 8)
    model.weight.loader = model.forward  # type: ignore[attr-defined]
    one = cast.Cast(model.weight)
    known = cast.Known([model.weight], [torch.bfloat16], [one])
    seen = cast.Seen(known, [one._version], [one._identity], [one])
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
    del one, known, seen


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_attributes_that_are_copied_to_the_next_weight_over_one_memory(lifetime: str) -> None:
    """With the name that the former is known by. The next but one may get its id again."""
    memory, model, x = torch.zeros(8, 8), nn.Module(), torch.ones(1, 8)

    def put(value: float, attributes: dict[str, Any]) -> None:
        memory.fill_(value)
        weight = nn.Parameter(memory.data)
        weight.__dict__.update(attributes)
        model.w = weight

    put(0, {"loader": print})
    compiled = torch.compile(lambda x: x @ model.w, **ours(weight_cache=lifetime))
    with torch.no_grad(), bf16():
        for i in range(60):
            put(i, dict(model.w.__dict__))
            assert [compiled(x)[0, 0].item() for _ in range(2)] == [8 * i] * 2


def forget_dead_now() -> None:
    cache.Shared.sweep_at = 0
    with cache.Shared.lock:
        cache.forget_dead()


def test_attributes_that_come_later_keep_no_model_for_good() -> None:
    """Until casts are swept at the latest."""
    freed = []
    for _ in range(3):
        model, x = nn.Linear(8, 8), data(3, 8)
        compiled = torch.compile(model, **ours(weight_cache="version"))
        with torch.no_grad(), bf16():
            compiled(x)
        model.weight.owner = model  # type: ignore[attr-defined]
        freed.append(weakref.ref(model))
        del model, compiled
        torch._dynamo.reset()
        forget_dead_now()
        gc.collect()
    assert [one() for one in freed] == [None] * 3


def test_nor_where_the_memory_is_kept_for_cuda_graphs() -> None:
    graph = graph_weights.GraphWeights(
        [torch.bfloat16], [False], lasting=False, scoped=True, keep_memory=True
    )
    model = nn.Linear(8, 8).requires_grad_(False)
    with bf16():
        graph.casts([model.weight], graph.scope())
    model.weight.owner = model  # type: ignore[attr-defined]
    freed = weakref.ref(model)
    assert len(cache.Shared.kept) == 1
    del model
    forget_dead_now()
    gc.collect()
    assert freed() is None
    forget_dead_now()
    assert not cache.Shared.kept


def test_what_later_scopes_know_of_weights_keeps_nothing() -> None:
    """The compiled code lives on, for other models of the kind."""
    graph = graph_weights.GraphWeights([torch.bfloat16], [True], lasting=False, scoped=True)

    def freed(late: bool) -> Callable[[], Any]:
        model = nn.Linear(8, 8)
        with bf16():
            graph.casts([model.weight], graph.scope())
        assert graph._known
        if late:
            model.weight.owner = model  # type: ignore[attr-defined]
        return weakref.ref(model)

    for late in (False, True):
        one = freed(late)
        gc.collect()
        assert one() is None
        forget_dead_now()
        assert not graph._known


def test_an_interrupted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written over the memory of casts, and has not said so. The weights are then what they
    were when those were made."""
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache="version"))
    first = [p.data for p in model.parameters()]

    def puts(values: list[torch.Tensor]) -> None:
        for p, value in zip(model.parameters(), values, strict=True):
            p.data = value

    def interrupted(*args: Any, **arguments: Any) -> None:
        multi_cast(*args, **arguments)
        raise KeyboardInterrupt

    with torch.no_grad(), bf16():
        expected = compiled(x)
        puts([value * 2 for value in first])
        monkeypatch.setattr(graph_weights, "multi_cast", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled(x)
        monkeypatch.undo()
        puts(first)
        assert torch.equal(compiled(x), expected)


def test_optimizers_of_sparse_parameters_step() -> None:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache="version"))
    weight = nn.Parameter(torch.eye(3).to_sparse())
    weight.grad = torch.eye(3).to_sparse()
    with torch.no_grad(), bf16():
        compiled(x)
        torch.optim.SGD([weight], lr=1.0).step()  # while there are casts that it might spoil
        assert casts_made(lambda: compiled(x)) == 0
    assert not weight.to_dense().any()


def puts_data(weights: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    for weight, other in zip(weights, others, strict=True):
        weight.data, other.data = other.data, weight.data


def swaps_with(weights: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    for weight, other in zip(weights, others, strict=True):
        torch.utils.swap_tensors(weight, other)


def transposes(weights: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.data = weight.data.mT if weight.dim() == 2 else weight.data


@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize("change", [puts_data, swaps_with, transposes])
def test_there_and_back(change: Callable[..., None], lifetime: str) -> None:
    """Other weights are put in for a while, as averages are for a validation. Another graph casts
    those; the first one meets its own weights again, as it had left them."""
    model, x = make(), data(3, 8)
    one, other = (
        torch.compile(f, **ours(weight_cache=lifetime)) for f in (model, lambda x: model(x))
    )
    weights = list(model.parameters())
    averages = [nn.Parameter(w.detach() * 2) for w in weights]
    with bf16():
        before = one(x).detach().clone()
        change(weights, averages)
        assert not torch.equal(other(x), before)
        change(weights, averages)
        assert torch.equal(one(x), before)


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_a_weight_of_another_size_at_the_same_address(lifetime: str) -> None:
    """The same tensor, memory and version; the graph takes all sizes."""
    memory = data(32, 8)
    weight, x = nn.Parameter(memory[:4], requires_grad=False), data(3, 8)
    compiled = torch.compile(torch.nn.functional.linear, **ours(weight_cache=lifetime))
    sizes = []
    torch._dynamo.reset()
    with torch._dynamo.config.patch(force_parameter_static_shapes=False), torch.no_grad(), bf16():
        for size in (4, 6, 7, 8, 9):
            weight.data = memory[:size]
            sizes.append(compiled(x, weight).shape[1])
    assert sizes == [4, 6, 7, 8, 9]


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_a_weight_with_other_strides_at_the_same_address(lifetime: str) -> None:
    """The same tensor, memory, version and shape; the graph takes all strides."""
    memory, x = data(80), data(3, 4)
    linear = torch.nn.functional.linear
    compiled = torch.compile(linear, **ours(weight_cache=lifetime))
    weight = nn.Parameter(memory[:16].view(4, 4))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(force_parameter_static_shapes=False), bf16():
        for stride in (4, 8, 12, 16, 20):
            weight.data = memory.as_strided((4, 4), (stride, 1))
            assert torch.equal(compiled(x, weight), linear(x, weight.detach()))


@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize("change", [Tensor.t, lambda data: data[:4]], ids=["turned", "cut"])
def test_another_layout_at_the_same_address_in_a_module(
    change: Callable[[Tensor], Tensor], lifetime: str
) -> None:
    """The same tensor, memory and version. (Before torch 2.12 Dynamo does not look.)"""
    layer, x = nn.Linear(8, 8, bias=False), data(3, 8)
    compiled = torch.compile(layer, **ours(weight_cache=lifetime))
    torch._dynamo.reset()
    with bf16():
        compiled(x), compiled(x)
        layer.weight.data = change(layer.weight.data)
        assert torch.equal(compiled(x), nn.functional.linear(x, layer.weight.detach()))


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_casts_without_memory_are_for_those_who_ask_for_shapes(lifetime: str) -> None:
    torch._dynamo.reset()
    for frozen in (True, False):
        layer, x = nn.Linear(8, 8).requires_grad_(not frozen), data(3, 8)
        compiled = torch.compile(layer, **ours(weight_cache=lifetime))
        with bf16():
            for shapes in (True, False, True, False):
                mode = FakeTensorMode(allow_non_fake_inputs=True) if shapes else nullcontext()
                with mode:
                    results = [compiled(x) for _ in range(2)]
                assert {isinstance(result, FakeTensor) for result in results} == {shapes}


def writes_to_data(weight: nn.Parameter) -> None:
    weight.data.mul_(2)


def adds_to_data(weight: nn.Parameter) -> None:
    weight.data += 1  # as PEFT merges adapters: the same memory is assigned again


def writes_to_a_numpy_view(weight: nn.Parameter) -> None:
    weight.detach().numpy()[:] *= 2


@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize("write", [writes_to_data, adds_to_data, writes_to_a_numpy_view])
def test_writes_that_nobody_counts_need_clear_weight_cache(
    write: Callable[[nn.Parameter], None], lifetime: str
) -> None:
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache=lifetime))
    expected = torch.compile(model, **ours(weight_cache="off"))
    with bf16():
        before = compiled(x).detach().clone()
        for p in model.parameters():
            write(p)
        assert torch.equal(compiled(x), before), "the docs say that it cannot be seen"
        clear_weight_cache()
        after = compiled(x)
        assert torch.equal(after, expected(x))
        assert not torch.equal(after, before)


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_what_is_captured_is_not_taken_for_computed(
    lifetime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a CUDA graph is captured, each call makes its casts, and leaves none behind."""
    model, x = make(), data(3, 8)
    compiled = torch.compile(model, **ours(weight_cache=lifetime))

    def casts(captured: bool) -> int:
        monkeypatch.setattr(graph_weights, "is_captured", lambda tensor: captured)
        return casts_made(lambda: compiled(x))

    with bf16():
        assert [casts(c) for c in (True, True, False, False, True, False)] == [4, 4, 4, 0, 4, 0]
        writes_in_place(model)
        assert [casts(c) for c in (True, False)] == [4, 4]


def test_what_is_captured_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay writes to it whenever it likes."""
    weight = data(8, 8)
    weights = graph_weights.GraphWeights(
        [torch.bfloat16], [False], lasting=False, scoped=True, keep_memory=True
    )

    def address(captured: bool) -> int:
        monkeypatch.setattr(graph_weights, "is_captured", lambda tensor: captured)
        with bf16():
            return weights.casts([weight], weights.scope())[0].data_ptr()

    first = address(captured=False)
    assert address(captured=True) != first
    assert address(captured=False) == first


@pytest.fixture(scope="module")
def user_ops() -> Iterator[None]:
    """`doubles_` writes to its weight, `same` returns it; autocast casts it for both."""
    library = torch.library.Library("smart_autocast_written", "DEF")
    library.define("same(Tensor(a) w) -> Tensor(a)")
    library.impl("same", lambda w: w.view(w.shape), "CompositeImplicitAutograd")

    def same_under_autocast(w: torch.Tensor) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet("AutocastCPU")):
            return torch.ops.smart_autocast_written.same(w.bfloat16())

    library.impl("same", same_under_autocast, "AutocastCPU")

    @torch.library.custom_op("smart_autocast_written::doubles_", mutates_args=("w",))
    def doubles_(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w.mul_(2)
        return x @ w

    doubles_.register_fake(lambda w, x: x.new_empty(x.shape[0], w.shape[1]))
    doubles_.register_autocast("cpu", torch.bfloat16)
    yield
    doubles_._lib._destroy()
    library._destroy()


def a_call_writes_to_its_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.ops.smart_autocast_written.doubles_(w, x),)


def the_graph_writes_to_a_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    same = torch.ops.smart_autocast_written.same(w)
    same.mul_(2)
    return (x.to(same.dtype) @ same,)


def returns_its_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x @ w, torch.ops.smart_autocast_written.same(w)


def returns_a_smart_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x @ w, autocast_to_bf16(w)


def a_checkpoint_returns_a_smart_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    return x @ w, checkpoint(torch.t, autocast_to_bf16(w), use_reentrant=False)


def a_checkpoint_writes_to_a_smart_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    return x @ w, checkpoint(lambda c: c.mul_(2).sum(), autocast_to_bf16(w), use_reentrant=False)


@torch._dynamo.allow_in_graph
def doubles(cast: torch.Tensor) -> torch.Tensor:
    return cast.mul_(2).sum()


def a_function_writes_to_a_smart_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    return x @ w, doubles(autocast_to_bf16(w))


def a_list_call_writes_to_a_smart_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    cast = autocast_to_bf16(w)
    torch._foreach_mul_([cast], 2)
    return x @ w, cast.sum()


def a_transform_returns_a_smart_cast(w: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
    return x @ w, torch.vmap(lambda row: row.view(-1))(autocast_to_bf16(w))


def casts_for_nobody(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    autocast_to_bf16(w)
    return (x @ w,)


@pytest.mark.usefixtures("user_ops")
@pytest.mark.parametrize("lifetime", ["scope", "version"])
@pytest.mark.parametrize(
    "function",
    [
        a_call_writes_to_its_cast,
        the_graph_writes_to_a_cast,
        returns_its_cast,
        returns_a_smart_cast,
        a_checkpoint_returns_a_smart_cast,
        a_checkpoint_writes_to_a_smart_cast,
        a_function_writes_to_a_smart_cast,
        a_list_call_writes_to_a_smart_cast,
        a_transform_returns_a_smart_cast,
        casts_for_nobody,
    ],
)
def test_what_is_written_to_one_cast_is_not_read_by_other_calls(
    function: Callable[..., tuple[torch.Tensor, ...]], lifetime: str
) -> None:
    """Eager autocast keeps no casts of frozen weights, so these calls have one each."""
    w, x = data(8, 8), data(3, 8)

    def results(call: Callable[..., tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            with bf16():
                for _ in range(3):
                    outputs = call(weight, x)
                    found += [output.clone() for output in outputs]
                    outputs[-1].mul_(2)
        return [*found, weight]

    weight = nn.Parameter(w.clone(), requires_grad=False)
    expected = results(function)
    weight = nn.Parameter(w.clone(), requires_grad=False)
    actual = results(torch.compile(function, **ours(weight_cache=lifetime)))
    for mine, eagers in zip(actual, expected, strict=True):
        assert mine.dtype is eagers.dtype
        assert torch.equal(mine, eagers)
