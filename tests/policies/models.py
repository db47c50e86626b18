"""A small model, lowered and compiled with overrides."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autocast_backend import lower_autocast
from tests.support import BF16, capture, targets

TO_BF16, TO_FP16 = "autocast_to_bf16.default", "autocast_to_fp16.default"
TO_FP32 = "autocast_to_full_precision.default"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)
        self.router = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + h * torch.softmax(self.gate(h), -1)


class Model(nn.Module):
    """`by_hand` writes down in eager what an override asks for."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.lm_head = nn.Linear(8, 8)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            for block in self.blocks:
                x = block(x)
            return self.head(x)


def lowered(policies: dict, function: Any = None, *inputs: Any) -> list[str]:
    graph = capture(function or Model(), *(inputs or (torch.randn(4, 8),)))
    return targets(lower_autocast(graph, policies=policies))


def compile_model(model: Any, policies: dict, **arguments: Any) -> Any:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "policies": policies}
    return torch.compile(model, backend="smart_autocast", options=options, **arguments)
