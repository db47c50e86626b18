"""What fake tensors predict, where the kernels of the CPU give something else."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autocast_backend._torch.flags import predicting
from autocast_backend._torch.predictions import kernels_predicted
from tests.support import BF16, assert_same_bits, weighted_sum

aten = torch.ops.aten

EXACT = [
    {"backend": "smart_autocast", "options": {"inner": "aot_eager"}},
    {"backend": "smart_autocast", "mode": "lite"},
]


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a shape: with their dimensions in every order, expanded, sliced."""
    n = len(shape)
    a = torch.rand(shape).to(dtype)
    found = {}
    for order in itertools.permutations(range(n)):
        back = [order.index(i) for i in range(n)]
        found[f"in order {order}"] = a.permute(order).contiguous().permute(back)
    for dim in range(n):
        found[f"expanded along {dim}"] = a.narrow(dim, 0, 1).contiguous().expand(shape)
    found["sliced"] = torch.cat([a, a], 1)[:, : shape[1]]
    return found


def layer_norm_backward(g: Tensor, x: Tensor) -> Tensor:
    last = list(x.shape[-1:])
    _, mean, rstd = aten.native_layer_norm(x, last, None, None, 1e-5)
    mask = [True, False, False]
    return aten.native_layer_norm_backward(g, x, last, mean, rstd, None, None, mask)[0]


def batch_norm(g: Tensor, x: Tensor) -> Tensor:
    return aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0]


def batch_norm_backward(g: Tensor, x: Tensor) -> Tensor:
    _, mean, rstd = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    mask = [True, False, False]
    return aten.native_batch_norm_backward(g, x, None, None, None, mean, rstd, True, 1e-5, mask)[0]


def batch_norm_backward_of_another(g: Tensor, x: Tensor) -> Tensor:
    mean, variance = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    w = torch.ones(x.shape[1])
    _, *saved, reserve = aten._batch_norm_with_update(x, w, w, mean, variance, 0.1, 1e-5)
    mask = [True, False, False]
    return aten.batch_norm_backward(g, x, w, mean, variance, *saved, True, 1e-5, mask, reserve)[0]


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "add of a wider dtype": lambda g, x: g + x.float(),
    "atan2": torch.atan2,
    "batch_norm": batch_norm,
    "batch_norm_backward": batch_norm_backward,
    "batch_norm_backward of another op": batch_norm_backward_of_another,
    "binary_cross_entropy": lambda g, x: aten.binary_cross_entropy(g, x, None, 0),
    "binary_cross_entropy_backward": lambda g, x: aten.binary_cross_entropy_backward(
        g, x, g, None, 0
    ),
    "elu_backward": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "hardsigmoid_backward": aten.hardsigmoid_backward,
    "hardswish_backward": aten.hardswish_backward,
    "hardtanh_backward": lambda g, x: aten.hardtanh_backward(g, x, 0.0, 0.5),
    "huber_loss": lambda g, x: aten.huber_loss(g, x, 0),
    "huber_loss_backward": lambda g, x: aten.huber_loss_backward(g, x, g, 0, 1.0),
    "layer_norm_backward": layer_norm_backward,
    "leaky_relu_backward": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "log_sigmoid_backward": lambda g, x: aten.log_sigmoid_backward(g, x, torch.empty_like(g)),
    "log_sigmoid_forward": lambda g, x: aten.log_sigmoid_forward(x)[0],
    "log_softmax_backward": lambda g, x: aten._log_softmax_backward_data(g, x, 1, x.dtype),
    "masked_fill": lambda g, x: g.masked_fill(x > 0.5, 0.0),
    "mish_backward": aten.mish_backward,
    "mse_loss": lambda g, x: aten.mse_loss(g, x, 0),
    "mse_loss_backward": lambda g, x: aten.mse_loss_backward(g, x, g, 0),
    "mul by a condition": lambda g, x: g * (x > 0.5),
    "pow of a number": lambda g, x: 2**x,
    "smooth_l1_loss": lambda g, x: aten.smooth_l1_loss(g, x, 0),
    "smooth_l1_loss_backward": lambda g, x: aten.smooth_l1_loss_backward(g, x, g, 0, 1.0),
    "softplus_backward": lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0),
    "threshold_backward": lambda g, x: aten.threshold_backward(g, x, 0.5),
    "where": lambda g, x: torch.where(x > 0.5, g, x),
    "xlogy": torch.xlogy,
}
PADS = [1, 1, 1, 1]
OF_IMAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "channel_shuffle": lambda g, x: aten.channel_shuffle(x, 3),
    "max_unpool2d": lambda g, x: aten.max_unpool2d(
        x, torch.zeros_like(g, dtype=torch.int64), [8, 9]
    ),
    "reflection_pad2d_backward": lambda g, x: aten.reflection_pad2d_backward(
        aten.reflection_pad2d(g, PADS), x, PADS
    ),
    "replication_pad2d_backward": lambda g, x: aten.replication_pad2d_backward(
        aten.replication_pad2d(g, PADS), x, PADS
    ),
}
RIGHT_WITHOUT = {"add of a wider dtype", "masked_fill", "where"}
if torch.__version__ >= "2.14":
    RIGHT_WITHOUT |= {"max_unpool2d"}


