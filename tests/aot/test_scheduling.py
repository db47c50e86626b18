"""Inductor runs a kernel after those that write what it reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import BF16, assert_same_bits


class Upsampled(nn.Module):
    """The upward half of a U-Net: its gradient is added up, then cast, then turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(32, 64, 3, 2, 1)
        self.skip = nn.Conv2d(96, 32, 1)
        self.norm = nn.GroupNorm(8, 96)
        self.up = nn.Conv2d(96, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(self.down(x), scale_factor=2.0, mode="nearest")
        y = torch.cat([y, x], 1)
        result: Tensor = self.skip(y) + self.up(F.relu(self.norm(y)))
        return result


def step(backend: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Upsampled()
    x, upstream = torch.randn(4, 32, 16, 16), torch.randn(4, 32, 16, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend) if backend else model
    with torch.autocast(**BF16):
        y = compiled(x)
    y.backward(upstream.bfloat16())
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_gradients_of_upsampling_are_added_up_before_they_are_read() -> None:
    found, expected = step("smart_autocast"), step(None)
    assert len(expected) == 9
    assert_same_bits(found, expected)
