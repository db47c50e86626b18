"""`cast_with_stats` on the device: the cast, and four numbers in the same pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import WIDTH, convert, load, main_mask, pointer_to


@triton.jit
def cast_and_count(to, source, mask, TO: tl.constexpr, FROM: tl.constexpr):
    """Casts elements; of each its magnitude, NaNs apart, and whether it overflowed, underflowed and
    is NaN. Those that are masked out are zeros."""
    value = load(source, mask, FROM)
    result = convert(value, TO)
    tl.store(to, result, mask=mask)
    bits = result.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    if TO == tl.bfloat16:
        infinity = 0x7F80
    else:
        infinity = 0x7C00
    magnitude = tl.abs(value)
    nan = value != value
    overflow = (magnitude < float("inf")) & (bits == infinity)
    underflow = (magnitude > 0) & (bits == 0)
    return (
        tl.where(nan, 0.0, magnitude),
        overflow.to(tl.int32),
        underflow.to(tl.int32),
        nan.to(tl.int32),
    )


@triton.jit
def add_up(stats, amax, overflows, underflows, nans):
    """Into the numbers of all programs. Those are doubles, whose bits, as there are no negative
    ones and no NaNs, are in the same order as integers."""
    bits = tl.max(amax, 0).to(tl.float64).to(tl.int64, bitcast=True)
    tl.atomic_max(stats.to(tl.pointer_type(tl.int64), bitcast=True), bits)
    tl.atomic_add(stats + 1, tl.sum(overflows.to(tl.int64), 0).to(tl.float64))
    tl.atomic_add(stats + 2, tl.sum(underflows.to(tl.int64), 0).to(tl.float64))
    tl.atomic_add(stats + 3, tl.sum(nans.to(tl.int64), 0).to(tl.float64))


@triton.jit(do_not_specialize=["to", "source", "count", "tiles"])
def cast_with_stats_kernel(
    to,
    source,
    count,
    tiles,
    stats,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tensor of so many tiles, each program taking more than one. `stats` are zeros."""
    to = pointer_to(to, TO, ALIGNED)
    source = pointer_to(source, FROM, ALIGNED)
    lanes = tl.max_contiguous(tl.arange(0, TILE), TILE)
    amax = tl.zeros([TILE], tl.float64 if FROM == tl.float64 else tl.float32)
    overflows = tl.zeros([TILE], tl.int32)
    underflows = tl.zeros([TILE], tl.int32)
    nans = tl.zeros([TILE], tl.int32)
    tile = tl.program_id(0)
    while tile < tiles:
        begin = tile.to(tl.int64) * TILE
        rest = count - begin
        mask = main_mask(lanes, rest, ALIGNED)
        a, o, u, n = cast_and_count(to + begin + lanes, source + begin + lanes, mask, TO, FROM)
        amax = tl.maximum(amax, a)
        overflows += o
        underflows += u
        nans += n
        tile += tl.num_programs(0)
    add_up(stats, amax, overflows, underflows, nans)
    if ALIGNED and tl.program_id(0) == 0:
        few = count // WIDTH * WIDTH + tl.arange(0, WIDTH)
        a, o, u, n = cast_and_count(to + few, source + few, few < count, TO, FROM)
        add_up(stats, a, o, u, n)
