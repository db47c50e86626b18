"""`stochastic_cast` on the device: random words by Philox4x32-10, and rounding by them.

The definition is the comment at the schema, in ``csrc/ops/stochastic_cast.cpp``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import WIDTH, convert, find_tile, load, main_mask


@triton.jit
def words(seed, counter, COUNT: tl.constexpr):
    """The random words of COUNT elements, uint32, from a 64-bit counter on: four of each."""
    counters = counter + tl.arange(0, COUNT // 4)
    low = counters.to(tl.uint32)
    high = (counters >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, low * 0, low * 0)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [COUNT])


@triton.jit
def round_to_grid(value, words, FRACTION: tl.constexpr, BOTTOM: tl.constexpr):
    """float32 to a neighbour among numbers with FRACTION bits of fraction, BOTTOM the exponent,
    biased as float32's are, of the smallest of them that is normal in both."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - FRACTION
    # A carry out of the fraction is one more in the exponent: the next binade.
    result = (magnitude + (words >> (32 - dropped))) >> dropped << dropped
    if BOTTOM > 0:
        # Below, more bits are dropped, the leading one with them.
        exponent = (magnitude >> 23).to(tl.int32)
        more = dropped + BOTTOM - exponent
        significand = (magnitude & 0x7FFFFF) | 0x800000
        quanta = significand >> tl.minimum(tl.maximum(more, 0), 31).to(tl.uint32)
        left = tl.minimum(tl.maximum(32 - more, 0), 31).to(tl.uint32)
        right = tl.minimum(tl.maximum(more - 32, 0), 31).to(tl.uint32)
        share = significand << left >> right
        quanta += (words + share < words).to(tl.uint32)  # it wraps around where both reach 2**32
        # 2**(BOTTOM - 127 - FRACTION), by its bits.
        quantum = tl.full([1], (BOTTOM - FRACTION) << 23, tl.int32).to(tl.float32, bitcast=True)
        denormal = quanta.to(tl.float32) * quantum
        result = tl.where(exponent < BOTTOM, denormal.to(tl.uint32, bitcast=True), result)
    result = tl.where(magnitude < 0x7F800000, result, magnitude) | (bits & 0x80000000)
    return result.to(tl.float32, bitcast=True)


@triton.jit
def stochastic_lanes(
    to,
    source,
    mask,
    words,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    FRACTION: tl.constexpr,
    BOTTOM: tl.constexpr,
    BEYOND: tl.constexpr,
):
    value = load(source, mask, FROM).to(tl.float32)
    rounded = round_to_grid(value, words, FRACTION, BOTTOM)
    tl.store(to, convert(rounded, TO, BEYOND), mask=mask)


@triton.jit(do_not_specialize=["size", "seed"])
def stochastic_cast_kernel(
    table,
    size,
    seed,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    FRACTION: tl.constexpr,
    BOTTOM: tl.constexpr,
    BEYOND: tl.constexpr,
):
    """Many tensors, a tile for each program; a row's last number is the tensor's first counter.
    BEYOND: see `convert`."""
    to, source, rest, begin, first = find_tile(table, size, TO, FROM, ALIGNED, TILE)
    counter = first + begin // 4
    lanes = tl.max_contiguous(tl.arange(0, TILE), TILE)
    mask = main_mask(lanes, rest, ALIGNED)
    some = words(seed, counter, TILE)
    stochastic_lanes(to + lanes, source + lanes, mask, some, TO, FROM, FRACTION, BOTTOM, BEYOND)
    if ALIGNED and rest < TILE:
        tail = rest // WIDTH * WIDTH
        few = tail + tl.arange(0, WIDTH)
        last = words(seed, counter + tail // 4, WIDTH)
        left = few < rest
        stochastic_lanes(to + few, source + few, left, last, TO, FROM, FRACTION, BOTTOM, BEYOND)
