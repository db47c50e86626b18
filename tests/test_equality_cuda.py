"""Equal to eager autocast on a GPU: dtypes and bits of outputs and gradients, model by model.

There autocast has a default dtype and lists of its own, and ops have other kernels. The same on the
CPU shows that the tests run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

from benchmarks.models import MODELS, Autocasting
from tests.backward.support import EAGER, STOCK, ours, same_bits
from tests.support import tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 8, 2)
        self.norm, self.slope, self.head = nn.BatchNorm2d(8), nn.PReLU(), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.slope(self.norm(self.up(self.conv(x))))
        grid = x.permute(0, 2, 3, 1)[..., :2]
        return self.head(y.mean((2, 3))), F.grid_sample(y, grid, align_corners=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> Any:
        y, weights = self.attention(x, x, x)
        z = self.norm(x + F.dropout(y, 0.5))
        return self.head(z), weights, torch.cat([x, y, self.head(z)])


class Lists(nn.Module):
    """Calls of every kind of autocast's lists."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        y, w = self.a(x), self.b.weight
        labels = torch.arange(8, device=x.device)
        return (
            self.a(self.b(y)),
            torch.einsum("ij,kj->ik", x, w) + torch.addmm(x, x, w),
            torch.baddbmm(x[None], x[None], w[None]),
            torch.stack([x @ w, x]),
            torch.addcmul(x, y, y),
            torch.linalg.multi_dot([x, w, w]),
            F.cross_entropy(y, labels),
            F.mse_loss(y, x),
            F.smooth_l1_loss(y, x),
            F.binary_cross_entropy_with_logits(y, x.sigmoid()),
            F.cosine_similarity(y, x.to(y.dtype)),
            F.layer_norm(y, (16,)).softmax(-1).cumsum(0),
            y.exp().log1p() + y.abs().pow(1.5) + y.norm() + y.prod(1, keepdim=True),
            torch.where(x > 0, y, x),
        )


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    **{name: lambda make=make: make(2) for name, make in MODELS.items()},  # type: ignore[misc]
    "convolutional": lambda: (Convolutional(), torch.randn(4, 3, 12, 12)),
    "attention": lambda: (Attention(), torch.randn(2, 8, 32)),
    "lists": lambda: (Lists(), torch.randn(8, 16)),
}


def train(
    case: str, device: str, dtype: torch.dtype | None, **compile_arguments: Any
) -> list[torch.Tensor | None]:
    """Outputs and gradients. For None, autocast is around the call and has the default dtype of the
    device type, float16 on CUDA; for another dtype it is in the model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = CASES[case]()
    if dtype is not None:
        model = Autocasting(model, device, dtype)
    model, x = model.to(device), x.to(device)
    compiled = torch.compile(model, **compile_arguments)
    torch.manual_seed(1)
    with torch.autocast(device, enabled=dtype is None):
        outputs = tensors(compiled(x))
    torch.stack([y.float().square().mean() for y in outputs]).sum().backward()
    return [*outputs, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_bits_of_outputs_and_gradients(device: str, case: str, dtype: torch.dtype | None) -> None:
    expected = train(case, device, dtype, **EAGER)
    actual = train(case, device, dtype, **ours())
    if same_bits(actual, expected):
        return
    assert [getattr(t, "dtype", None) for t in actual] == [
        getattr(t, "dtype", None) for t in expected
    ]
    told = _differences(actual, expected)
    noise = _differences(train(case, device, dtype, **EAGER), expected)
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        stocks = _differences(train(case, device, dtype, **STOCK), expected)
    assert told.keys() <= noise.keys() | stocks.keys(), told
    pytest.skip(f"eager mode's bits change from run to run, {noise}, or are not stock's: {stocks}")


def _differences(actual: list[Any], expected: list[Any]) -> dict[int, str]:
    """Which tensors differ, and by how much of the largest number in them."""
    found = {}
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if not same_bits([a], [e]):
            share = (a.double() - e.double()).abs().max() / e.double().abs().max()
            found[i] = f"{tuple(e.shape)} {e.dtype} by {share:.2g}"
    return found
