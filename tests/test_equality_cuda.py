"""Equal to eager autocast on a GPU: dtypes and bits of outputs and gradients, model by model.

There autocast has a default dtype and lists of its own, and ops have other kernels. The same on the
CPU shows that the tests run.
"""

from __future__ import annotations

import math
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

SMALL = 2.0**-20
"""The share of the largest number that sums of float32 in another order may differ by."""

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
    told = differences(actual, expected)
    noise = differences(train(case, device, dtype, **EAGER), expected)
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        stocks = differences(train(case, device, dtype, **STOCK), expected)
    skip_or_fail(told, noise, stocks)


def differences(actual: list[Any], expected: list[Any]) -> dict[int, float]:
    """Which tensors differ, by their places, and by how much of the largest number in them.

    Infinite where one is missing, or has numbers where the other has infinities or NaNs.
    """
    found = {}
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if not same_bits([a], [e]):
            found[i] = math.inf if a is None or e is None else _share(a.double(), e.double())
    return found


def _share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite) or not torch.allclose(
        actual[~finite], expected[~finite], equal_nan=True
    ):
        return math.inf
    far = (actual - expected)[finite].abs()
    if not far.any():
        return 0.0  # but for NaNs, which torch.equal holds to be different
    return float(far.max() / expected[finite].abs().max())


def skip_or_fail(told: dict[int, float], noise: dict[int, float], stocks: dict[int, float]) -> None:
    """Skips where what differs does so from run to run, or with stock, by about as much. By how
    much each tensor does: `told` of ours, `noise` of another run of eager mode, `stocks`."""
    allowed = {i: max(4 * noise.get(i, 0.0), 4 * stocks.get(i, 0.0), SMALL) for i in noise | stocks}
    too_far = {i: share for i, share in told.items() if not share <= allowed.get(i, 0.0) < math.inf}
    assert not too_far, f"of {told}; eager mode's from run to run: {noise}, stock's: {stocks}"
    pytest.skip(
        f"bits differ, {told}: eager mode's change from run to run, {noise}, or are not stock's, "
        f"{stocks}"
    )


@pytest.mark.parametrize("other", ["noise", "stocks"])
def test_what_differs_elsewhere_may_differ_by_as_much_here(other: str) -> None:
    """Also where another's last bit differs, a wrong result is not one more of them."""
    expected = [torch.full((4,), 3.0), torch.tensor([1.0, torch.inf, torch.nan]), None]

    def off(share: float) -> dict[int, float]:
        return differences([expected[0] * (1 + share), *expected[1:]], expected)

    bit, nothing = 2.0**-23, differences(expected, expected)
    assert nothing == {1: 0.0}  # NaNs
    assert off(bit) == {0: pytest.approx(bit, rel=1), 1: 0.0}
    others = {"noise": nothing, "stocks": nothing, other: off(bit)}
    with pytest.raises(pytest.skip.Exception, match=r"bits differ, \{0: 2"):
        skip_or_fail(off(2 * bit), **others)
    with pytest.raises(AssertionError, match=r"0: 0\.0001"):
        skip_or_fail(off(1000 * bit), **others)
    with pytest.raises(AssertionError, match="from run to run"):  # only ours has other bits
        skip_or_fail(off(bit), nothing, nothing)
    for wrong in (
        [torch.tensor([3.0, 3.0, 3.0, torch.inf]), *expected[1:]],
        [expected[0], torch.tensor([1.0, -torch.inf, torch.nan]), None],
        [expected[0], torch.tensor([torch.nan, torch.inf, torch.nan]), None],
        [*expected[:2], torch.ones(1)],
    ):
        told = differences(wrong, expected)
        assert max(told.values()) == math.inf
        with pytest.raises(AssertionError, match="inf"):
            skip_or_fail(told, told, told)
