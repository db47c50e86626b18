"""With Inductor on the CPU, sums are added up in the order of ATen's."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.support import BF16, assert_same_bits

LABELS = torch.arange(48) % 64
SEVERAL = torch.arange(64) * torch.arange(1, 24, 2)[:, None] % 64
SEVERAL[:, 9] = -1
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: (x * 1.1).sum(),
    "sums": lambda x: (x * 1.1).sum((0, 2)) + (x * 1.3).sum((0, 2), dtype=torch.float64),
    "root mean square": lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)),
    "mean": lambda x: (x * x).mean(),
    "product": lambda x: (x.detach() * 0.1 + 1).prod(-1),
    "norm": lambda x: F.normalize(x, dim=-1)[0],
    "distance": lambda x: F.pairwise_distance(x, x.detach() * 0.7),
    "without NaN": lambda x: (x.log() * 0.1).nansum(-1),
    "logarithm of sums": lambda x: torch.logsumexp(x.detach(), -1),
    "a product with a vector": lambda x: torch.addmv(x[0, 0, :12], x[0], x[0, 0].detach()),
    "a row of a matrix": lambda x: torch.bmm(x[:, :1], x.detach().mT),
    "products with vectors": lambda x: torch.bmm(x, x.detach()[:, :1].mT),
    "two vectors": lambda x: torch.dot(x[0, 0], x[1, 1].detach()),
    "trace": lambda x: x[0].trace(),
    "weight norm": lambda x: torch._weight_norm(x, x.detach()[:, :1, :1].abs(), 0)[:2],
    "squared error": lambda x: F.mse_loss(x, x.detach() * 0.7),
    "logistic": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "divergence": lambda x: F.kl_div(x.detach(), x.sigmoid().detach(), reduction="sum"),
    "margins": lambda x: F.multi_margin_loss(x.detach()[0], LABELS[:12], reduction="none"),
    "margins of several": lambda x: F.multilabel_margin_loss(x[0], SEVERAL, reduction="sum"),
    "smooth": lambda x: F.smooth_l1_loss(x, x.detach() * 0.7, reduction="none", beta=0.3),
    "bias": lambda x: x.detach() * 1.3 * x[0, 0],
    "cosine": lambda x: F.cosine_similarity(x, x.detach() * 0.7 + 1, dim=-1),
}


def function(xs: list[Tensor]) -> list[Tensor]:
    """Reductions of float32 and of bfloat16."""
    own = iter(xs)
    results = []
    for program in PROGRAMS.values():
        results += [program(next(own) * 1.3), program((next(own) * 1.3).bfloat16())]
    return results


@functools.cache
def results(how: str) -> dict[str, list[Tensor]]:
    """Of each program its results and its gradients."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(4, 12, 64, generator=generator) for _ in 2 * list(PROGRAMS)]
    options = {"inductor": {"emulate_precision_casts": False}} if how == "not rounded" else {}
    call: Callable[[list[Tensor]], list[Tensor]] = function
    if how != "eager":
        torch._dynamo.reset()
        call = torch.compile(function, backend="smart_autocast", options=options)
    with torch.autocast(**BF16):
        made = call([x.requires_grad_() for x in xs])
    torch.stack([y.double().square().sum() for y in made]).sum().backward()
    found = [
        [y.detach(), *([] if x.grad is None else [x.grad])] for x, y in zip(xs, made, strict=True)
    ]
    return {n: found[2 * i] + found[2 * i + 1] for i, n in enumerate(PROGRAMS)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_eager_modes_bits(name: str) -> None:
    assert_same_bits(results("")[name], results("eager")[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "weight norm"])
def test_they_are_others_if_it_is_told_not_to(name: str) -> None:
    pairs = zip(results("not rounded")[name], results("eager")[name], strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_of_convolutions() -> None:
    """Inductor has them in channels_last. ATen's order is that of the strides in eager mode."""
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 16, 3)
    x = torch.randn(2, 3, 18, 19, requires_grad=True)

    def pooled(x: Tensor) -> Tensor:
        y = convolution(x).float()
        return torch.cat([(y * 1.1).mean((2, 3)), y.sum((0, 3))])

    with torch.autocast(**BF16):
        expected = pooled(x)
        torch._dynamo.reset()
        found = torch.compile(pooled, backend="smart_autocast")(x)
    grads = [
        torch.autograd.grad(y.square().sum(), [x, convolution.bias]) for y in (found, expected)
    ]
    assert_same_bits([found], [expected])
    assert_same_bits(*grads)


def test_of_any_size() -> None:
    def sums(x: Tensor) -> Tensor:
        y = x.bfloat16() * 1.3
        return (y.float() * 1.1).sum(-1) + (x * y).mean(0).sum()

    torch._dynamo.reset()
    compiled = torch.compile(sums, backend="smart_autocast", dynamic=True)
    for size in ((7, 300), (20, 33), (0, 5), (5, 0)):
        x = torch.randn(size, generator=torch.Generator().manual_seed(0))
        assert_same_bits([compiled(x)], [sums(x)])
        assert_same_bits([compiled(x.t())], [sums(x.t())])


def test_softmax_adds_up_in_its_own_kernel() -> None:
    def probabilities(x: Tensor) -> Tensor:
        return (x.bfloat16().float() * 1.3).softmax(-1)

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    found, codes = run_and_get_code(torch.compile(probabilities, backend="smart_autocast"), x)
    torch.testing.assert_close(found, probabilities(x))
    assert "aten.sum" not in "".join(codes)


def test_what_is_larger_than_it_is_made_of_is_not_stored() -> None:
    def distances(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        differences = x.bfloat16().float()[:, None] - y
        return differences.square().sum(-1), (differences * 1.1).norm(dim=-1)

    def squares(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x.bfloat16().float() * y).sum(-1), (x * y).bfloat16().norm(dim=-1)

    generator = torch.Generator().manual_seed(0)
    for function, rows, stored in ((distances, 300, False), (squares, 40_000, True)):
        x, y = (torch.randn(rows, 8, generator=generator) for _ in range(2))
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="smart_autocast")
        found, codes = run_and_get_code(compiled, x, y)
        torch.testing.assert_close(found, function(x, y), rtol=1e-5, atol=1e-5)
        code = "".join(codes)
        assert ("aten.sum" in code) == ("aten.linalg_vector_norm.default(" in code) == stored
