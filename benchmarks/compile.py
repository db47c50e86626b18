"""What our compiling costs against stock's: first steps, lowering time, microseconds per call."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import call_cost, first_step, lowering
from benchmarks.answer import Answer, table, text_table
from benchmarks.first_step_worker import Case
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import percentile, row_of
from benchmarks.models import FORMS, MODELS

PARTS = ("first-step", "lowering", "calls")
OUR_PASSES = ("regions", "validation", "lowering", "weights")
SHARE_LIMIT, AMBIENT_LIMIT_US, EXPONENT_LIMIT = 0.05, 5.0, 1.1


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks compile", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="a small MLP, few rounds: 2 minutes")
    parse.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parse.add_argument("--models", nargs="+", choices=MODELS, help="default: all; quick: mlp")
    parse.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parse.add_argument("--layers", type=positive_int, help="of each model (default 4; quick: 2)")
    parse.add_argument(
        "--rounds", type=positive_int, default=1, help="cold first steps of each backend"
    )
    parse.add_argument("--warm-rounds", type=positive_int, help="warm ones (default 3; quick: 1)")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--seed", type=int, default=0, help="of the order within each round")
    parse.add_argument("--out", type=Path, help="folder for compile.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 even where a target is missed: the numbers are the answer."""
    flags = parsed(parser(), arguments)
    flags.models = flags.models or (["mlp"] if flags.quick else list(MODELS))
    flags.layers = flags.layers or (2 if flags.quick else 4)
    flags.warm_rounds = flags.warm_rounds or (1 if flags.quick else 3)
    answer = Answer.to("compile", flags)
    # Calls first: their microseconds suffer most from a machine that compiling has made hot.
    if "calls" in flags.only:
        _calls(flags, answer)
    if "lowering" in flags.only:
        _lowering(flags, answer)
    if "first-step" in flags.only:
        _first_steps(flags, answer)
    print("\n" + answer.targets_table())
    print(f"\nwritten to {answer.save(flags.out)}")
    return 0


def _first_steps(flags: argparse.Namespace, answer: Answer) -> None:
    dtype = "bfloat16"
    for model, form in itertools.product(flags.models, flags.forms):
        case = Case(
            model=model,
            form=form,
            layers=flags.layers,
            device=flags.device,
            dtype=dtype,
            backend="",
        )
        with tempfile.TemporaryDirectory() as scratch:
            phases = first_step.measure(
                case,
                rounds=flags.rounds,
                warm_rounds=flags.warm_rounds,
                seed=flags.seed,
                scratch=Path(scratch),
            )
        for name, phase in phases.items():
            title = f"{name} first step, {model}, {form}"
            records = {who: [asdict(one) for one in some] for who, some in phase.records.items()}
            cpu_rows = [asdict(row) for row in phase.cpu_rows]
            answer.add(title, phase.rows, cpu_rows=cpu_rows, records=records)
            print(f"\n{title}\n{table(phase.rows)}\n{_details(phase)}", flush=True)
        _judge_first_step(f"{model}, {form}", phases, answer)
        answer.save(flags.out, complete=False)


def _details(phase: first_step.Phase) -> str:
    ours = row_of(phase.rows, "ours").p50
    processor = ", ".join(f"{row.name} {row.p50:.2f} s" for row in phase.cpu_rows)
    ratio = row_of(phase.cpu_rows, "ours").ratio
    stages = ", ".join(
        f"{name} {seconds * 1e3:.1f} ms ({seconds / ours:.2%})"
        for name, seconds in phase.stage_seconds().items()
    )
    loading = ", ".join(
        f"{name} {percentile([one.load_seconds for one in some], 50) * 1e3:.0f} ms"
        for name, some in phase.records.items()
    )
    caches = "; ".join(f"{name} {some[-1].aot_cache}" for name, some in phase.records.items())
    losses = ", ".join(f"{name} {some[-1].loss:.6g}" for name, some in phase.records.items())
    lines = [
        f"processor time: {processor}, ratio {ratio:.3f}",
        f"our stages: {stages}",
        f"loading the backend: {loading}",
        f"AOTAutograd's cache: {caches}",
        f"loss: {losses}",
    ]
    return "\n".join(lines)


