"""Inductor rounds to bfloat16 and float16 where eager mode does, inside of its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.aot.test_predictions import Attended
from tests.support import BF16, assert_same_bits

Chain = Callable[[Tensor, Tensor, Tensor], Tensor]
FEW: dict[str, Chain] = {
    "gated": lambda x, w, v: F.silu(x @ w) * (x @ v),
    "residual": lambda x, w, v: x.bfloat16() + F.relu(x @ w) * 0.3 - (x @ v),
    "a cast and back": lambda x, w, v: x.bfloat16().float() * 3 + 1,
    "softmax": lambda x, w, v: F.softmax(x @ w, -1) * 1.3,
    "scaled softmax": lambda x, w, v: F.softmax((x @ w) @ (x @ v).t() / 3.3, -1) @ (x @ w),
    "layer norm": lambda x, w, v: F.layer_norm(x @ w, (64,), v[0], v[1]) * 1.3,
    "layer norm without autocast": lambda x, w, v: (
        F.layer_norm(x.bfloat16() * 0.9, (64,), v[0], v[1]) * x.bfloat16()
    ),
    "batch norm": lambda x, w, v: F.batch_norm(x @ w, None, None, v[0], v[1], True) * x,
}


def losses(x: Tensor, target: Tensor, *functions: Callable[..., Tensor]) -> Tensor:
    """Without autocast, in the dtype of x."""
    with torch.autocast("cpu", enabled=False):
        return torch.cat([f(x, target, reduction="none") * 1.3 for f in functions])


MORE: dict[str, Chain] = {
    "two gates": lambda x, w, v: (x @ w).tanh() * (x @ v).sigmoid() + (x @ w) * 0.1,
    "float16": lambda x, w, v: (x.half() * 0.3 + 0.1) * x.half(),
    "numbers": lambda x, w, v: 1.7 / (x.bfloat16() * 1.1 * 0.9 + 0.3) - x.bfloat16() / 3.3,
    "alpha": lambda x, w, v: torch.add(x @ w, x @ v, alpha=0.3) * 1.3,
    "alpha of float32": lambda x, w, v: torch.add((x @ w) * 0.7, x, alpha=0.3),
    "whole numbers": lambda x, w, v: torch.add(x @ w, x @ v, alpha=1027) * 1027 - 1027,
    "a tensor without dimensions": lambda x, w, v: (x @ w) * v.mean() / v.std(),
    "constants without dimensions": lambda x, w, v: (
        torch.tensor(0.1) * (x @ w)
        + (torch.tensor(1001) - x @ v) / (x.bfloat16() + torch.tensor(9.1))
    ),
    "constants among others": lambda x, w, v: torch.logaddexp(
        torch.addcmul(x @ w, x @ v, torch.tensor(0.3)), torch.tensor(0.7)
    ),
    "constants among integers": lambda x, w, v: (
        (x * 9).int()
        + torch.tensor(0.1, dtype=torch.bfloat16)
        + torch.tensor(0.3, dtype=torch.bfloat16) / ((x > 0) + torch.tensor(0.7).bfloat16())
    ),
    "a tensor of one number": lambda x, w, v: (
        (x @ w) * torch.full((64,), 0.1, dtype=torch.bfloat16)
        + x.bfloat16().new_full((), 0.3) * x.bfloat16().fill_(0.7)
    ),
    "powers of a number": lambda x, w, v: 0.1 ** (x @ w) + 10_001 ** x.bfloat16().sigmoid(),
    "truncated": lambda x, w, v: torch.div(x @ w, 0.001, rounding_mode="trunc") + x.bfloat16(),
    "shrunk": lambda x, w, v: F.softshrink(x @ w, 0.1) * 1.3,
    "lists": lambda x, w, v: torch.cat(
        torch._foreach_add(torch._foreach_mul([x @ w, x @ v], 0.3), [x.bfloat16()] * 2)
    ),
    "sum": lambda x, w, v: ((x @ w) * 0.3).sum(1) + 0.1,
    "joined": lambda x, w, v: torch.cat([(x @ w) * 0.3, (x @ v) * 0.7]) * 1.3 + 1,
    "gated linear unit": lambda x, w, v: F.glu(x @ w) * (x @ v)[:, :32],
    "third power": lambda x, w, v: x.bfloat16() ** 3 * 1.3,
    "third power of float16": lambda x, w, v: x.half() ** 3 * 1.3,
    "inverse square": lambda x, w, v: (x.bfloat16().abs() + 0.5) ** -2 * 1.3,
    "power": lambda x, w, v: (x.bfloat16().abs() + 0.5) ** 1.7 * 1.3,
    "softmax across": lambda x, w, v: F.softmax(x.bfloat16()[:, :5] * 1.3, 0) * x.bfloat16()[:, :5],
    "a scaled product added": lambda x, w, v: (
        torch.addcmul(x @ w, x @ v, x.bfloat16(), value=0.3) * 1.3
    ),
    "between two by a tensor": lambda x, w, v: torch.lerp(x @ w, x @ v, (x @ w).sigmoid()) * 1.3,
    "a gate of float16": lambda x, w, v: (x.half() * 1.3).sigmoid() * 1.3,
    "max pooling": lambda x, w, v: F.max_pool2d((x @ w)[None] * 1.3, 3, 1) * 1.3,
    "average pooling": lambda x, w, v: F.avg_pool2d((x @ w)[None] * 1.3, 3, 2, 1) * 1.3,
    "sums by index": lambda x, w, v: (
        x.half().index_add(0, torch.arange(32) % 3, x.half() * 1.3, alpha=0.3) * 1.3
    ),
    "gathered": lambda x, w, v: (x @ w).gather(0, torch.arange(2048).view(32, 64) % 5) * 1.3,
    "scattered": lambda x, w, v: (
        (x @ w).scatter_add(0, torch.zeros(32, 64, dtype=torch.int64), (x @ v) * 1.3) * 1.3
    ),
    "embedding": lambda x, w, v: F.embedding(torch.arange(64) % 5, x.bfloat16() * 1.3) * w,
    "windows": lambda x, w, v: F.unfold((x @ w)[None, None] * 1.3, 3) * 1.3,
    "log softmax": lambda x, w, v: F.log_softmax(x @ w, -1) * 1.3,
    "log of sums": lambda x, w, v: torch.logsumexp(x @ w, -1) * 1.3,
    "logit": lambda x, w, v: torch.logit(x.bfloat16().sigmoid(), 1e-3) * 1.3,
    "x log a number": lambda x, w, v: torch.xlogy(x.bfloat16(), 1.7) * 1.3,
    "a number log x": lambda x, w, v: torch.xlogy(1.7, x.bfloat16().abs() + 0.1) * 1.3,
    "entropy": lambda x, w, v: torch.special.entr(x.bfloat16().sigmoid()) * 1.3,
    "losses": lambda x, w, v: losses(
        x.bfloat16(), w[:32].bfloat16() * 8, F.huber_loss, F.smooth_l1_loss, F.mse_loss
    ),
    "soft margins": lambda x, w, v: losses(
        x.bfloat16(), v[:32].bfloat16().sign().detach(), F.soft_margin_loss
    ),
    "labels": lambda x, w, v: losses(
        x.half() * 1.3, torch.arange(32), lambda x, target, reduction: F.nll_loss(x, target)[None]
    ),
    "cross-entropy": lambda x, w, v: losses(
        x.bfloat16().sigmoid(),
        w[:32].bfloat16().sigmoid().detach(),
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
    ),
    "x log y": lambda x, w, v: torch.xlogy(x.bfloat16(), x.bfloat16().abs() + 0.1) * 1.3,
    "outer product": lambda x, w, v: torch.addr(
        (x @ w)[:, :32], x[:, 0].bfloat16(), x.bfloat16()[:, 1], beta=0.7, alpha=0.6
    ),
    "cross product": lambda x, w, v: torch.linalg.cross((x @ w)[:, :3], (x @ v)[:, :3]) * 1.3,
    "group norm": lambda x, w, v: F.group_norm(x @ w, 8, v[0], v[1]) * x,
    "instance norm": lambda x, w, v: (
        F.instance_norm((x @ w).view(8, 4, 64), None, None, v[0, :4]) * x.view(8, 4, 64)
    ),
}


@functools.cache
def results(names: tuple[str, ...], how: str) -> dict[str, list[Tensor]]:
    """Of each chain its result and its gradients."""
    generator = torch.Generator().manual_seed(0)
    chains = [(FEW | MORE)[name] for name in names]
    inputs = [
        [torch.randn(n, 64, generator=generator).div_(k).requires_grad_() for n, k in sizes]
        for sizes in [((32, 1), (64, 8), (64, 8))] * len(chains)
    ]

    def function(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [chain(*own) for chain, own in zip(chains, inputs, strict=True)]

    options = {"inductor": {"emulate_precision_casts": False}} if how == "not rounded" else {}
    torch._dynamo.reset()
    with torch.autocast(**BF16):
        if how != "eager":
            function = torch.compile(function, backend="smart_autocast", options=options)
        made = function(inputs)
    torch.stack([y.float().square().sum() for y in made]).sum().backward()
    grads = [[x.grad for x in own if x.grad is not None] for own in inputs]
    return {n: [y.detach(), *own] for n, y, own in zip(names, made, grads, strict=True)}


def differences(names: tuple[str, ...], name: str, how: str) -> list[float]:
    """How far the result and the gradients of a chain are from eager mode's."""
    expected, found = results(names, "eager")[name], results(names, how)[name]
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    return [float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize("name", FEW)
def test_eager_modes_bits(name: str) -> None:
    assert max(differences(tuple(FEW), name, "")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_eager_modes_bits_of_more(name: str) -> None:
    assert max(differences(tuple(MORE), name, "")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, *MORE])
def test_they_are_others_if_it_is_told_not_to(name: str) -> None:
    names = tuple(FEW if name in FEW else MORE)
    assert max(differences(names, name, "not rounded")) > 1e-4


def is_left_to_aten(x: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="smart_autocast")
    result, codes = run_and_get_code(compiled, x)
    assert torch.equal(result, function(x)) or x.dtype == torch.float32
    return "torch.ops.aten.native_layer_norm.default(" in "".join(codes)


def test_graphs_without_low_precision_are_compiled_as_by_stock() -> None:
    def rounds(x: Tensor) -> Tensor:
        return (F.layer_norm(x.bfloat16(), (64,)) * 1.3 + 0.1).float()

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (64,)) * 1.3 + 0.1

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert [is_left_to_aten(x, norm), is_left_to_aten(x.bfloat16(), norm)] == [False, True]
    assert is_left_to_aten(x, rounds)


