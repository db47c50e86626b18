"""What one call of a compiled function costs: ours against stock, on a graph of one tiny op.

On such a graph the call is nearly all overhead: guards, wrappers, switching autocast off. Each
setting compares three candidates: `stock`, `control` (stock compiled once more: what it differs
from stock by is the noise of this comparison) and `ours`.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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

AUTOCAST = ("off", "region", "ambient")
PASSES = ("inference", "training", "backward")
INNERS = ("aot_eager", "inductor")
# Under half a millisecond, so that on a busy machine most samples run without being interrupted.
CALLS_PER_SAMPLE = 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One comparison.

    Attributes:
        autocast: `off` (none anywhere), `region` (in the function), `ambient` (around the call).
        mode: `inference` (under no_grad), `training` (the forward call, with gradients on) or
            `backward` (the backward call; under `ambient`, both are in it).
        inner: the compiler below; for stock it is the backend itself.
    """

    autocast: str
    mode: str
    inner: str
    device: str

    def __str__(self) -> str:
        return f"{self.autocast}, {self.mode}, {self.inner}"


def settings(device: str) -> list[Setting]:
    """Every combination of autocast, pass and inner compiler."""
    return [
        Setting(autocast=autocast, mode=mode, inner=inner, device=device)
        for inner, mode, autocast in itertools.product(INNERS, PASSES, AUTOCAST)
    ]


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _with_region(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return F.linear(x, weight)


def fresh_copy(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """The same function with its own code object.

    Dynamo keeps compiled code per code object: candidates that share one would search each
    other's entries at every call.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name)


def _compiled_call(setting: Setting, candidate: str) -> Callable[[], object]:
    function = _with_region if setting.autocast == "region" else _plain
    own = fresh_copy(function, f"{candidate}_{setting}".replace(", ", "_"))
    if candidate == "ours":
        compiled = torch.compile(own, backend="smart_autocast", options={"inner": setting.inner})
    else:
        compiled = torch.compile(own, backend=setting.inner)
    x = torch.randn(4, 4, device=setting.device)
    weight = torch.randn(4, 4, device=setting.device, requires_grad=True)
    if setting.mode != "backward":
        return lambda: compiled(x, weight)
    outputs: list[Tensor] = []

    def backward() -> object:
        if not outputs:
            outputs.append(compiled(x, weight))
        (out,) = outputs
        return torch.autograd.grad(out, weight, torch.ones_like(out), retain_graph=True)

    return backward


def measure(setting: Setting, *, rounds: int, seed: int) -> list[Row]:
    """Seconds per call of each candidate under `setting`, against stock, on one thread."""
    sampler: Callable[..., Sampler] = cuda_sampler if setting.device == "cuda" else host_sampler
    samplers = {
        candidate: sampler(_compiled_call(setting, candidate), calls=CALLS_PER_SAMPLE)
        for candidate in ("stock", "control", "ours")
    }
    ambient = torch.autocast(
        setting.device, dtype=torch.bfloat16, enabled=setting.autocast == "ambient"
    )
    with one_thread(), torch.set_grad_enabled(setting.mode != "inference"), ambient:
        samples = interleave(samplers, rounds=rounds, warmup=3, seed=seed)
    return compare(samples, baseline="stock")


def noise(comparisons: list[list[Row]]) -> float:
    """Seconds by which stock differs from itself: the largest over all comparisons."""
    return max(abs(_difference(rows, "control")) for rows in comparisons)


def cost(rows: list[Row]) -> float:
    """Seconds that a call of ours takes more than one of stock's."""
    return _difference(rows, "ours")


def _difference(rows: list[Row], name: str) -> float:
    difference = row_of(rows, name).difference
    assert difference is not None  # rows of a comparison with a baseline have one
    return difference
