"""How many calls in one autocast context make casts outside of the graph pay.

The model of `decode`, 1 to 4 tokens in each context: with the casts of its weights *inside* the
graph, made at every call, and *outside*, made by the first call of a context.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from autocast_backend.weights import plan
from benchmarks.answer import Answer, table
from benchmarks.decode import FORMS, loop, model_of
from benchmarks.harness import Sampler, compare, cuda_sampler, host_sampler, interleave, row_of

USES = (1, 2, 3, 4)


def compiled(model: nn.Module, *, outside: bool, inner: str = "inductor") -> nn.Module:
    """The model with its casts inside, or outside from the first call on."""
    kept = "scope" if outside else "off"
    module: nn.Module = torch.compile(
        copy.deepcopy(model),
        backend="smart_autocast",
        options={"inner": inner, "weight_cache": kept},
    )
    return module


def main(arguments: Sequence[str]) -> int:
    """Measure, judge the constant of the plan by it, and keep the answer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks threshold", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, help="default: 15, or 5 with --quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for threshold.json (default: by machine)")
    flags = parser.parse_args(arguments)
    answer = Answer.to("threshold", flags)
    model, words = model_of(flags.quick)
    model = model.to(flags.device).eval()
    token = torch.randint(words, (1, 1), device=flags.device)
    sampler: Callable[[Callable[[], None]], Sampler] = (
        cuda_sampler if flags.device == "cuda" else host_sampler
    )
    torch.compiler.reset()
    models = {name: compiled(model, outside=name == "outside") for name in ("inside", "outside")}
    paid = []
    with mock.patch.object(plan, "USES_THAT_PAY", 1):
        for uses in USES:
            samplers = {
                name: sampler(loop(one, token, autocast=True, form=FORMS[0], tokens=uses))
                for name, one in models.items()
            }
            samples = interleave(
                samplers,
                rounds=flags.rounds or (5 if flags.quick else 15),
                warmup=2,
                seed=flags.seed,
            )
            rows = compare(samples, baseline="inside")
            title = f"{uses} calls in a context"
            answer.add(title, rows)
            print(f"\n{title}\n{table(rows, unit='ms')}", flush=True)
            ratio = row_of(rows, "outside").ratio
            assert ratio is not None  # there is a baseline
            if ratio <= 1:
                paid.append(uses)
    found = min(paid, default=None)
    answer.judge(
        "fewest calls for which outside is no slower",
        goal=f"{plan.USES_THAT_PAY}, as the plan has it",
        measured=str(found),
        met=found == plan.USES_THAT_PAY,
    )
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0