def test_what_layer_norm_reads_is_made_contiguous_by_the_kernel_before_it() -> None:
    def norm(x: Tensor) -> Tensor:
        return F.layer_norm((x.bfloat16() * 1.3).t(), (32,)) * 0.9

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    upstream = torch.ones(64, 32, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="smart_autocast")
    expected = torch.autograd.grad(norm(x), x, upstream)
    torch.autograd.grad(compiled(x), x, upstream)  # compiles
    with torch.profiler.profile() as profile:
        y = compiled(x)
        grads = torch.autograd.grad(y, x, upstream)
    assert torch.equal(y, norm(x))
    assert torch.equal(grads[0], expected[0])
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::native_layer_norm"] == calls["aten::native_layer_norm_backward"] == 1
    assert "aten::copy_" not in calls


def test_what_is_left_to_aten_after_convolutions() -> None:
    """Inductor has convolutions in channels_last, and so what is made of them. Of tensors in two
    layouts, results have other strides than were predicted."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.nn.Conv2d(3, 16, 4, 4), torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
    norm = torch.nn.LayerNorm(16)

    def norms(x: Tensor) -> Tensor:
        y = norm(first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y + (norm(second(y).permute(0, 2, 3, 1)) * 1.3).permute(0, 3, 1, 2)

    def logarithms(x: Tensor) -> Tensor:
        y = first(x)
        return torch.xlogy(y * 1.1, second(y * 0.9).sigmoid()) * 1.3

    for function in (norms, logarithms):
        x = torch.randn(2, 3, 8, 8, generator=generator, requires_grad=True)
        torch._dynamo.reset()
        with torch.autocast(**BF16):
            found = torch.compile(function, backend="smart_autocast")(x)
            expected = function(x)
        upstream = torch.randn(expected.shape, generator=generator)
        grads = [torch.autograd.grad((y.float() * upstream).sum(), x) for y in (found, expected)]
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)


class Mixed(torch.nn.Module):
    """Mixes pixels as attention does: its result is in channels_last, whatever x is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(2).transpose(1, 2))
        return y.transpose(1, 2).unflatten(2, x.shape[2:])


