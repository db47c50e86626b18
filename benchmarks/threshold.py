"""How many calls in one autocast context make casts outside of the graph pay, and what size.

The model of `decode`, 1 to 4 tokens in each context: with the casts of its weights *inside* the
graph, made at every call, and *outside*, made by the first call of a context. Then, on a CPU, one
linear layer called once in each context, by the size of its cast.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from autocast_backend.weights import plan
from benchmarks.answer import Answer, table
from benchmarks.decode import FORMS, loop, model_of
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import (
    Row,
    Sampler,
    compare,
    cuda_sampler,
    host_sampler,
    interleave,
    row_of,
)

USES = (1, 2, 3, 4)
SIZES, QUICK_SIZES = (1, 4, 8, 16, 32, 64, 256), (4, 64)  # of a cast, MiB
NEVER = 2**62


def compiled(model: nn.Module, *, outside: bool, inner: str = "inductor") -> nn.Module:
    """The model with its casts inside, or outside from the first call on."""
    kept = "scope" if outside else "off"
    module: nn.Module = torch.compile(
        copy.deepcopy(model),
        backend="smart_autocast",
        options={"inner": inner, "weight_cache": kept},
    )
    return module


def both(model: nn.Module) -> dict[str, nn.Module]:
    """The model compiled in both ways."""
    torch.compiler.reset()
    return {name: compiled(model, outside=name == "outside") for name in ("inside", "outside")}


def measure(
    models: dict[str, nn.Module], x: Tensor, *, calls: int, flags: argparse.Namespace
) -> list[Row]:
    """Seconds for `calls` calls in one context, by those with the casts inside."""
    sampler = cuda_sampler if x.is_cuda else host_sampler
    samplers: dict[str, Sampler] = {
        name: sampler(loop(one, x, autocast=True, form=FORMS[0], tokens=calls))
        for name, one in models.items()
    }
    rounds = flags.rounds or (5 if flags.quick else 15)
    samples = interleave(samplers, rounds=rounds, warmup=2, seed=flags.seed)
    return compare(samples, baseline="inside")


def pays(title: str, rows: list[Row], answer: Answer, folder: Path | None) -> bool:
    """Keep and print what was measured; whether outside is no slower."""
    answer.add(title, rows)
    answer.save(folder, complete=False)
    print(f"\n{title}\n{table(rows, unit='ms')}", flush=True)
    ratio = row_of(rows, "outside").ratio
    assert ratio is not None  # there is a baseline
    return ratio <= 1


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks threshold", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parse.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parse.add_argument("--rounds", type=positive_int, help="default: 15, or 5 with --quick")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--out", type=Path, help="folder for threshold.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, judge the constants of the plan by it, and keep the answer."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("threshold", flags)
    _count(flags, answer)
    if flags.device == "cpu":
        _size(flags, answer)
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0


def _count(flags: argparse.Namespace, answer: Answer) -> None:
    model, words = model_of(flags.quick)
    model = model.to(flags.device).eval()
    token = torch.randint(words, (1, 1), device=flags.device)
    with mock.patch.multiple(plan, USES_THAT_PAY=1, LARGE_CAST_BYTES=NEVER):
        models = both(model)
        paid = [
            uses
            for uses in USES
            if pays(
                f"{uses} calls in a context",
                measure(models, token, calls=uses, flags=flags),
                answer,
                flags.out,
            )
        ]
    found = min(paid, default=None)
    answer.judge(
        "fewest calls for which outside is no slower",
        goal=f"{plan.USES_THAT_PAY}, as the plan has it",
        measured=str(found),
        met=found == plan.USES_THAT_PAY,
    )


def _size(flags: argparse.Namespace, answer: Answer) -> None:
    paid = []
    with mock.patch.object(plan, "LARGE_CAST_BYTES", 0):
        for mib in QUICK_SIZES if flags.quick else SIZES:
            layer = nn.Linear(1024, mib * 2**9, bias=False).eval()  # 2 bytes an element
            rows = measure(both(layer), torch.randn(1, 1024), calls=1, flags=flags)
            title = f"one call in a context, a cast of {mib} MiB"
            if pays(title, rows, answer, flags.out):
                paid.append(mib)
    planned = plan.LARGE_CAST_BYTES / 2**20
    large = [mib for mib in (QUICK_SIZES if flags.quick else SIZES) if mib >= planned]
    answer.judge(
        "casts in MiB for which outside is no slower for one call",
        goal=f"all from {planned:g}, as the plan has it",
        measured=", ".join(map(str, paid)) or "none",
        met=set(large) <= set(paid),
    )
