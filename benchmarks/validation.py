"""What validation costs of a cold first step, in either of its modes, beside stock's Inductor."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import first_step
from benchmarks.answer import Answer, table
from benchmarks.first_step_worker import Case
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import row_of
from benchmarks.models import FORMS, MODELS

SHARE_LIMIT = 0.05


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks validation", description=__doc__)
    parse.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parse.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parse.add_argument("--layers", type=positive_int, default=4, help="of each model")
    parse.add_argument(
        "--rounds", type=positive_int, default=1, help="cold first steps of each candidate"
    )
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--seed", type=int, default=0, help="of the order within each round")
    parse.add_argument("--out", type=Path, help="folder for validation.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 even where a target is missed: the numbers are the answer."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("validation", flags)
    for model, form in itertools.product(flags.models, flags.forms):
        case = Case(
            model=model,
            form=form,
            layers=flags.layers,
            device=flags.device,
            dtype="bfloat16",
            backend="",
        )
        with tempfile.TemporaryDirectory() as scratch:
            phase = first_step.measure_validation(
                case, rounds=flags.rounds, seed=flags.seed, scratch=Path(scratch)
            )
        _tell(f"{model}, {form}", phase, answer)
        answer.save(flags.out, complete=False)
    print("\n" + answer.targets_table())
    print(f"\nwritten to {answer.save(flags.out)}")
    return 0


def _tell(name: str, phase: first_step.Phase, answer: Answer) -> None:
    records = {who: [asdict(one) for one in some] for who, some in phase.records.items()}
    answer.add(f"cold first step, {name}", phase.rows, records=records)
    print(f"\ncold first step, {name}\n{table(phase.rows)}", flush=True)
    stock = row_of(phase.rows, "stock").p50
    for mode in first_step.MODES:
        seconds = phase.stage_seconds(mode)["validation"]
        share = seconds / stock
        print(f"{mode}: {seconds * 1e3:.1f} ms, {share:.2%} of stock's cold first step")
        answer.judge(
            f"validation {mode!r} by stock's cold first step, {name}",
            goal=f"< {SHARE_LIMIT:.0%}",
            measured=f"{share:.2%}",
            met=share < SHARE_LIMIT,
        )
