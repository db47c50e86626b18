"""Inputs that overlap: a graph that writes to one is compiled for how they do, and anew where they
do otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.aot.harness import AOT_EAGER, ORACLE, aliases, backward_inside, loss_of
from tests.support import BF16, assert_same_bits

Inputs = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Two matrices, the first of which is written to, out of 64 elements."""

INPUTS: dict[str, Inputs] = {
    "apart": lambda memory: (memory[:16].view(4, 4), memory[16:32].view(4, 4)),
    "further_apart": lambda memory: (memory[:16].view(4, 4), memory[32:48].view(4, 4)),
    "of_their_own": lambda memory: (
        memory[:16].view(4, 4).clone(),
        memory[16:32].view(4, 4).clone(),
    ),
    "overlapping": lambda memory: (memory[:16].view(4, 4), memory[4:20].view(4, 4)),
    "overlapping_less": lambda memory: (memory[:16].view(4, 4), memory[8:24].view(4, 4)),
    "overlapping_elsewhere": lambda memory: (memory[16:32].view(4, 4), memory[20:36].view(4, 4)),
    "of_less_memory": lambda memory: INPUTS["overlapping"](memory[:32].clone()),
    "the_other_way_round": lambda memory: (memory[4:20].view(4, 4), memory[:16].view(4, 4)),
}


def write_and_multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    return y @ y


