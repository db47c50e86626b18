"""Kernels of Inductor's that are put right, and what AOTAutograd makes of ops for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from autocast_backend._torch.lowerings import _gradient_of_threshold
from tests.forked import forked, printed
from tests.support import assert_same_bits, weighted_sum

WAYS: list[dict[str, Any]] = [
    {"backend": "smart_autocast"},
    {"backend": "smart_autocast", "options": {"inner": "aot_eager"}},
]


@pytest.mark.parametrize(
    "way",
    [pytest.param(WAYS[0], marks=pytest.mark.slow), WAYS[1]],
    ids=["inductor", "aot_eager"],
)
def test_the_gradient_of_average_pooling_whose_last_window_stands_out(way: dict[str, Any]) -> None:
    def pools(x: torch.Tensor) -> list[torch.Tensor]:
        images, volumes = x[None], x[None, :, :, :5, None].expand(-1, -1, -1, -1, 3)
        return [
            F.avg_pool1d(x[0], 3, 2, ceil_mode=True),
            F.avg_pool2d(images, 2, 2, ceil_mode=True),
            F.avg_pool2d(images, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            F.avg_pool3d(volumes, 2, 2, ceil_mode=True),
        ]

    def gradient(function: Callable[..., Any]) -> torch.Tensor:
        x = torch.randn(2, 7, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return torch.autograd.grad(weighted_sum(function(x)), x)[0]

    torch._dynamo.reset()
    torch.testing.assert_close(gradient(torch.compile(pools, **way)), gradient(pools))


def test_the_least_and_the_largest_of_bytes() -> None:
    def extremes(low: torch.Tensor, high: torch.Tensor) -> Any:
        return (
            [low.amax(1), low.max(), low.argmax(), low.max(1), low.argmax(1)],
            [high.amin(1), high.min(), high.argmin(), high.min(1), torch.aminmax(high)],
        )

    numbers = torch.arange(2, 72).repeat(5, 1)
    low, high = (-numbers).to(torch.int8), numbers.to(torch.uint8)
    torch._dynamo.reset()
    assert_same_bits(
        torch.compile(extremes, backend="smart_autocast")(low, high), extremes(low, high)
    )


def test_indices_of_the_least_and_the_largest_of_bools() -> None:
    def extremes(*masks: torch.Tensor) -> list[Any]:
        return [least(i) for x in masks for least in (x.min, x.max) for i in (0, 1)]

    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(n, 32, generator=generator) < 0.5 for n in (1, 2, 5)]
    torch._dynamo.reset()
    assert_same_bits(torch.compile(extremes, backend="smart_autocast")(*masks), extremes(*masks))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("way", WAYS, ids=["inductor", "aot_eager"])
def test_multilabel_margins_where_targets_end_early(way: dict[str, Any], reduction: str) -> None:
    targets = torch.tensor([[3, 0, -1, 1], [1, -1, 2, 3], [0, 1, 2, 3], [-1, 0, 0, 0]])

    def losses(x: torch.Tensor) -> list[torch.Tensor]:
        loss = torch.nn.MultiLabelMarginLoss(reduction=reduction)
        return [loss(x, targets), loss(x[0], targets[0])]

    def results(function: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.arange(-5.0, 11).view(4, 4).div(4).requires_grad_()
        found = function(x)
        return [*found, *torch.autograd.grad(weighted_sum(found), x)]

    torch._dynamo.reset()
    torch.testing.assert_close(results(torch.compile(losses, **way)), results(losses))


@pytest.mark.parametrize("way", WAYS, ids=["inductor", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_gradients_of_margins_of_zero(dynamic: bool, way: dict[str, Any]) -> None:
    targets = torch.tensor([0, 5, 2, 1, 1])

    def losses(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.multi_margin_loss(x, targets, p=p, reduction="none") for p in (1, 2)]

    def gradients(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        x = torch.arange(-12.0, 18).view(5, 6).div(4).requires_grad_()
        return torch.autograd.grad(weighted_sum(function(x)), x)

    torch._dynamo.reset()
    compiled = torch.compile(losses, **way, dynamic=dynamic)
    torch.testing.assert_close(gradients(compiled), gradients(losses))


@pytest.mark.parametrize("way", WAYS, ids=["inductor", "aot_eager"])
def test_shrinkage_of_nan(way: dict[str, Any]) -> None:
    def shrunk(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.softshrink(x, 0.5), F.hardshrink(x, 0.5)]

    def results(function: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.tensor([float("nan"), 0.2, 3.0, -0.5] * 8, requires_grad=True)
        found = function(x)
        return [*found, *torch.autograd.grad(weighted_sum(found), x)]

    torch._dynamo.reset()
    assert_same_bits(results(torch.compile(shrunk, **way)), results(shrunk))


def test_gradients_at_a_threshold_that_is_rounded() -> None:
    """The bfloat16 next to a tenth is above it."""
    inputs = [
        torch.full((40,), 0.1, dtype=dtype, requires_grad=True)
        for dtype in (torch.bfloat16, torch.float16)
    ]

    def above(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [F.threshold(x, 0.1, 0.0), F.threshold(y, 0.1, 0.0)]

    def gradients(function: Callable[..., list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(weighted_sum(function(*inputs)), inputs)

    torch._dynamo.reset()
    compiled = torch.compile(above, backend="smart_autocast")
    assert_same_bits(gradients(compiled), gradients(above))


def test_thresholds_of_gpus_are_rounded() -> None:
    """The CPU's kernels compare in float32, those of GPUs in the dtype of the tensor."""

    def compared(upstream: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.dtype:
        return x.dtype

    with FakeTensorMode():
        for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
            x = torch.empty(4, dtype=torch.bfloat16, device=device)
            assert _gradient_of_threshold(compared, x, x, 0.1) is dtype


@pytest.mark.parametrize("way", WAYS, ids=["inductor", "aot_eager"])
@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_returns_what_it_is_given(
    p: float, training: bool, way: dict[str, Any]
) -> None:
    def adds(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, p, training)
        y += 1
        return x + y

    torch._dynamo.reset()
    x = torch.zeros(3)
    assert torch.compile(adds, **way)(x).tolist() == [2.0] * 3
    assert x.tolist() == [1.0] * 3


@pytest.mark.slow
def test_instance_norm_of_one_image_before_weights_in_channels_last() -> None:
    """Of which eager mode's gradient is another one than that of the same weights, contiguous."""
    net = torch.nn.Sequential(torch.nn.InstanceNorm2d(8), torch.nn.Conv2d(8, 8, 1))
    x = torch.randn(1, 8, 6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(weighted_sum([net(x)]), x)
    net.to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="smart_autocast")
    (found,) = torch.autograd.grad(weighted_sum([compiled(x)]), x)
    torch.testing.assert_close(found, expected)


def test_functions_of_one_number_for_many() -> None:
    """Kernels with vectors have scalars, too; with stock as well, once it has met ours."""

    def functions(rows: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.expm1(rows)[:, None] + x,
            torch.atanh(rows)[:, None] * x,
            F.elu(x.mean(-1, keepdim=True)) * x,
            torch.addcmul(rows, rows, rows)[:, None] * x,
        ]

    rows, x = torch.linspace(-0.9, 0.9, 32), torch.linspace(-3, 3, 2048).view(32, 64)
    for backend in ("smart_autocast", "inductor"):
        torch._dynamo.reset()
        found = torch.compile(functions, backend=backend)(rows, x)
        torch.testing.assert_close(found, functions(rows, x))


def test_interpolation_of_images_to_what_has_fewer_dimensions() -> None:
    x = torch.linspace(-3, 3, 384).view(2, 3, 8, 8).to(memory_format=torch.channels_last)
    ends = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor(0.3)

    def between(x: torch.Tensor, *ends: torch.Tensor) -> list[torch.Tensor]:
        return [torch.lerp(x, end, 0.3) for end in ends]

    torch._dynamo.reset()
    found = torch.compile(between, backend="smart_autocast")(x, *ends)
    assert_same_bits(found, between(x, *ends))


def test_what_stock_makes_is_what_it_was() -> None:
    """Of ops for whose operands it asks no layout, and of which ours are left to ATen."""
    program = """
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

def code(function, *args):
    torch._dynamo.reset()
    def run():
        results = torch.compile(function)(*args)
        if results.requires_grad:
            results.sum().backward()
    return [c.partition(chr(10))[2] for c in run_and_get_code(run)[1]]  # but a number

def codes():
    x, low = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32).bfloat16()
    signs, indices, y = low.sign().float(), torch.tensor([0, 3]), torch.randn(2, 64).bfloat16()
    losses = torch.nn.functional.soft_margin_loss
    return [
        code(lambda: (low * 2).t().index_add(0, indices, y)),
        code(lambda: losses((x * 2).t(), signs.t())),
    ]

config.force_disable_caches = True
before = codes()
torch.compile(torch.cos, backend="smart_autocast")(torch.ones(3))
print(codes() == before, [len(c) for c in before])
"""
    with forked("import torch._inductor.compile_fx") as run:
        assert printed(run(program)) == "True [1, 2]\n"


def test_index_ops_on_what_is_expanded() -> None:
    def adds(rows: torch.Tensor) -> list[torch.Tensor]:
        zeros, places = torch.zeros(1, 4).expand(4, -1), torch.tensor([0, 2])
        return [zeros.index_add(0, places, rows), zeros.index_copy(0, places, rows)]

    torch._dynamo.reset()
    rows = torch.arange(8.0).view(2, 4)
    assert_same_bits(torch.compile(adds, backend="smart_autocast")(rows), adds(rows))


def rewritten(x: torch.Tensor, numbers: torch.Tensor, bytes_: torch.Tensor) -> list[torch.Tensor]:
    """What Inductor writes in other words."""
    ones = torch.ones(2, 4, dtype=torch.bool, device=x.device)
    return [
        x * 0,
        1 + 0 * x.sum(),
        F.softshrink(x),
        x[None, 3:] + ones.cumsum(1, dtype=torch.bfloat16)[:, :1],
        numbers[:, None] @ numbers[..., None].expand(-1, -1, 3),
        torch.addmm(x[:1, None], x[None, 3:], x[3:, None], beta=0),
        torch.arange(11) * 10**9 + numbers[0, 0],
        bytes_.any(),
        bytes_.any(1),
        torch.ldexp(x.half(), x),
        torch.ldexp(bytes_, x[:, None]),
    ]


def test_what_inductor_writes_in_other_words() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), 2.0, -3.0])
    inputs = x, torch.arange(8, dtype=torch.int32).view(2, 4), torch.ones(5, 20, dtype=torch.uint8)
    torch._dynamo.reset()
    assert_same_bits(
        torch.compile(rewritten, backend="smart_autocast")(*inputs), rewritten(*inputs)
    )


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def divided(*inputs: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for x in inputs:
        results += [x // y for y in (0.1, -0.3, 0.0)] + [x[:3] // x.new_tensor([0.0, -0.5, 1e30])]
        results += [torch.remainder(x, 0.1), torch.remainder(1.7, x), torch.remainder(x, x.flip(0))]
        results += [x.fmod(0.1), x + 0.1, 0.1 - x, x * 0.1, x / 0.1]
        results += [0.1 // x, x.new_tensor(0.1, dtype=torch.float32) // x]
        results += [x // (x.flip(0) / 3), (x * 20) // x.flip(0)]
        results += [torch.remainder(x, x.new_tensor(0.1, dtype=torch.float32))]
    whole = inputs[0].nan_to_num(0, 0).long()
    return [*results, whole // 3, whole % 1.5, whole // 1.5]


def test_floor_division_and_remainders() -> None:
    """Quotients that are close to integers, and numbers that are between those of a dtype."""
    of_floats = [(torch.arange(1, 200) * 0.1).to(dtype) for dtype in FLOATS]
    inputs = [torch.cat([x, -x, x.new_tensor([float("inf"), float("nan")])]) for x in of_floats]
    torch._dynamo.reset()
    found = torch.compile(divided, backend="smart_autocast")(*inputs)
    assert_same_bits(found, divided(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_by_a_number_of_low_precision(dtype: torch.dtype) -> None:
    """They are rounded to its dtype, or infinite in that."""

    def results(i: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [i * x, i / x, x * i, x / i, i + x, (i > 300) * x, y * i.sum(), y / i[0]]

    numbers = torch.tensor([0.3, 0.7]).to(dtype)
    inputs = torch.tensor([257, 771, 100_000]), numbers[0], numbers
    torch._dynamo.reset()
    found = torch.compile(results, backend="smart_autocast")(*inputs)
    assert_same_bits(found, results(*inputs))


def test_floor_division_by_numbers_that_change() -> None:
    """And by sizes."""

    def parts(x: torch.Tensor, by: float) -> list[torch.Tensor]:
        n = len(x)
        return [x // by, x % by, by // x, by % x, x // n, x % n, n // x, n % x]

    torch._dynamo.reset()
    compiled = torch.compile(parts, backend="smart_autocast")
    for n, by in ((30, 0.1), (40, 0.7), (50, -0.3)):
        x = torch.arange(1, n) * 0.1
        assert_same_bits(compiled(x, by), parts(x, by))


def test_division_of_what_inductor_knows_bounds_of() -> None:
    """Indices: of them it asked for the bounds of comparisons, and of these there are none."""

    def wavelengths(x: torch.Tensor) -> list[torch.Tensor]:
        i = torch.arange(-4, 4, dtype=torch.float32)
        return [x ** (i // 2), x + torch.div(i, 3, rounding_mode="floor"), x + i % 3, x // i]

    x = torch.linspace(0.5, 9, 16)[:, None]
    torch._dynamo.reset()
    assert_same_bits(torch.compile(wavelengths, backend="smart_autocast")(x), wavelengths(x))


@pytest.mark.parametrize(
    "inductor",
    [
        pytest.param({}, id="kernels alone"),
        pytest.param(
            {"cpp_wrapper": True, "cpp_wrapper_build_separate": True},
            id="with their wrapper",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kernels_that_turn_many_tensors(inductor: dict[str, Any]) -> None:
    """With AVX-512, GCC 12.2 made nearly all numbers of three and more in one kernel others."""

    def turned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        columns = [x.t().contiguous().float() for x in tensors]
        return columns + [x.t().contiguous() for x in columns]

    numbers = torch.arange(4.0 * 64 * 256).view(4, 64, 256)
    tensors = [*numbers.bfloat16(), *numbers.half()]
    torch._dynamo.reset()
    options = {"inductor": inductor}
    found = torch.compile(turned, backend="smart_autocast", options=options)(tensors)
    assert_same_bits(found, turned(tensors))


def test_equal_sums() -> None:
    """The C++ compiler refused two of bfloat16 in one kernel, of which each is a gradient."""

    def added(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (x + one) + (x + other)

    def gradients(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        one, other = (torch.ones(64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        numbers = torch.arange(32 * 64.0).view(32, 64).bfloat16()
        return torch.autograd.grad((function(numbers, one, other) * numbers).sum(), (one, other))

    torch._dynamo.reset()
    compiled = torch.compile(added, backend="smart_autocast")
    torch.testing.assert_close(gradients(compiled), gradients(added))


def test_what_is_repeated_and_turned_around_in_sizes_that_change() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave((x + 1).flatten(), 2).flip(0)

    torch._dynamo.reset()
    compiled = torch.compile(turned, backend="smart_autocast", dynamic=True)
    for size in (2, 4):
        x = torch.arange(float(size**2)).view(size, size)
        assert_same_bits(compiled(x), turned(x))


OF_THE_LAST_VECTOR = """
import torch
import torch.nn.functional as F

def multiplied(x):
    gelu = x * 0.5 * (torch.erf(x * 0.7) + 1)
    rows, columns = gelu, gelu.permute(3, 2, 1, 0)
    return torch.matmul(F.pad(rows, (0, 0, 0, 0, 0, 26)), F.pad(columns, (0, 0, 0, 26)))

x = torch.randn(1, 8, 34, 34).contiguous(memory_format=torch.channels_last)
torch.testing.assert_close(torch.compile(multiplied, backend="smart_autocast")(x), multiplied(x))
print("right")
"""

OF_BOOLS = """
import torch

def added(x, y):
    twice = torch.add(x, y, alpha=2), torch.add(x[:, None], y, alpha=-1), torch.add(x, 1, alpha=2)
    return *twice, torch.add(x, y, alpha=0), torch.add(x, True, alpha=2), torch.add(x, y)

x, y = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
for found, expected in zip(torch.compile(added, backend="smart_autocast")(x, y), added(x, y)):
    torch.testing.assert_close(found, expected)
print("right")
"""


@pytest.mark.parametrize("program", [OF_THE_LAST_VECTOR, OF_BOOLS], ids=["last vector", "bools"])
def test_sums_are_stored_where_they_belong(program: str) -> None:
    """What did not, was stored behind the end of the memory."""
    with forked("import torch, autocast_backend") as run:
        assert printed(run(program)) == "right\n"


@pytest.mark.parametrize(
    ("way", "dynamic"),
    [(WAYS[0], False), (WAYS[1], False), (WAYS[1], True)],
    ids=["inductor", "aot_eager", "aot_eager-dynamic"],
)
def test_interpolation_along_dimensions_that_stay_as_they_are(
    way: dict[str, Any], dynamic: bool
) -> None:
    def scaled(x: torch.Tensor) -> list[torch.Tensor]:
        scale: dict[str, Any] = {"scale_factor": (1.3, 1.5)}
        return [
            F.interpolate(x, **scale),
            F.interpolate(x, **scale, mode="bilinear"),
            F.interpolate(x, **scale, mode="bilinear", align_corners=True),
            F.interpolate(x[0], scale_factor=1.3, mode="linear"),
            F.interpolate(x[None], scale_factor=(2.0, 1.3, 1.5), mode="trilinear"),
        ]

    def results(function: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.arange(12.0).view(1, 2, 2, 3).square().requires_grad_()
        found = function(x)
        return [*found, *torch.autograd.grad(weighted_sum(found), x)]

    torch._dynamo.reset()
    found = results(torch.compile(scaled, dynamic=dynamic, **way))
    torch.testing.assert_close(found, results(scaled))
