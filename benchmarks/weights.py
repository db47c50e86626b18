"""What looking after many small weights costs: a model compiled whole, and block by block.

The layers are so small that a call is nearly all overhead, and the difference from stock, by
weight, is what finding, making and recording a weight's cast outside of a graph takes.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.answer import Answer, table
from benchmarks.call_cost import fresh_copy
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import (
    Row,
    Sampler,
    compare,
    cuda_sampler,
    host_sampler,
    interleave,
    one_thread,
    row_of,
)
from benchmarks.training import candidates

FORMS = ("whole", "block by block")
MODES = ("one context", "context per call", "training step")
WIDTH, LAYERS_IN_BLOCK, BATCH = 8, 6, 4


class Block(nn.Module):
    """Square linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS_IN_BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model_of(blocks: int, device: str) -> nn.Sequential:
    """So many blocks in a row."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).to(device)


def compiled(model: nn.Sequential, form: str, name: str, **arguments: Any) -> nn.Module:
    """A copy of the model, compiled as `torch.compile` is told by `arguments`, or not at all if
    there are none. Its code is its own: what was compiled for another copy is not looked through
    at each call."""
    code = fresh_copy(Block.forward, f"{form}_{name}".replace(" ", "_"))
    kind = type("Block", (Block,), {"forward": code})
    own = copy.deepcopy(model)
    for block in own:
        block.__class__ = kind
    if not arguments:
        return own
    if form == "whole":
        return torch.compile(own, **arguments)  # type: ignore[return-value]
    for block in own:
        block.compile(**arguments)
    return own


def call_of(model: nn.Module, x: Tensor, mode: str) -> Callable[[], object]:
    """What is timed. With `one context` there is a context around it already."""

    def context() -> AbstractContextManager[object]:
        if mode == "one context":
            return nullcontext()
        return torch.autocast(x.device.type, dtype=torch.bfloat16)

    def inference() -> None:
        with context():
            model(x)

    def step() -> None:
        with context():
            loss = model(x).sum()
        loss.backward()

    return step if mode == "training step" else inference


def measure(
    form: str, mode: str, *, blocks: int, device: str, rounds: int, seed: int, inner: str
) -> tuple[list[Row], int]:
    """Seconds per call, or training step, of each candidate, against stock, on one thread; and the
    number of weights."""
    model, x = model_of(blocks, device), torch.randn(BATCH, WIDTH, device=device)
    sampler: Callable[[Callable[[], object]], Sampler] = (
        cuda_sampler if device == "cuda" else host_sampler
    )
    samplers = {
        name: sampler(call_of(compiled(model, form, name, **arguments), x, mode))
        for name, arguments in candidates(inner).items()
    }
    # None for the others: within another context, even one that is off, casts outlive theirs.
    one = torch.autocast(device, dtype=torch.bfloat16)
    around = one if mode == "one context" else nullcontext()
    with one_thread(), torch.set_grad_enabled(mode == "training step"), around:
        samples = interleave(samplers, rounds=rounds, warmup=3, seed=seed)
    return compare(samples, baseline="stock"), len(list(model.parameters()))


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks weights", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="4 blocks, few rounds")
    parse.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parse.add_argument("--rounds", type=positive_int, help="default: 100, or 20 with --quick")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--out", type=Path, help="folder for weights.json (default: by machine)")
    return parse


def main(arguments: Sequence[str], *, inner: str = "inductor") -> int:
    """Measure and keep the answer. Where there is a target for a call, `compile` has it."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("weights", flags)
    for form in FORMS:
        for mode in MODES:
            torch.compiler.reset()
            rows, weights = measure(
                form,
                mode,
                blocks=4 if flags.quick else 24,
                device=flags.device,
                rounds=flags.rounds or (20 if flags.quick else 100),
                seed=flags.seed,
                inner=inner,
            )
            answer.add(f"{form}, {mode}", rows, weights=weights)
            difference = row_of(rows, "ours, scope").difference
            assert difference is not None  # rows of a comparison with a baseline have one
            print(
                f"\n{form}, {mode}, {weights} weights\n{table(rows, unit='us')}\n"
                f"ours, scope, by weight: {difference / weights * 1e6:+.2f} us",
                flush=True,
            )
            answer.save(flags.out, complete=False)
    torch.compiler.reset()
    print(f"\n{answer.save(flags.out)}")
    return 0