def values(
    compiled: Callable[..., torch.Tensor],
    names: list[str],
    pass_on: Callable[..., Sequence[torch.Tensor]] = lambda x, y: (x, y),
) -> list[torch.Tensor]:
    """What each call returns, and all that it may write to."""
    found = []
    for name in names:
        memory = torch.arange(64.0).sin()
        inputs = INPUTS[name](memory)
        with torch.autocast(**BF16):
            found += [compiled(*pass_on(*inputs)), memory, *inputs]
    return found


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("then", INPUTS)
@pytest.mark.parametrize("first", ["apart", "of_their_own", "overlapping"])
def test_inputs_that_overlap_in_another_way(first: str, then: str, dynamic: bool) -> None:
    def both(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(write_and_multiply, dynamic=dynamic, **compile_arguments)
        return values(compiled, [first, then, first])

    assert_same_bits(both(**AOT_EAGER), both(**ORACLE))


class Counts(nn.Module):
    """Writes to a buffer, or to its weight."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).sin().view(4, 4))
        self.register_buffer("state", torch.arange(16.0).cos().view(4, 4))
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(self, self.written).mul_(3)
        return (x @ x) @ self.weight


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("written", ["state", "weight"])
@pytest.mark.parametrize(
    "take", [lambda t: t, lambda t: t.view(4, 4), lambda t: t.t()], ids=["itself", "view", "turned"]
)
def test_an_input_of_the_memory_that_a_module_writes_to(
    take: Callable[[torch.Tensor], torch.Tensor], written: str, dynamic: bool
) -> None:
    def calls(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = Counts(written)
        compiled = torch.compile(model, dynamic=dynamic, **compile_arguments)
        found = []
        with torch.no_grad():
            for of in (torch.eye(4), getattr(model, written), torch.eye(4)):
                with torch.autocast(**BF16):
                    found += [compiled(take(of)), getattr(model, written).clone()]
        return found

    assert_same_bits(calls(**AOT_EAGER), calls(**ORACLE))


class Attributes(nn.Module):
    """Holds its inputs, as some hold a part of a cache."""

    def forward(self) -> torch.Tensor:
        return write_and_multiply(self.x, self.y)


class Buffers(Attributes):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("x", None)
        self.register_buffer("y", None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("then", ["of_their_own", "overlapping", "overlapping_elsewhere"])
@pytest.mark.parametrize("kind", [Attributes, Buffers])
def test_tensors_that_a_module_is_given(kind: type[nn.Module], then: str, dynamic: bool) -> None:
    def calls(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        module = kind()
        compiled = torch.compile(module, dynamic=dynamic, **compile_arguments)

        def hold(x: torch.Tensor, y: torch.Tensor) -> tuple[()]:
            module.x, module.y = x, y
            return ()

        return values(compiled, ["apart", then, "apart"], hold)

    assert_same_bits(calls(**AOT_EAGER), calls(**ORACLE))


def test_buffers_of_a_module_as_inputs_of_another_function() -> None:
    """Dynamo marks what it has met as a module's."""

    def calls(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        module = Buffers()
        module.x, module.y = torch.eye(4), torch.ones(4, 4)
        torch.compile(module, **compile_arguments)()
        compiled = torch.compile(lambda x, y: write_and_multiply(x, y), **compile_arguments)
        with torch.autocast(**BF16):
            pairs = [(module.x, module.y), (module.x, module.x.t())]
            return [t for x, y in pairs for t in (compiled(x, y), x.clone())]

    assert_same_bits(calls(**AOT_EAGER), calls(**ORACLE))


@pytest.mark.parametrize("then", ["overlapping", "overlapping_elsewhere"])
@pytest.mark.parametrize("way", ["set", "data", "inference"])
def test_tensors_that_are_no_views_of_their_memory(way: str, then: str) -> None:
    """Their fake tensors have less memory than they."""

    def given_memory(*inputs: torch.Tensor) -> list[torch.Tensor]:
        new = [torch.zeros(4, 4) for _ in inputs]
        for tensor, value in zip(new, inputs, strict=True):
            if way == "set":
                tensor.set_(value)
            else:
                tensor.data = value
        return new

    def calls(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(write_and_multiply, dynamic=False, **compile_arguments)
        names = ["apart", then, "apart"]
        if way != "inference":
            return values(compiled, names, given_memory)
        with torch.inference_mode():
            return values(compiled, names)

    assert_same_bits(calls(**AOT_EAGER), calls(**ORACLE))


class Layers(nn.Module):
    """Writes to an input in a later part of the graph than the first, in the same as a view."""

    def __init__(self, *, through_a_view: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.through_a_view = through_a_view

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        written = x[:3] if self.through_a_view else x
        found = self.layers(torch.eye(4))
        written.mul_(3)
        return found + y


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("through_a_view", [False, True], ids=["itself", "view"])
@pytest.mark.parametrize(("first", "then"), [("apart", "overlapping"), ("overlapping", "apart")])
def test_parts_of_a_graph(
    first: str, then: str, through_a_view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's optimizer cuts the graph, and compiles each part with fake inputs: with the memory of
    what they are views of, as far as that reaches."""
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1)

    def calls(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = DistributedDataParallel(
            Layers(through_a_view=through_a_view), bucket_cap_mb=2 / 2**20
        )
        compiled = torch.compile(model, **compile_arguments)
        found = []
        for name in (first, then):
            x, y = INPUTS[name](torch.arange(99.0).sin()[:64].data)
            with torch.autocast(**BF16):
                found += [compiled(x, y).detach(), x, y]
        return found

    assert_same_bits(calls(**AOT_EAGER), calls(**ORACLE))


def test_what_does_not_overlap_is_not_compiled_again() -> None:
    compiled = torch.compile(write_and_multiply, dynamic=False, **AOT_EAGER)
    values(compiled, ["apart"])
    with torch._dynamo.config.patch(error_on_recompile=True):
        values(compiled, ["further_apart", "of_their_own", "apart"])
    values(compiled, ["overlapping"])
    with torch._dynamo.config.patch(error_on_recompile=True):
        values(compiled, ["overlapping", "apart"])


def test_overlaps_of_what_is_only_read_do_not_matter() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        z.mul_(3)
        return x @ y

    compiled = torch.compile(function, dynamic=False, **AOT_EAGER)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name in ("overlapping", "apart", "overlapping_less"):
            z = torch.ones(4)
            x, y = INPUTS[name](torch.arange(64.0).sin())
            with torch.autocast(**BF16):
                assert_same_bits([compiled(x, y, z), z], [x @ y, torch.full((4,), 3.0)])


def turned(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    x.mul_(3)
    return [y.t(), y[:1]]


def a_part_turned(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    x.mul_(3)
    return [y.sin(), y[1:].t()]


def results_and_views_of_them(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    x.mul_(3)
    product, twice = y @ y.t(), y * 2
    return [y.sin(), product, product.t(), twice.t(), twice[1:]]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("differentiable", [False, True], ids=["no_gradients", "gradients"])
@pytest.mark.parametrize("function", [turned, a_part_turned, results_and_views_of_them])
@pytest.mark.parametrize(
    "take",
    [lambda t: (t[:2], t.t()), lambda t: (t, t.view(2, 8)[:, :4]), lambda t: (t[:2], t[1:])],
    ids=["turned", "part", "rows"],
)
def test_views_returned_where_inputs_overlap(
    take: Inputs, function: Callable[..., list[torch.Tensor]], differentiable: bool, dynamic: bool
) -> None:
    """Of inputs, and of results: AOTAutograd makes these anew, of what they are views of."""

    def run(**compile_arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        compiled = torch.compile(function, dynamic=dynamic, **compile_arguments)
        leaf = torch.arange(16.0).sin().view(4, 4).requires_grad_(differentiable)
        memory = leaf * 1
        inputs = take(memory)
        with torch.autocast(**BF16):
            outputs = compiled(*inputs)
        relations = aliases([*inputs, *outputs])
        if differentiable:
            loss_of(outputs).backward()
        return [*outputs, memory, leaf.grad, str(relations)]

    assert_same_bits(run(**AOT_EAGER), run(**ORACLE))


def test_a_variant_assumes_nothing_of_places_in_memory() -> None:
    """Traced again for a backward under autocast, AOTAutograd asks once more what overlaps."""

    def product(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y.add_(0.5)
        return x @ weight

    def run(**compile_arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        compiled = torch.compile(product, dynamic=True, **compile_arguments)
        found = []
        for rows, begin in ((3, 12), (4, 24), (5, 20), (7, 30)):
            memory = torch.arange(64.0).sin()
            weight = torch.eye(4, requires_grad=True)
            x, y = (memory[i : i + 4 * rows].view(rows, 4) for i in (0, begin))
            out = compiled(x, y, weight)
            backward_inside(out.float().square().sum(), True)
            found += [out, memory, weight.grad]
        return found

    assert_same_bits(run(**AOT_EAGER), run(**ORACLE))
