"""What casting a list costs before bytes count: microseconds and kernel launches by its length.

The tensors are small (1 KiB), so a call's time is that of its preparation: in Python, in the
dispatcher and, on a GPU, of the driver. There `host` is the time until the call returns, `device`
what the GPU takes for what has been queued before it begins: up to some 1,000 launches; with more
of them, as `.to` has for more tensors, the host's time is in it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.answer import Answer, text_table
from benchmarks.calls import MOST_CUDA_CALLS, calls_per_sample
from benchmarks.cast_cost import candidates
from benchmarks.cast_sets import CastSet
from benchmarks.flags import parsed, positive_int
from benchmarks.harness import (
    Row,
    Sampler,
    compare,
    device_sampler,
    host_sampler,
    interleave,
    row_of,
)
from benchmarks.quiet import Moment, wait_until_quiet

QUICK_LENGTHS, LENGTHS = (1, 148), (1, 2, 4, 8, 32, 148, 500, 1360, 2000)
SHAPE = (256,)
MODEL_LENGTH = 148  # GPT-2 small's
SPEEDUP = 3.0


def launches(function: Callable[[], object]) -> int:
    """Kernels that one call starts on the GPU."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        function()
        torch.cuda.synchronize()
    events = record.events()
    assert events is not None
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in events
    )


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks launch", description=__doc__)
    parse.add_argument("--quick", action="store_true", help=f"{QUICK_LENGTHS} tensors alone")
    parse.add_argument("--rounds", type=positive_int, help="default 30; quick: 5")
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--wait", type=float, default=0, help="for a quiet machine, seconds each")
    parse.add_argument("--seed", type=int, default=0, help="of the order within each round")
    parse.add_argument("--out", type=Path, help="folder for launch.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 even where a target is missed: the numbers are the answer."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("launch", flags)
    for length in QUICK_LENGTHS if flags.quick else LENGTHS:
        wait_until_quiet(at_most=flags.wait)
        _measure(length, flags, answer)
        answer.save(flags.out, complete=False)
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0


def _measure(length: int, flags: argparse.Namespace, answer: Answer) -> None:
    cast_set = CastSet(name=f"{length} tensors", kind="small", shapes=(SHAPE,) * length)
    functions = candidates(cast_set, torch.bfloat16, device=flags.device, compiled=False)
    del functions["copy"]
    rounds = flags.rounds or (5 if flags.quick else 30)
    calls = {name: calls_per_sample(function) for name, function in functions.items()}
    start = Moment.now()
    host = compare(
        interleave(
            {
                name: _on_idle_device(host_sampler(f, calls=calls[name]), flags.device)
                for name, f in functions.items()
            },
            rounds=rounds,
            warmup=1,
            seed=flags.seed,
        ),
        baseline="foreach out",
    )
    device: list[Row] = []
    kernels: dict[str, int] = {}
    if flags.device == "cuda":
        device = compare(
            interleave(
                {
                    name: device_sampler(f, calls=min(calls[name], MOST_CUDA_CALLS))
                    for name, f in functions.items()
                },
                rounds=rounds,
                warmup=1,
                seed=flags.seed,
            ),
            baseline="foreach out",
        )
        kernels = {name: launches(function) for name, function in functions.items()}
    others = start.others_since()
    title = f"{length} tensors of {math.prod(SHAPE) * 4} bytes"
    answer.add(f"{title}, host", host, kernel_launches=kernels, cores_used_by_others=others)
    if device:
        answer.add(f"{title}, device", device)
        _judge(length, device, kernels, answer)
    print(f"\n{title}\n{_table(length, host, device, kernels)}", flush=True)


def _on_idle_device(sampler: Sampler, device: str) -> Sampler:
    """Begins when the GPU has done what candidates before it have queued."""
    if device != "cuda":
        return sampler

    def sample() -> float:
        torch.cuda.synchronize()
        return sampler()

    return sample


def _table(length: int, host: list[Row], device: list[Row], kernels: dict[str, int]) -> str:
    head = ["", "host us", "a tensor"] + (["device us", "launches"] if device else [])
    body = []
    for row in host:
        line = [row.name, f"{row.p50 * 1e6:.1f}", f"{row.p50 * 1e6 / length:.2f}"]
        if device:
            line += [f"{row_of(device, row.name).p50 * 1e6:.1f}", str(kernels[row.name])]
        body.append(line)
    return text_table(head, body)


def _judge(length: int, device: list[Row], kernels: dict[str, int], answer: Answer) -> None:
    if length == MODEL_LENGTH:
        answer.judge(
            f"{length} tensors: launches of multi_cast out",
            goal="1",  # 0: the profiler saw nothing
            measured=str(kernels["multi_cast out"]),
            met=kernels["multi_cast out"] == 1,
        )
    if length >= MODEL_LENGTH:
        ratio = row_of(device, "multi_cast out").ratio
        assert ratio is not None  # there is a baseline
        answer.judge(
            f"{length} tensors: multi_cast out by foreach out, device",
            goal=f">= {SPEEDUP:g}x",
            measured=f"{1 / ratio:.2f}x",
            met=1 / ratio >= SPEEDUP,
        )