def trained(
    backend: str | None,
    layout: torch.memory_format,
    *between: type[torch.nn.Module],
    **to: torch.dtype,
) -> list[Tensor]:
    """What a step of convolutions and norms makes: result, gradients, running statistics."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.SiLU(),
        torch.nn.Conv2d(16, 16, 1),
        *(module() for module in between),
        torch.nn.GroupNorm(4, 16),
        torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
        torch.nn.BatchNorm2d(16, affine=False),
    ).to(memory_format=layout, **to)
    x = torch.randn(4, 3, 9, 9).to(memory_format=layout, **to)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend) if backend else model
    with torch.autocast(**BF16):
        y = compiled(x)
    y.backward(torch.randn_like(y))
    return [
        y.detach(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        *model.buffers(),
    ]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("between", [(), (Mixed,)], ids=["", "mixed"])
def test_norms_between_convolutions(
    layout: torch.memory_format, between: tuple[type[torch.nn.Module], ...]
) -> None:
    """Eager mode's kernels add up in another order in channels_last."""
    assert_same_bits(*(trained(b, layout, *between) for b in ("smart_autocast", None)))


def test_norms_of_images_of_any_size() -> None:
    with torch._dynamo.config.patch(assume_static_by_default=False):
        found = trained("smart_autocast", torch.channels_last)
    expected = trained(None, torch.channels_last)
    if torch.__version__ < "2.12":  # there the group norm's weights have other last bits
        torch.testing.assert_close(found, expected)
    else:
        assert_same_bits(found, expected)


