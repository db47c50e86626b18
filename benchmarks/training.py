"""Training steps of several micro-batches under autocast: casts made, and time against stock.

A step runs 1, 4 or 16 micro-batches forward and backward and one optimizer step. `each` opens an
autocast context around each forward, as most training loops do: eager's rule lets a cast live for
one forward, so there is nothing to save but with `weight_cache="version"`. `one` opens a context
around all forwards, followed by one backward of their sum. `not rounded` is `scope` with
`emulate_precision_casts` off, as stock has it: on the CPU the others round where eager mode does.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.answer import Answer, table
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import Row, Sampler, compare, cuda_sampler, host_sampler, interleave, row_of
from benchmarks.models import GPT

MICRO_BATCHES = (1, 4, 16)
CONTEXTS = ("each", "one")
LIMIT = 1.03


class CastCounter(TorchDispatchMode):
    """Counts the casts of some weights to a lower precision, in graphs and outside of them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.casts = 0
        self._addresses = {w.data_ptr() for w in weights}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise compiled functions silently run as eager ones under this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._count([args[0]], [result])
        elif func.namespace == "smart_autocast":  # multi_cast, in either form
            self._count(args[0], (kwargs or {}).get("out", result))
        return result

    def _count(self, sources: Sequence[Tensor], casts: Sequence[Tensor]) -> None:
        self.casts += sum(
            cast.dtype.itemsize < source.dtype.itemsize and source.data_ptr() in self._addresses
            for source, cast in zip(sources, casts, strict=True)
        )


def step_of(
    model: nn.Module, batches: Sequence[Tensor], context: str, **compile_arguments: Any
) -> Callable[[], None]:
    """A function that makes one training step of a model of its own."""
    own = copy.deepcopy(model)
    compiled = torch.compile(own, **compile_arguments) if compile_arguments else own
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-4)
    device = batches[0].device.type

    def loss_of(batch: Tensor) -> Tensor:
        logits = compiled(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def step() -> None:
        optimizer.zero_grad()
        if context == "one":
            with torch.autocast(device, dtype=torch.bfloat16):
                losses = [loss_of(batch) for batch in batches]
            torch.stack(losses).sum().backward()
        else:
            for batch in batches:
                with torch.autocast(device, dtype=torch.bfloat16):
                    loss = loss_of(batch)
                loss.backward()
        optimizer.step()

    step.weights = list(own.parameters())  # type: ignore[attr-defined]
    return step


def candidates(inner: str) -> dict[str, dict[str, Any]]:
    """What each candidate gives `torch.compile`."""
    ours = {
        f"ours, {kept}": {
            "backend": "smart_autocast",
            "options": {"inner": inner, "weight_cache": kept},
        }
        for kept in ("scope", "version", "off")
    }
    return {"stock": {"backend": inner}, "control": {"backend": inner}, "eager": {}, **ours}


def timed() -> dict[str, dict[str, Any]]:
    """All that `measure` compares."""
    ways = candidates("inductor")
    as_stock = {**ways["ours, scope"]["options"], "inductor": {"emulate_precision_casts": False}}
    return {**ways, "ours, not rounded": {**ways["ours, scope"], "options": as_stock}}


def count(model: nn.Module, batches: Sequence[Tensor], context: str) -> dict[str, int]:
    """Casts of weights in one step of each candidate, the third: with an inner compiler that leaves
    the ops of a graph visible."""
    counts = {}
    for name, arguments in candidates("aot_eager").items():
        torch.compiler.reset()
        step = step_of(model, batches, context, **arguments)
        step()
        step()
        with CastCounter(step.weights) as counter:  # type: ignore[attr-defined]
            step()
        counts[name] = counter.casts
    return counts


def measure(
    model: nn.Module,
    batches: Sequence[Tensor],
    context: str,
    *,
    trials: int,
    rounds: int,
    seed: int,
) -> list[Row]:
    """Seconds per step of each candidate, against stock.

    Each trial builds all models anew, in another order: built once, candidates with the same
    generated code (stock, and ours with the plan off) were 3 % apart, over all rounds.
    """
    sampler: Callable[[Callable[[], None]], Sampler] = (
        cuda_sampler if batches[0].is_cuda else host_sampler
    )
    samples: dict[str, list[float]] = {name: [] for name in timed()}
    for trial in range(trials):
        torch.compiler.reset()
        ways = list(timed().items())
        random.Random(seed + trial).shuffle(ways)
        samplers = {
            name: sampler(step_of(model, batches, context, **arguments)) for name, arguments in ways
        }
        found = interleave(samplers, rounds=rounds, warmup=2, seed=seed + trial)
        for name, times in found.items():
            samples[name] += times
    return compare(samples, baseline="stock")


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks training", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="a smaller model, few rounds")
    parse.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parse.add_argument("--trials", type=positive_int, help="default: 3, or 1 with --quick")
    parse.add_argument("--rounds", type=positive_int, help="of each trial, default: 5")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--out", type=Path, help="folder for training.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Count and measure every combination, judge them and keep the answer."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("training", flags)
    torch.manual_seed(flags.seed)
    model = (GPT(2) if flags.quick else GPT(4, width=384, heads=6)).to(flags.device)
    for context, number in itertools.product(CONTEXTS, MICRO_BATCHES):
        batches = list(torch.randint(1024, (number, 8, 65), device=flags.device))
        counts = count(model, batches, context)
        rows = measure(
            model,
            batches,
            context,
            trials=flags.trials or (1 if flags.quick else 3),
            rounds=flags.rounds or 5,
            seed=flags.seed,
        )
        title = f"{context} context, {number} micro-batches"
        answer.add(title, rows, casts=counts)
        print(f"\n{title}\n{table(rows, unit='ms')}")
        print("casts:", ", ".join(f"{name} {n}" for name, n in counts.items()), flush=True)
        for name in ("ours, scope", "ours, version", "ours, not rounded"):
            ratio = row_of(rows, name).ratio
            assert ratio is not None  # rows of a comparison with a baseline have one
            answer.judge(
                f"{title}, {name}: time by stock's",
                goal=f"<= {LIMIT}",
                measured=f"{ratio:.3f}",
                met=ratio <= LIMIT,
            )
        answer.save(flags.out, complete=False)
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0
