"""Models to export, one for each kind of thing an exported program may hold.

Each has its autocast regions in its own code, as a model must have that is exported: they are what
`torch.export` turns into `wrap_with_autocast` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def region(enabled: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


class Mlp(nn.Module):
    """Policies of three kinds, a region switched off inside, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        with region():
            h = self.down(F.gelu(self.up(x)))
            with region(enabled=False):
                wide = h.float().exp()
            joined = torch.cat([h, wide])
        with region(dtype=torch.float16):
            return joined, F.mse_loss(self.down(self.up(x)), x), wide


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(1, 3), nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        with region():
            padded = F.pad(self.norm(x), (1, 1, 1, 1), mode="reflect")
            h = F.max_pool2d(F.relu(self.first(padded)), 2)
            return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1)), padded


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(11, 16)

    def forward(self, tokens: Tensor, scale: Tensor) -> Any:
        with region():
            h = self.block(self.embed(tokens) * scale)
            return h, h @ self.embed.weight.t()


class Branches(nn.Module):
    """`torch.cond` inside a region, and a region inside a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        def in_region(t: Tensor) -> Tensor:
            with region(dtype=torch.float16):
                return self.a(t)

        with region():
            y = torch.cond(x.sum() > 0, lambda t: self.a(t), lambda t: self.b(t).sin(), (x,))
            z = self.b(x)
        return y, z, torch.cond(x.sum() < 0, in_region, lambda t: self.b(t).half(), (z.float(),))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        with region():
            h = checkpoint(lambda t: self.b(F.gelu(self.a(t))), x, use_reentrant=False)
            return self.a(h), h


class Buffers(nn.Module):
    """Buffers that a call changes, in a region, outside, and by batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        with region():
            h = self.norm(self.layer(x))
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.calls.add_(1)
        return h, self.mean + 0


class DynamicShapes(nn.Module):
    """A size of its own, and one that hangs on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        with region():
            h = self.layer(x).view(x.shape[0] * 2, 4)
            chosen = h[(h > 0).all(1).nonzero().squeeze(1)]
        with torch.no_grad():
            return h, chosen, chosen.sum(0), self.layer(x)


@dataclass(frozen=True)
class Case:
    """A model, inputs for it, and how to export it."""

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    dynamic_shapes: Any = None

    @property
    def name(self) -> str:
        return self.make.__name__

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def export(self) -> ExportedProgram:
        return torch.export.export(self.model(), self.inputs, dynamic_shapes=self.dynamic_shapes)

    def inputs_of(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in self.inputs)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


CASES = [
    Case(Mlp, (numbers(4, 8),)),
    Case(Cnn, (numbers(2, 3, 8, 8),)),
    Case(Transformer, (torch.arange(10).reshape(2, 5), numbers(2, 5, 1))),
    Case(Branches, (numbers(4, 8),)),
    Case(Checkpointed, (numbers(4, 8),)),
    Case(Buffers, (numbers(4, 8),)),
    Case(DynamicShapes, (numbers(6, 8),), ({0: torch.export.Dim("rows", min=2, max=64)},)),
]