def of_images(
    backend: str | None, make: Callable[[], torch.nn.Module], shape: tuple[int, ...], **way: Any
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, **way) if backend else model
    with torch.autocast(**BF16):
        y = compiled(torch.randn(shape))
    y.backward(torch.randn_like(y))
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_norms_of_one_image() -> None:
    """A dimension of one element has other strides than stock's fake tensors have."""
    program = lambda: Attended(torch.nn.GroupNorm(4, 8)), (1, 3, 16, 16)
    assert_same_bits(*(of_images(b, *program) for b in ("smart_autocast", None)))


def test_instance_norms_of_any_size() -> None:
    """Views of convolutions, with strides that are expressions."""

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(4, 8, 3, padding=1),
            torch.nn.InstanceNorm2d(8, affine=True),
            torch.nn.LeakyReLU(0.1),
            torch.nn.Conv2d(8, 8, 3, padding=1),
        )

    program = model, (2, 4, 16, 16)
    assert_same_bits(*(of_images(b, *program, dynamic=True) for b in ("smart_autocast", None)))


class Padded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.last = torch.nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)))
        return self.last(F.pad(h, [0, 1, 0, 1], mode="replicate"))


class Upsampled(torch.nn.Module):
    """What an image is on average, put everywhere beside it."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.inner = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), norm, torch.nn.ReLU())
        self.last = torch.nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).contiguous(memory_format=torch.channels_last)
        inner = self.inner(F.adaptive_avg_pool2d(h, 1))
        h = torch.cat([h, F.interpolate(inner, h.shape[2:], mode="bilinear")], 1)
        return F.interpolate(self.last(h), scale_factor=4, mode="bilinear", align_corners=True)


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("norm", [torch.nn.Identity, functools.partial(torch.nn.BatchNorm2d, 8)])
def test_interpolation_of_single_pixels(norm: Callable[[], torch.nn.Module], inner: str) -> None:
    """An image of one pixel is contiguous behind a norm or an elementwise op, whatever it was, and
    interpolation goes by that."""
    program = lambda: Upsampled(norm()), (2, 4, 16, 16)
    found = of_images("smart_autocast", *program, options={"inner": inner})
    expected = of_images(None, *program)
    if inner == "inductor" and norm is not torch.nn.Identity:
        # ATen adds up the norm's gradients in another way if one is contiguous and one is not.
        found, expected = ([r[0], *r[4:]] for r in (found, expected))
    assert_same_bits(found, expected)


def test_padding_by_what_is_at_the_edge() -> None:
    """Stock Inductor raises: from a kernel it gets in channels_last what it expects contiguous."""
    program = Padded, (2, 4, 16, 16)
    assert_same_bits(*(of_images(b, *program) for b in ("smart_autocast", None)))


def test_running_statistics_of_bfloat16() -> None:
    """ATen's kernel returns them in bfloat16, where float32 is predicted."""
    found, expected = (
        trained(b, torch.contiguous_format, dtype=torch.bfloat16)[-6:]
        for b in ("smart_autocast", None)
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
