"""One compilation for many sizes, and one backward variant for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.aot.harness import (
    AOT_EAGER,
    ORACLE,
    WAYS,
    autocast,
    backward_inside,
    inside_region,
    island,
    leaves,
    loss_of,
    same_bits,
)
from tests.support import BF16, assert_same_bits

SIZES = (3, 5, 9, 6)
BACKWARDS = (True, False, True, True)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(F.gelu(self.a(x)))
        return island(y, self.b.weight), x.shape[0] * y.mean(0)


class Reshapes(Mixed):
    """Sizes of the backward that no tensor of it has: products of dynamic sizes."""

    def forward(self, x: torch.Tensor) -> Any:
        rows, columns = x.shape
        y = island(self.a(x), self.b.weight).reshape(rows * 2, columns // 2)
        return y.t().reshape(-1, rows).softmax(-1), y.repeat(2, 1).view(rows, -1)


class Attends(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.norm(island(x, self.a.weight)).unflatten(-1, (2, 4)).transpose(0, 1)
        return self.b(F.scaled_dot_product_attention(q, q, q).transpose(0, 1).flatten(1))


class Scores(Mixed):
    """Both dimensions of a product are dynamic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = island(self.a(x).float(), x.t())
        return scores.softmax(-1) @ self.b(x)


MODELS = (Mixed, Reshapes, Attends, Scores)


