"""Seconds, bytes and page faults of casting a list of tensors in every way there is.

Candidates of one comparison, all in the same rounds:

- `copy`: the limit. One copy that reads and writes as many bytes as the casts do, into memory that
  has been written before;
- `.to`: `[x.to(dtype) for x in xs]`, into new tensors; `multi_cast`: the same in one call;
- `control`: `.to` once more, and what it differs by is noise;
- `foreach out`: `torch._foreach_copy_` into tensors that are used again; `multi_cast out`: as well;
- `.to grad`, `multi_cast grad`: as the first two, where every tensor requires grad;
- `triton`, `triton out`: `multi_cast` by the kernels of the Triton tier, where a GPU has one;
- `compiled`: `.to` under `torch.compile`, into new tensors (only where asked for).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autocast_backend import multi_cast
from autocast_backend._triton import problem_with_cuda
from autocast_backend.ops import triton
from benchmarks.calls import sample_calls
from benchmarks.cast_sets import CastSet
from benchmarks.harness import Row, compare, percentile

# Where a pass over memory, not the call, is what takes the time.
LARGE_BYTES = 64 * 2**20
# Of smaller sets each candidate is measured with its tensors in several places: what the caches
# make of the memory that the heap happens to give differs by more than the candidates do.
PLACES = 5


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of one set.

    Attributes:
        rows: seconds per call of each candidate, compared with `.to`.
        to_copy: the same, compared with `copy`.
        faults: page faults per call of each candidate, the median over its samples.
        bytes: read and written by one call, together.
    """

    rows: list[Row]
    to_copy: list[Row]
    faults: dict[str, float]
    bytes: int


def candidates(
    cast_set: CastSet,
    dtype: torch.dtype,
    *,
    device: str,
    compiled: bool,
    source: torch.dtype = torch.float32,
) -> dict[str, Callable[[], object]]:
    """A function for each candidate, over tensors of its own: of `source`, to cast to `dtype`."""
    generator = torch.Generator(device).manual_seed(0)
    xs = [
        torch.randn(shape, generator=generator, device=device).to(source)
        for shape in cast_set.shapes
    ]
    with_grad = [x.detach().requires_grad_() for x in xs]
    out = [torch.empty_like(x, dtype=dtype) for x in xs]
    size = total_bytes(cast_set, dtype, source) // 2
    original = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(original)

    def to(tensors: list[Tensor]) -> list[Tensor]:
        return [x.to(dtype) for x in tensors]

    found: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(original),
        ".to": lambda: to(xs),
        "control": lambda: to(xs),
        "multi_cast": lambda: multi_cast(xs, dtype),
        "foreach out": lambda: torch._foreach_copy_(out, xs),
        "multi_cast out": lambda: multi_cast(xs, dtype, out=out),
        ".to grad": lambda: to(with_grad),
        "multi_cast grad": lambda: multi_cast(with_grad, dtype),
    }
    if device == "cuda" and problem_with_cuda() is None:
        found["triton"] = lambda: triton.ops.multi_cast(xs, dtype)
        found["triton out"] = lambda: triton.ops.multi_cast_out(xs, dtype, out=out)
    if compiled:
        torch.compiler.reset()
        function = torch.compile(to, fullgraph=True, dynamic=False)
        found["compiled"] = lambda: function(xs)
    return found


def total_bytes(cast_set: CastSet, dtype: torch.dtype, source: torch.dtype = torch.float32) -> int:
    """Read as `source` and written as `dtype`."""
    return cast_set.elements * (source.itemsize + dtype.itemsize)


def measure(
    cast_set: CastSet,
    dtype: torch.dtype,
    *,
    device: str,
    rounds: int,
    seed: int,
    compiled: bool = False,
    source: torch.dtype = torch.float32,
) -> Measurement:
    """All candidates on one set, `rounds` rounds with the tensors in each of several places."""
    samples: dict[str, list[float]] = {}
    faults: dict[str, list[float]] = {}
    size = total_bytes(cast_set, dtype, source)
    places = PLACES if device == "cpu" and size < LARGE_BYTES else 1
    random_bytes = random.Random(seed)
    for place in range(places):
        # Kept while the candidates are sampled: the heap gives them other memory than last time.
        padding = [torch.empty(random_bytes.randrange(2**20)) for _ in range(place)]
        functions = candidates(cast_set, dtype, device=device, compiled=compiled, source=source)
        seconds, counts = sample_calls(functions, device=device, rounds=rounds, seed=seed + place)
        for name in functions:
            samples.setdefault(name, []).extend(seconds[name])
            faults.setdefault(name, []).append(counts[name])
        del functions, padding
    return Measurement(
        rows=compare(samples, baseline=".to"),
        to_copy=compare(samples, baseline="copy"),
        faults={name: percentile(counts, 50) for name, counts in faults.items()},
        bytes=size,
    )
