"""Casting many tensors: GB/s against `.to`, `_foreach_copy_` and the speed of a copy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.answer import Answer, text_table
from benchmarks.cast_cost import LARGE_BYTES, Measurement, measure, total_bytes
from benchmarks.cast_sets import MODELS, CastSet, cast_sets
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import percentile, row_of
from benchmarks.quiet import Moment, wait_until_quiet

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
COPY_SHARE, SMALL_SPEEDUP, MODEL_SPEEDUP = 0.90, 3.0, 1.15


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks casts", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="up to 64 MiB, few rounds: a minute")
    parse.add_argument("--sets", nargs="+", help="only sets whose names contain one of these")
    parse.add_argument("--models", nargs="*", choices=MODELS, help="default: all that fit")
    parse.add_argument(
        "--largest", type=positive_int, help="of single tensors, in MiB (default 4096)"
    )
    parse.add_argument("--source", choices=DTYPES, default="float32", help="of what is cast")
    parse.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="to cast to")
    parse.add_argument("--compiled", action="store_true", help="torch.compile as well: minutes")
    parse.add_argument(
        "--rounds", type=positive_int, help="default 20, half for large sets; quick: 6"
    )
    parse.add_argument("--threads", type=positive_int, help="of the CPU (default: torch's choice)")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--wait", type=float, default=0, help="for a quiet machine, seconds per set")
    parse.add_argument("--seed", type=int, default=0, help="of the order within each round")
    parse.add_argument("--out", type=Path, help="folder for the JSON (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 even where a target is missed: the numbers are the answer."""
    parse = parser()
    flags = parsed(parse, arguments)
    if flags.source == flags.dtype:
        parse.error(f"--source and --dtype are both {flags.dtype}: expected two dtypes")
    flags.rounds = flags.rounds or (6 if flags.quick else 20)
    flags.largest = flags.largest or (64 if flags.quick else 4096)
    if flags.models is None:
        flags.models = [name for name in MODELS if flags.device == "cuda" or "1.3b" not in name]
    sets = cast_sets(largest_kib=flags.largest * 2**10, models=flags.models)
    if flags.sets is not None:
        sets = _with_names(flags.sets, sets, parse)
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    pair = f"{flags.source}-to-{flags.dtype}"
    answer = Answer.to("casts" if pair == "float32-to-bfloat16" else f"casts-{pair}", flags)
    for cast_set in sets:
        _measure(cast_set, flags, answer)
        answer.save(flags.out, complete=False)
    print("\n" + answer.targets_table())
    print(f"\nwritten to {answer.save(flags.out)}")
    return 0


def _with_names(
    parts: Sequence[str], sets: Sequence[CastSet], parse: argparse.ArgumentParser
) -> list[CastSet]:
    """The sets whose names contain one of these; exits with 2 where one is in none of the names."""
    names = [one.name for one in sets]
    unknown = [part for part in parts if not any(part in name for name in names)]
    if unknown:
        parse.error(f"argument --sets: expected parts of the names {names}, got {unknown}")
    return [one for one in sets if any(part in one.name for part in parts)]


def _measure(cast_set: CastSet, flags: argparse.Namespace, answer: Answer) -> None:
    dtype, source = DTYPES[flags.dtype], DTYPES[flags.source]
    large = total_bytes(cast_set, dtype, source) >= LARGE_BYTES
    wait_until_quiet(at_most=flags.wait)
    start = Moment.now()
    found = measure(
        cast_set,
        dtype,
        device=flags.device,
        rounds=max(3, flags.rounds // 2) if large else flags.rounds,
        seed=flags.seed,
        compiled=flags.compiled,
        source=source,
    )
    others = start.others_since()
    title = f"{cast_set.name}, {flags.source} to {flags.dtype}"
    shares = {row.name: row.ratio for row in found.to_copy}
    answer.add(
        title,
        found.rows,
        tensors=len(cast_set.shapes),
        bytes=found.bytes,
        faults_per_call=found.faults,
        time_by_copy=shares,
        cores_used_by_others=others,
    )
    busy = "" if others is None else f", {others:.0%} of the cores used by others"
    print(f"\n{title}: {len(cast_set.shapes)} tensors, {found.bytes / 1e6:.3f} MB in and out{busy}")
    print(results_table(found), flush=True)
    _judge(cast_set, found, answer)


def results_table(found: Measurement) -> str:
    """Microseconds, GB/s, % of the copy's speed, times as fast as `.to`, page faults per call."""
    head = ["", "p20 us", "p50 us", "p80 us", "GB/s", "% of copy", "x .to", "faults"]
    body = []
    for row, by_copy in zip(found.rows, found.to_copy, strict=True):
        times = [f"{seconds * 1e6:.1f}" for seconds in (row.p20, row.p50, row.p80)]
        assert row.ratio is not None  # both have baselines
        assert by_copy.ratio is not None
        body.append(
            [
                row.name,
                *times,
                f"{found.bytes / row.p50 / 1e9:.1f}",
                f"{100 / by_copy.ratio:.0f}",
                f"{1 / row.ratio:.2f}",
                f"{found.faults[row.name]:.0f}",
            ]
        )
    return text_table(head, body)


def _judge(cast_set: CastSet, found: Measurement, answer: Answer) -> None:
    def at_least(what: str, goal: float, value: float, unit: str) -> None:
        answer.judge(
            f"{cast_set.name}: {what}",
            goal=f">= {goal:g}{unit}",
            measured=f"{value:.2f}{unit}",
            met=value >= goal,
        )

    def times_as_fast(name: str, other: str) -> float:
        pairs = zip(
            row_of(found.rows, name).samples, row_of(found.rows, other).samples, strict=True
        )
        return percentile([theirs / ours for ours, theirs in pairs], 50)

    def no_slower(what: str, value: float) -> None:
        answer.judge(
            f"{cast_set.name}: {what}",
            goal=f">= 1x, less the noise ({noise:.2f})",
            measured=f"{value:.2f}x",
            met=value >= 1 - noise,
        )

    noise = abs(1 - times_as_fast("control", ".to"))
    fresh, reused = times_as_fast("multi_cast", ".to"), times_as_fast("multi_cast out", ".to")
    if found.bytes >= LARGE_BYTES:
        share = times_as_fast("multi_cast out", "copy")
        at_least("speed of a copy, out", COPY_SHARE, share, "")
    if cast_set.kind == "small":
        at_least("by .to", SMALL_SPEEDUP, fresh, "x")
        at_least("by .to, out", SMALL_SPEEDUP, reused, "x")
    elif cast_set.kind == "model":
        at_least("by .to", MODEL_SPEEDUP, fresh, "x")
        at_least("by .to, out", MODEL_SPEEDUP, reused, "x")
    else:
        no_slower("by .to", fresh)
    no_slower("by .to, gradients on", times_as_fast("multi_cast grad", ".to grad"))