def marked(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.mark_dynamic(x, 0)
    return x


def steps(
    make: Callable[[], nn.Module], way: str, backwards: Sequence[bool], **arguments: Any
) -> list[Any]:
    """Outputs and gradients for all sizes, of one compiled model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    function = inside_region(model) if way == "region" else model
    mark = way == "off"
    compiled = torch.compile(function, dynamic=None if mark else True, fullgraph=True, **arguments)
    found = []
    for size, inside in zip(SIZES, backwards, strict=True):
        x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size)).requires_grad_()
        model.zero_grad()
        with autocast(way == "ambient"):
            outputs = compiled(marked(x) if mark else x)
        backward_inside(loss_of(outputs), inside)
        found.append((outputs, x.grad, [p.grad for p in model.parameters()]))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MODELS)
def test_one_compilation_for_all_sizes(make: Callable[[], nn.Module], way: str) -> None:
    """With `dynamic=True`, and for "off" with a marked dimension."""
    counters = torch._dynamo.utils.counters
    expected = steps(make, way, BACKWARDS, **ORACLE)
    outside = steps(make, way, [False] * len(SIZES), **ORACLE)
    told = [not same_bits(a[1:], b[1:]) for a, b in zip(expected, outside, strict=True)]
    assert tuple(told) == BACKWARDS, "a model that cannot tell the states of a backward"
    counters["stats"].clear()
    counters["smart_autocast"].clear()
    actual = steps(make, way, BACKWARDS, **AOT_EAGER)
    for size, got, wanted in zip(SIZES, actual, expected, strict=True):
        assert_same_bits(got, wanted, f"{size} rows")
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["smart_autocast"]["backward_variants"] == 1


def interpolates(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.lerp(x, x * 2, weight.sum()) @ weight


def multiplies_in_numpy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return interpolates(torch.from_numpy(np.multiply(x.detach().numpy(), 2)), weight)


@pytest.mark.parametrize("option", ["region", "autocast", "policies"])
@pytest.mark.parametrize("function", [interpolates, multiplies_in_numpy])
def test_an_op_whose_kernel_takes_no_symbols(function: Any, option: str) -> None:
    """`torch.lerp` with a tensor without dimensions for its weight: where example values are made
    anew, the graph runs on symbolic sizes."""

    options: dict[str, Any] = {"inner": "aot_eager"}
    region = inside_region(function)
    if option == "autocast":
        options["autocast"], region = BF16, function
    elif option == "policies":
        options["policies"] = {"op": {"aten::matmul": "lower_precision_fp"}}
    compiled = torch.compile(region, dynamic=True, backend="smart_autocast", options=options)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with autocast(True):
        expected = function(x, weight)
    assert_same_bits(compiled(x, weight), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_an_opened_kernel_that_takes_no_symbols(masked: bool) -> None:
    """The fast path of a transformer layer: each size has a graph of its own."""
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    compiled = torch.compile(layer, dynamic=True, **AOT_EAGER)
    with torch.no_grad(), autocast(True):
        for size in SIZES:
            x = torch.randn(size, 4, 8)
            mask = torch.arange(4).expand(size, 4) > 2 if masked else None
            expected = layer(x, src_key_padding_mask=mask)
            assert_same_bits(compiled(x, src_key_padding_mask=mask), expected, f"{size} rows")


class Norms(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x), self.norm(x)], -1)


def breaks(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return x + 1


def test_a_float_that_became_a_constant_stays_one() -> None:
    """The epsilon of a norm does, and Dynamo forgets that where it analyses another function twice,
    as it does for a graph break."""

    def step(compile: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, last = Norms(), breaks
        if compile:
            model.compile(dynamic=True, **AOT_EAGER)
            last = torch.compile(last, dynamic=True, **AOT_EAGER)
        x = torch.randn(5, 8)
        with autocast(True):
            with torch.no_grad():  # compiled again with its casts outside, at the second call
                evaluated = [last(model(x)), model(x)]
            loss_of(last(model(x))).backward()  # a variant
        return [*evaluated, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert_same_bits(step(compile=True), step(compile=False))


def scaled(x: torch.Tensor, w: torch.Tensor, number: float) -> Any:
    return torch.softmax(x @ w * number, -1) + island(x, w) * number, x.sin() + number


def scaled_in_place(x: torch.Tensor, w: torch.Tensor, number: float) -> Any:
    y = x @ w
    return y.mul_(number).sin() @ w.to(y.dtype)


def clipped(x: torch.Tensor, w: torch.Tensor, number: float) -> Any:
    """Where `clamp` reads the number, it becomes a constant, and nowhere else."""
    return (x @ w).clamp(-number, number) * number, island(x, w) * (1 + number)


def interpolated(x: torch.Tensor, w: torch.Tensor, number: float) -> Any:
    """Where the backward of `lerp` is traced, the number becomes a constant."""
    return torch.lerp((x @ w).float(), x, number) + max(number, 0.6)


CHANGED = [scaled, scaled_in_place, clipped, interpolated]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", CHANGED)
def test_a_number_that_changes_while_training(function: Any, way: str) -> None:
    """PyTorch writes the calls that read it anew, as ones that read a tensor, and gives these no
    tag that says whether they are the forward's."""

    def gradients(**arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        compiled = torch.compile(
            inside_region(function) if way == "region" else function, **arguments
        )
        found: list[Any] = []
        for number, inside in zip((0.3, 0.5, 0.7, 0.9), BACKWARDS, strict=True):
            given = leaves()
            with autocast(way == "ambient"):
                outputs = compiled(*given, number)
            backward_inside(loss_of(outputs), inside)
            found.append((outputs, [leaf.grad for leaf in given]))
        return found

    assert_same_bits(gradients(**AOT_EAGER), gradients(**ORACLE))


@pytest.mark.parametrize("function", CHANGED)
def test_a_number_that_changes_between_calls_of_a_scope(function: Any) -> None:
    """The second call of each scope is that of a graph compiled again."""

    def outputs(**arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        compiled = torch.compile(function, **arguments)
        given, found = leaves(), []
        for number in (0.3, 0.5, 0.7):
            with torch.no_grad(), autocast(True):
                found += [compiled(*given, number) for _ in range(2)]
        return found

    assert_same_bits(outputs(**AOT_EAGER), outputs(**ORACLE))


def test_a_hook_on_a_tensor_of_a_dynamic_size() -> None:
    """Dynamo of torch 2.11 writes inputs for the sizes where the hook stands, after other calls."""

    class Hooked(Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            y.register_hook(lambda grad: grad * 0.5)
            return y.sin()

    def step(compile: bool) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Hooked()
        if compile:
            model.compile(dynamic=True, **AOT_EAGER)
        outputs = []
        with autocast(True):
            for size in SIZES:
                outputs.append(model(torch.randn(size, 8)))
                loss_of(outputs[-1]).backward()
        return [*outputs, model.a.weight.grad, model.a.bias.grad]

    assert_same_bits(step(compile=True), step(compile=False))


@pytest.mark.parametrize("ambient", [False, True])
def test_a_size_that_several_calls_give(ambient: bool) -> None:
    """Which of the forward's calls stands for it in a joint graph is another one in the first trace
    than in later ones."""

    class WritesToAView(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            z = y.view(-1)
            z.mul_(0.5)
            return z.view_as(y)

    def gradients(**arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = WritesToAView()
        compiled = torch.compile(model, dynamic=True, **arguments)
        for size in ((2, 8, 3), (3, 8, 5)):
            x = torch.randn(*size).transpose(1, 2)
            with autocast(ambient):
                y = compiled(x)
            backward_inside(loss_of(y), True)
        return [p.grad for p in model.parameters()]

    assert_same_bits(gradients(**AOT_EAGER), gradients(**ORACLE))