def predicted(op: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> list[int]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return strides(op(mode.from_tensor(a), mode.from_tensor(b)))


def strides(a: Tensor) -> list[int]:
    return [stride for stride, size in zip(a.stride(), a.shape, strict=True) if size > 1]


@pytest.mark.parametrize("name", [*OPS, *OF_IMAGES])
def test_strides(name: str) -> None:
    op = {**OPS, **OF_IMAGES}[name]
    shapes = {(3, 4): 1, (2, 3, 4): 7, (2, 3, 4, 5): 61}
    if name in OF_IMAGES:
        shapes = {(2, 3, 4, 5): 7}
    stock_is_wrong = False
    for dtype, (shape, step) in itertools.product([torch.float32, torch.bfloat16], shapes.items()):
        found = layouts(shape, dtype)
        for one, other in list(itertools.product(found, found))[::step]:
            a, b = found[one], found[other]
            expected = strides(op(a, b))
            stock_is_wrong |= predicted(op, a, b) != expected
            with kernels_predicted():
                assert predicted(op, a, b) == expected, (shape, dtype, one, other)
    assert stock_is_wrong == (name not in RIGHT_WITHOUT)


def norms(x: Tensor, weight: Tensor | None, running: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """What norms of (2, 4, 4) return, each of them."""
    yield aten.native_layer_norm(x, [4], weight, weight, 1e-5)
    yield aten.native_group_norm(x, weight, weight, 2, 4, 4, 2, 1e-5)
    yield aten.native_batch_norm(x, weight, weight, running, running, True, 0.1, 1e-5)
    if running is not None:
        yield aten._native_batch_norm_legit_functional(
            x, weight, weight, running, running, True, 0.1, 1e-5
        )
        yield aten._native_batch_norm_legit_no_training(
            x, weight, weight, running, running, 0.1, 1e-5
        )


@pytest.mark.parametrize("weight", [None, torch.float32, torch.bfloat16])
def test_statistics(weight: torch.dtype | None) -> None:
    x = torch.randn(2, 4, 4, dtype=torch.bfloat16)
    w = None if weight is None else torch.rand(4, dtype=weight)
    for running in [None, torch.rand(4, dtype=weight or torch.float32)]:
        expected = [[a.dtype for a in returned[:3]] for returned in norms(x, w, running)]
        with kernels_predicted(), FakeTensorMode() as mode:
            fakes = [None if a is None else mode.from_tensor(a) for a in (x, w, running)]
            assert [[a.dtype for a in returned[:3]] for returned in norms(*fakes)] == expected


class Normalized(nn.Module):
    """Batch norm over features that come last, as sequence models have them."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(self.activation(h))


class Gated(nn.Module):
    """A sum of what is expanded and what is transposed, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate, self.last = nn.Conv1d(8, 8, 1), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.last(self.gate(h.mean(1, keepdim=True)).expand_as(h) + h)


class Windows(Gated):
    """What is contiguous, read in another way."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.transpose(1, 2)).transpose(1, 2)
        h = (self.gate(h.mean(1, keepdim=True)).expand_as(h) + h).contiguous()
        return h.as_strided((len(x), x.shape[1] - 1, 16), (x.shape[1] * 8, 8, 1))


class Image(nn.Module):
    """A convolution that Inductor would run in channels_last."""

    def __init__(self, normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.normalize = nn.Conv2d(3, 8, 3, padding=1), normalize

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.normalize(self.conv(x)))


class ChannelsLast(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Attended(nn.Module):
    """Pixels as a sequence and back. Of one image, the strides of the first dimension tell that it
    is not in channels_last."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.project, self.norm = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        pixels = self.project(h.flatten(2).transpose(1, 2))
        return self.norm(pixels.transpose(1, 2).view(h.shape) + h)


SEQUENCE, IMAGE = (4, 5, 8), (2, 3, 6, 6)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    # what stock raises with aot_eager; nothing, where it gives other numbers, or only lite raises
    "batch_norm": (lambda: Normalized(F.relu), SEQUENCE, "view size is not compatible"),
    "hardswish": (lambda: Normalized(F.hardswish), SEQUENCE, "view size is not compatible"),
    "log_softmax": (lambda: Normalized(nn.LogSoftmax(1)), SEQUENCE, "view size is not compatible"),
    "evaluation": (lambda: Normalized(F.relu).eval(), SEQUENCE, "view size is not compatible"),
    "gated": (Gated, SEQUENCE, "view size is not compatible"),
    "windows": (Windows, SEQUENCE, ""),
    "convolution and batch_norm": (lambda: Image(nn.BatchNorm2d(8)), IMAGE, ""),
    "attention and group_norm": (
        lambda: Attended(nn.GroupNorm(4, 8)),
        (1, 3, 6, 6),
        "Expected X.is_contiguous" if torch.__version__ < "2.14" else "",
    ),
    "convolution and layer_norm": (lambda: Image(ChannelsLast(8)), IMAGE, ""),
}


def trained(model: nn.Module, shape: tuple[int, ...], **arguments: Any) -> list[Tensor]:
    torch._dynamo.reset()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast(**BF16):
        y = torch.compile(model, **arguments)(x)
    return [y, *torch.autograd.grad(weighted_sum([y]), [x, *model.parameters()], allow_unused=True)]


@pytest.mark.parametrize("exact", EXACT, ids=["aot_eager", "lite"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, exact: dict[str, Any]) -> None:
    make, shape, _ = MODELS[name]
    model = make()
    results = [trained(copy.deepcopy(model), shape, **a) for a in (exact, {"backend": "eager"})]
    assert_same_bits(*results)
    assert results[0][0].stride() == results[1][0].stride()


@pytest.mark.parametrize("name", [name for name, (*_, raised) in MODELS.items() if raised])
def test_stock_raises(name: str) -> None:
    make, shape, raised = MODELS[name]
    with pytest.raises(RuntimeError, match=raised):
        trained(make(), shape, backend="aot_eager")


def test_sizes_that_change() -> None:
    for make, shape, _ in (MODELS[n] for n in ("batch_norm", "gated", "attention and group_norm")):
        model = make()
        expected = trained(copy.deepcopy(model), shape, backend="eager")
        assert_same_bits(trained(model, shape, dynamic=True, **EXACT[0]), expected)


def test_ops_that_predict_for_another_are_left_as_they_are() -> None:
    """What they find, the cache of all threads keeps."""
    seen = []

    @torch.library.custom_op("predictions_test::copied", mutates_args=())
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    @copied.register_fake
    def _(x: Tensor) -> Tensor:
        seen.append(predicting.on)
        return torch.empty_like(x)

    with kernels_predicted(), FakeTensorMode() as mode:
        copied(mode.from_tensor(torch.ones(2)))
        assert predicting.on
    assert seen == [False]
