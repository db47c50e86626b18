"""Casts that do a second thing in the same pass over memory, against two passes.

Four comparisons, with the limit, a copy of as many bytes as the fused form moves, in each:

- `stats`: `cast_with_stats` against a plain cast, and against the cast and PyTorch ops that count;
- `unscale`: `unscale_cast` of float16 gradients to float32 against `.float()` and the unscaling of
  `torch.amp.GradScaler`; and the same into tensors that are there;
- `stochastic`: rounding with random numbers against rounding to nearest;
- `neighbours`: a cast between pointwise ops, compiled, against the same ops one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from autocast_backend import cast_with_stats, multi_cast, unscale_cast
from benchmarks.answer import Answer, text_table
from benchmarks.calls import sample_calls
from benchmarks.cast_sets import MODELS, Shape, sizes_name
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import compare, row_of
from benchmarks.quiet import Moment, wait_until_quiet

DTYPE = torch.bfloat16
QUICK_KIB, KIB = (2**10,), (2**10, 2**14, 2**18)
MOST_STATS = 1.05

Functions = dict[str, Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Functions that give the same numbers; `fused` and `apart` are names among them.

    Attributes:
        bytes: what the fused one has to read and write.
        goal: the most that fused may take by apart; None: no target.
    """

    name: str
    functions: Functions
    fused: str
    apart: str
    bytes: int
    goal: float | None = None


def stats(x: Tensor) -> Functions:
    """Results are new tensors, as for all comparisons."""

    def apart() -> object:
        low, magnitude, finite = x.to(DTYPE), x.abs(), x.isfinite()
        return (
            low,
            magnitude.nan_to_num(nan=0.0, posinf=torch.inf).amax(),
            (low.isinf() & finite).sum(),
            ((low == 0) & (x != 0)).sum(),
            x.isnan().sum(),
        )

    return {
        "plain cast": lambda: x.to(DTYPE),
        "cast_with_stats": lambda: cast_with_stats(x, DTYPE),
        "apart": apart,
    }


def unscale(grads: list[Tensor], *, reused: bool) -> Functions:
    """`scale` is 1, so that calls after calls see the same numbers."""
    scale = torch.ones(1, device=grads[0].device)
    inverse, found_inf = scale.clone(), torch.zeros_like(scale)
    out = [torch.empty_like(grad, dtype=torch.float32) for grad in grads] if reused else None

    def apart() -> list[Tensor]:
        if out is None:
            full = [grad.float() for grad in grads]
        else:
            full = out
            torch._foreach_copy_(full, grads)
        torch._amp_foreach_non_finite_check_and_unscale_(full, found_inf, inverse)
        return full

    return {"unscale_cast": lambda: unscale_cast(grads, scale, out=out), "apart": apart}


def stochastic(x: Tensor) -> Functions:
    """The same seed each time: the numbers cost what others would."""
    return {
        "nearest": lambda: x.to(DTYPE),
        "stochastic": lambda: multi_cast([x], DTYPE, rounding="stochastic", seed=0),
    }


def neighbours(x: Tensor) -> Functions:
    """16 bytes and the cast's 6 an element one by one, 6 where they are one kernel."""

    def function(x: Tensor) -> Tensor:
        return torch.ops.smart_autocast.cast.default((x * 2).relu(), DTYPE)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    return {"apart": lambda: function(x), "compiled": lambda: compiled(x)}


def comparisons(device: str, *, quick: bool, only: Sequence[str]) -> list[Callable[[], Comparison]]:
    """Each makes its tensors when it is called, for they need not fit beside each other."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def of_one(
        kind: str,
        make: Callable[[Tensor], Functions],
        kib: int,
        fused: str,
        apart: str,
        goal: float | None = None,
    ) -> Callable[[], Comparison]:
        return lambda: Comparison(
            name=f"{kind}, {sizes_name(kib)}",
            functions=make(numbers((kib * 256,))),
            fused=fused,
            apart=apart,
            bytes=kib * 256 * 6,
            goal=goal,
        )

    def of_model(*, reused: bool) -> Comparison:
        shapes = [(64, 64)] * 20 if quick else MODELS["gpt2-small"]()
        name = "unscale, 20 small gradients" if quick else "unscale, gpt2-small"
        return Comparison(
            name=f"{name}, out" if reused else name,
            functions=unscale([numbers(shape, torch.float16) for shape in shapes], reused=reused),
            fused="unscale_cast",
            apart="apart",
            bytes=6 * sum(map(prod, shapes)),
            goal=1.0,
        )

    found: list[tuple[str, Callable[[], Comparison]]] = [
        ("unscale", lambda: of_model(reused=False)),
        ("unscale", lambda: of_model(reused=True)),
    ]
    for kib in QUICK_KIB if quick else KIB:
        found += [
            ("stats", of_one("stats", stats, kib, "cast_with_stats", "plain cast", MOST_STATS)),
            ("stochastic", of_one("stochastic", stochastic, kib, "stochastic", "nearest")),
            ("neighbours", of_one("neighbours", neighbours, kib, "compiled", "apart", 1.0)),
        ]
    return [make for name, make in found if name in only]


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    names = ("stats", "unscale", "stochastic", "neighbours")
    parse = argparse.ArgumentParser(prog="python -m benchmarks fused", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="1 MiB and small gradients alone")
    parse.add_argument("--only", nargs="+", choices=names, default=names)
    parse.add_argument("--rounds", type=positive_int, help="default 20; quick: 5")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--wait", type=float, default=0, help="for a quiet machine, seconds each")
    parse.add_argument("--seed", type=int, default=0, help="of the order within each round")
    parse.add_argument("--out", type=Path, help="folder for fused.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 even where a target is missed: the numbers are the answer."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("fused", flags)
    for make in comparisons(flags.device, quick=flags.quick, only=flags.only):
        _measure(make(), flags, answer)
        answer.save(flags.out, complete=False)
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0


def _measure(comparison: Comparison, flags: argparse.Namespace, answer: Answer) -> None:
    wait_until_quiet(at_most=flags.wait)
    start = Moment.now()
    size = comparison.bytes // 2
    source = torch.ones(size, dtype=torch.uint8, device=flags.device)
    target = torch.empty_like(source)
    samples, faults = sample_calls(
        {"copy": lambda: target.copy_(source), **comparison.functions},
        device=flags.device,
        rounds=flags.rounds or (5 if flags.quick else 20),
        seed=flags.seed,
    )
    rows = compare(samples, baseline=comparison.apart)
    others = start.others_since()
    answer.add(
        comparison.name,
        rows,
        bytes=comparison.bytes,
        faults_per_call=faults,
        cores_used_by_others=others,
    )
    body = []
    for row in rows:
        assert row.ratio is not None  # there is a baseline
        speed = comparison.bytes / row.p50 / 1e9
        times = [f"{seconds * 1e6:.1f}" for seconds in (row.p20, row.p50, row.p80)]
        body.append(
            [row.name, *times, f"{speed:.1f}", f"{row.ratio:.3f}", f"{faults[row.name]:.0f}"]
        )
    head = ["", "p20 us", "p50 us", "p80 us", "GB/s", f"by {comparison.apart}", "faults"]
    print(f"\n{comparison.name}\n{text_table(head, body)}", flush=True)
    ratio = row_of(rows, comparison.fused).ratio
    assert ratio is not None
    if comparison.goal is not None:
        answer.judge(
            f"{comparison.name}: {comparison.fused} by {comparison.apart}",
            goal=f"<= {comparison.goal:g}",
            measured=f"{ratio:.3f}",
            met=ratio <= comparison.goal,
        )
