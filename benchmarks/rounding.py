"""Rounding where eager mode rounds: how many numbers are then its own, and what that costs.

Training steps under autocast of models that have many small ops in the lower precision, with
Inductor. Compared are all elements of the result and of all gradients of a first step.

A rounding is one conversion a number in a GPU and in a CPU with instructions for it; elsewhere
about ten vector instructions. So `elementwise`, which has twelve ops and no product of matrices, is
the worst case, and the others are close to 1.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.answer import Answer, table
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import compare, cuda_sampler, host_sampler, interleave, row_of
from benchmarks.models import MODELS as TRANSFORMERS

LIMIT = 1.05
WORST = "elementwise"
ROUNDED, FREE = "rounded", "not rounded"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"backend": "eager"},
    "stock": {},
    FREE: {
        "backend": "smart_autocast",
        "options": {"inductor": {"emulate_precision_casts": False}},
    },
    ROUNDED: {
        "backend": "smart_autocast",
        "options": {"inductor": {"emulate_precision_casts": True}},
    },
}


class Gated(nn.Module):
    """Blocks of a gated MLP with its norm, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = self.norm(x)
            x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


class Elementwise(nn.Module):
    """Twelve ops for each number that a small product gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x = self.linear(x)
        for _ in range(6):
            x = x * 0.9 + y
        return x


def convolutions(width: int) -> nn.Sequential:
    """Two convolutions, each with a norm and an activation."""
    first = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()
    second = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.Hardswish()
    return nn.Sequential(*first, *second)


class Residual(nn.Module):
    """Blocks of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(self._block(width) for _ in range(4))

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        one, other = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        return nn.Sequential(one, nn.BatchNorm2d(width), nn.ReLU(), other, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return x


class Decoder(nn.Module):
    """The end of a segmentation model: convolutions of what is interpolated to twice its size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width // 2, width, 3, padding=1)
        self.second = nn.Conv2d(width, width // 2, 3, padding=1)
        self.last = nn.Conv2d(width // 2, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = F.interpolate(F.relu(layer(x)), scale_factor=2.0, mode="bilinear")
        return self.last(x)


def in_channels_last(model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    layout = torch.channels_last
    return model.to(memory_format=layout), x.contiguous(memory_format=layout)


def cases(quick: bool) -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    """What makes each model and its input."""
    rows, width, side = (64, 32, 8) if quick else (512, 256, 32)
    layers = 1 if quick else 4
    return {
        "gated": lambda: (Gated(width), torch.randn(rows, width)),
        "convolutions": lambda: (convolutions(width // 4), torch.randn(8, 3, side, side)),
        "channels_last": lambda: in_channels_last(
            Residual(width // 4), torch.randn(8, 3, side, side)
        ),
        "decoder": lambda: (Decoder(width // 4), torch.randn(4, width // 8, side, side)),
        "vit": lambda: TRANSFORMERS["vit"](layers),
        "gpt": lambda: TRANSFORMERS["gpt"](layers),
        WORST: lambda: (Elementwise(8 * width), torch.randn(rows, 8)),
    }


def step_of(
    model: nn.Module, x: Tensor, dtype: torch.dtype, way: str
) -> Callable[[], list[Tensor]]:
    """One forward and backward of a model of its own: returns the result and all gradients."""
    own = copy.deepcopy(model)
    compiled = torch.compile(own, **WAYS[way])

    def step() -> list[Tensor]:
        own.zero_grad()
        with torch.autocast(x.device.type, dtype=dtype):
            result = compiled(x)
        result.float().square().mean().mul(1000).backward()
        return [result.detach(), *(p.grad for p in own.parameters() if p.grad is not None)]

    return step


def differing(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The share of elements that are not the same."""
    pairs = list(zip(found, expected, strict=True))
    return sum(int((f != e).sum()) for f, e in pairs) / sum(e.numel() for _, e in pairs)


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks rounding", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="smaller models, few rounds")
    parse.add_argument("--only", nargs="+", choices=cases(True), default=list(cases(True)))
    parse.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--rounds", type=positive_int, help="default 20; quick: 3")
    parse.add_argument("--seed", type=int, default=0, help="of the order within each round")
    parse.add_argument("--out", type=Path, help="folder for rounding.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 even where a target is missed: the numbers are the answer."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("rounding", flags)
    for name in flags.only:
        _measure(name, flags, answer)
        answer.save(flags.out, complete=False)
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0


def _measure(name: str, flags: argparse.Namespace, answer: Answer) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = (made.to(flags.device) for made in cases(flags.quick)[name]())
    steps = {way: step_of(model, x, DTYPES[flags.dtype], way) for way in WAYS}
    first = {way: step() for way, step in steps.items()}
    shares = {way: differing(made, first["eager"]) for way, made in first.items()}
    sampler = cuda_sampler if flags.device == "cuda" else host_sampler
    samples = interleave(
        {way: sampler(step) for way, step in steps.items()},
        rounds=flags.rounds or (3 if flags.quick else 20),
        warmup=2,
        seed=flags.seed,
    )
    rows = compare(samples, baseline=FREE)
    answer.add(name, rows, differing=shares)
    print(f"\n{name}\n{table(rows, unit='ms')}")
    print(
        "differing:", ", ".join(f"{way} {share:.2%}" for way, share in shares.items()), flush=True
    )
    if name != WORST:
        ratio = row_of(rows, ROUNDED).ratio
        assert ratio is not None  # there is a baseline
        answer.judge(
            f"{name}: {ROUNDED} by {FREE}",
            goal=f"<= {LIMIT}",
            measured=f"{ratio:.3f}",
            met=ratio <= LIMIT,
        )
