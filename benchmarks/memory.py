"""Peak memory of a training step under autocast, and the order in which gradients get ready.

The model is nearly all weights, so the peak is made of casts and gradients: 4 bytes a parameter for
its gradient, 2 for its cast, 2 for the cast's gradient where that waits. Counted is what is
allocated during the step, at most at one time, less what there was before.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.answer import Answer, text_table
from benchmarks.flags import parsed
from benchmarks.training import candidates

CALLS = (1, 4)


class Tower(nn.Module):
    """Square layers, on a batch of 4."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """The most memory that was allocated at one time during a call, above what there was before.

    On the CPU from the profiler's record of every allocation, on CUDA from the allocator.
    """
    if device == "cuda":
        gc.collect()  # What candidates before it left in cycles would go during the call.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    results = record.profiler.kineto_results  # type: ignore[union-attr]
    changes = [event for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in changes), initial=0))


def step_of(
    model: nn.Module, x: Tensor, calls: int, ready: list[str], **compile_arguments: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A function that runs `calls` forwards in one autocast context and the backward of their sum,
    for a model of its own, and one that drops the gradients. `ready` gets the names of the
    parameters as they get theirs."""
    own = copy.deepcopy(model)
    for name, p in own.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    compiled = torch.compile(own, **compile_arguments) if compile_arguments else own

    def step() -> None:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            losses = [compiled(x).float().sum() for _ in range(calls)]
        torch.stack(losses).sum().backward()

    def clear() -> None:
        own.zero_grad()
        ready.clear()

    return step, clear


def measure(
    model: nn.Module, x: Tensor, calls: int, *, inner: str = "inductor"
) -> dict[str, tuple[int, list[str]]]:
    """Each candidate's peak in bytes in its third step, and the order of its gradients."""
    found = {}
    for name, arguments in candidates(inner).items():
        torch.compiler.reset()
        ready: list[str] = []
        step, clear = step_of(model, x, calls, ready, **arguments)
        for _ in range(2):
            step()
            clear()
        found[name] = (peak_bytes(step, x.device.type), list(ready))
    return found


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parse.add_argument("--quick", action="store_true", help="a smaller model")
    parse.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parse.add_argument("--out", type=Path, help="folder for memory.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Measure, judge and keep the answer."""
    flags = parsed(parser(), arguments)
    answer = Answer.to("memory", flags)
    torch.manual_seed(0)
    model = Tower(4 if flags.quick else 8, 256 if flags.quick else 1024).to(flags.device)
    parameters = sum(p.numel() for p in model.parameters())
    x = torch.randn(4, model.layers[0].in_features, device=flags.device)  # type: ignore[arg-type]
    for calls in CALLS:
        found = measure(model, x, calls)
        peak, order = found["eager"]
        title = f"{calls} calls in one context"
        answer.sections[title] = {
            "parameters": parameters,
            "peak_bytes": {name: bytes_ for name, (bytes_, _) in found.items()},
            "gradients_ready": {name: names for name, (_, names) in found.items()},
        }
        head = ["", "peak MB", "bytes a parameter", "gradients as eager's"]
        body = [
            [name, f"{b / 1e6:.1f}", f"{b / parameters:.2f}", "yes" if ready == order else "no"]
            for name, (b, ready) in found.items()
        ]
        print(
            f"\n{title}, {parameters / 1e6:.1f} M parameters\n{text_table(head, body)}", flush=True
        )
        mine, ready = found["ours, scope"]
        answer.judge(
            f"{title}: peak by eager's",
            goal="<= 1.01",
            measured=f"{mine / peak:.3f}",
            met=mine <= 1.01 * peak,
        )
        answer.judge(
            f"{title}: gradients ready in eager's order",
            goal="yes",
            measured="yes" if ready == order else "no",
            met=ready == order,
        )
        answer.save(flags.out, complete=False)
    print(f"\n{answer.targets_table()}\n\n{answer.save(flags.out)}")
    return 0