def _judge_first_step(name: str, phases: dict[str, first_step.Phase], answer: Answer) -> None:
    cold, warm = phases["cold"], phases["warm"]
    stages = cold.stage_seconds()
    share = sum(stages.get(stage, 0.0) for stage in OUR_PASSES) / row_of(cold.rows, "stock").p50
    answer.judge(
        f"our passes by stock's cold first step, {name}",
        goal=f"< {SHARE_LIMIT:.0%}",
        measured=f"{share:.2%}",
        met=share < SHARE_LIMIT,
    )
    ratio, cpu_ratio = (row_of(rows, "ours").ratio for rows in (warm.rows, warm.cpu_rows))
    assert ratio is not None  # rows of a comparison with a baseline have one
    answer.judge(
        f"warm first step by stock's, {name}",
        goal="<= 1",
        measured=f"{ratio:.3f} (processor time: {cpu_ratio:.3f})",
        met=ratio <= 1,
    )


def _lowering(flags: argparse.Namespace, answer: Answer) -> None:
    sizes = lowering.QUICK_SIZES if flags.quick else lowering.SIZES
    for kind in lowering.KINDS:
        rows, graphs = lowering.measure(
            kind, sizes=sizes, rounds=1 if flags.quick else 3, seed=flags.seed
        )
        nodes, seconds = [graph.nodes for graph in graphs], [row.p50 for row in rows]
        small = sum(n < lowering.LARGE for n in nodes)  # there, fixed costs hide the growth
        growth = lowering.exponent(nodes[small:], seconds[small:])
        title = f"lowering, {kind}"
        facts = [
            {"nodes": graph.nodes, "checked": graph.checked, "stages": graph.stages}
            for graph in graphs
        ]
        answer.add(title, rows, graphs=facts, exponent=growth)
        head = ["nodes", "validated", "seconds", "ns per node"]
        body = [
            [str(n), str(graph.checked), f"{s:.4f}", f"{s / n * 1e9:.0f}"]
            for n, s, graph in zip(nodes, seconds, graphs, strict=True)
        ]
        print(f"\n{title}\n{text_table(head, body)}")
        print(f"from {lowering.LARGE} nodes up: seconds ~ nodes ** {growth:.2f}", flush=True)
        answer.judge(
            f"growth of lowering time, {kind}",
            goal=f"exponent <= {EXPONENT_LIMIT}",
            measured=f"{growth:.2f}",
            met=growth <= EXPONENT_LIMIT,
        )
        answer.save(flags.out, complete=False)


def _calls(flags: argparse.Namespace, answer: Answer) -> None:
    rounds = 100 if flags.quick else 300
    measured = {}
    for setting in call_cost.settings(flags.device):
        rows = call_cost.measure(setting, rounds=rounds, seed=flags.seed)
        measured[setting] = rows
        title = f"call, {setting}"
        answer.add(title, rows)
        print(f"\n{title}\n{table(rows, unit='us')}", flush=True)
        answer.save(flags.out, complete=False)
    noise = call_cost.noise(list(measured.values())) * 1e6
    answer.sections["call noise us"] = noise
    for setting, rows in measured.items():
        looks = setting.autocast == "ambient" or setting.mode == "backward"  # at the state it is in
        limit = AMBIENT_LIMIT_US if looks else noise
        microseconds = call_cost.cost(rows) * 1e6
        answer.judge(
            f"call, {setting}: ours - stock",
            goal=f"<= {limit:.2f} us" + ("" if looks else " (noise)"),
            measured=f"{microseconds:+.2f} us",
            met=microseconds <= limit,
        )
    answer.save(flags.out, complete=False)
    torch.compiler.reset()
