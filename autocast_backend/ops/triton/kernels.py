"""What runs on the device, in Triton: importing this imports Triton.

All rounding to bfloat16 is integer arithmetic: Triton's interpreter, which the tests run on, rounds
float32 to bfloat16 otherwise than PyTorch does (3.7.1), and so the code that is tested is the code
that runs. bfloat16 therefore goes through memory as int16. So does float8, as int8: Triton's own
cast to float8_e4m3fn is not there before compute capability 8.9, and saturates (3.6, 3.7.1), where
PyTorch 2.11 makes NaN of 1e9.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(8)  # elements a thread takes side by side: 16 bytes of the 16-bit dtypes
ROW = tl.constexpr(5)  # int64 in a table for each tensor


@triton.jit
def from_e4m3(bits):
    """int32 with the bits of a float8_e4m3fn in the lowest 8, as float32."""
    magnitude = bits & 0x7F
    # The exponents' biases are 120 apart: denormal numbers, too, become what they are.
    number = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    number = tl.where(magnitude == 0x7F, float("nan"), number)
    sign = (bits & 0x80) << 24
    return (number.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def load(pointer, mask, DTYPE: tl.constexpr):
    """Elements in float64 where that is what they are, else, exactly, in float32."""
    value = tl.load(pointer, mask=mask, other=0)
    if tl.bfloat16 == DTYPE:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        value = value.to(tl.float32)
    elif tl.float8e4nv == DTYPE:
        value = from_e4m3(value.to(tl.int32))
    elif tl.float8e5 == DTYPE:
        # The upper half of a float16.
        value = (value.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def bfloat16_bits(value):
    """float32 rounded to nearest even, as int32 below 2**16; NaNs become 0x7fff, as
    cvt.rn.bf16.f32 makes them, and with it PyTorch on a GPU."""
    bits = value.to(tl.int32, bitcast=True)
    # The carry out of the fraction goes into the exponent, up to infinity, as it should.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FFF, rounded & 0xFFFF)


@triton.jit
def float8_bits(value, FRACTION: tl.constexpr, BOTTOM: tl.constexpr, BEYOND: tl.constexpr):
    """float32 rounded to nearest even, as int32 below 2**8: csrc/ops/float8.h, which says how."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    dropped: tl.constexpr = 23 - FRACTION
    rebias_and_half: tl.constexpr = (1 << (dropped - 1)) - 1 - ((BOTTOM - 1) << 23)
    magic: tl.constexpr = (BOTTOM + dropped) << 23
    denormal = magnitude < (BOTTOM << 23)
    few = tl.where(denormal, magnitude, 0).to(tl.float32, bitcast=True)
    base = tl.where(denormal, magic, magic).to(tl.float32, bitcast=True)
    small = (few + base).to(tl.int32, bitcast=True) - magic
    rounded = (magnitude + ((magnitude >> dropped) & 1) + rebias_and_half) >> dropped
    result = tl.where(denormal, small, tl.minimum(rounded, BEYOND))
    result = tl.where(magnitude > 0x7F800000, 0x7F, result)
    return result | ((bits >> 24) & 0x80)


@triton.jit
def convert(value, TO: tl.constexpr, BEYOND: tl.constexpr = 0x7F):
    """What `load` gave, as it is stored; float64 is rounded to float32 first, as PyTorch does.
    BEYOND: what float8_e4m3fn makes of numbers beyond it, without their sign."""
    if TO == tl.bfloat16:
        result = bfloat16_bits(value.to(tl.float32)).to(tl.int16)
    elif TO == tl.float16:
        result = value.to(tl.float32).to(tl.float16)
    elif TO == tl.float8e4nv:
        result = float8_bits(value.to(tl.float32), 3, 121, BEYOND).to(tl.int8)
    elif TO == tl.float8e5:
        result = float8_bits(value.to(tl.float32), 2, 113, 0x7C).to(tl.int8)
    else:
        result = value.to(TO)
    return result


@triton.jit
def pointer_to(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to DTYPE from an integer; ALIGNED: a multiple of 16 bytes."""
    address = address.to(tl.int64)  # one below 2**31 comes as 32 bits
    if tl.bfloat16 == DTYPE:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif tl.float8e4nv == DTYPE or tl.float8e5 == DTYPE:
        pointer = address.to(tl.pointer_type(tl.int8))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def main_mask(lanes, rest, ALIGNED: tl.constexpr):
    """Which of a tile's lanes are among the `rest` elements. ALIGNED: one truth for all of a
    vector, or it would be loaded one element at a time, and less than
    one vector is left for later."""
    if ALIGNED:
        mask = lanes // WIDTH < rest // WIDTH
    else:
        mask = lanes < rest
    return mask


@triton.jit
def cast_lanes(to, source, mask, TO: tl.constexpr, FROM: tl.constexpr, BEYOND: tl.constexpr):
    if TO == FROM:
        result = tl.load(source, mask=mask, other=0)  # NaNs, too, stay as they are
    else:
        result = convert(load(source, mask, FROM), TO, BEYOND)
    tl.store(to, result, mask=mask)


@triton.jit
def cast_tile(
    to,
    source,
    rest,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BEYOND: tl.constexpr,
):
    """The first min(rest, TILE) elements from `source` on."""
    lanes = tl.max_contiguous(tl.arange(0, TILE), TILE)
    cast_lanes(to + lanes, source + lanes, main_mask(lanes, rest, ALIGNED), TO, FROM, BEYOND)
    if ALIGNED and rest < TILE:
        few = rest // WIDTH * WIDTH + tl.arange(0, WIDTH)
        cast_lanes(to + few, source + few, few < rest, TO, FROM, BEYOND)


@triton.jit
def find_tile(
    table, size, TO: tl.constexpr, FROM: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):
    """What this program's tile is, by a table of `size` tensors.

    A row of it: the tensor's first tile, in the order of all; its elements; the addresses it goes
    to and comes from; one number more.

    Returns:
        Where the tile goes to and comes from, how many elements the tensor has from there on, how
        many it has before, and the number.
    """
    tile = tl.program_id(0).to(tl.int64)
    low = 0  # The tensor is the last one whose first tile is not after this one.
    high = size
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(table + middle * ROW) <= tile:
            low = middle
        else:
            high = middle
    row = table + low * ROW
    begin = (tile - tl.load(row)) * TILE
    rest = tl.load(row + 1) - begin
    to = pointer_to(tl.load(row + 2), TO, ALIGNED) + begin
    source = pointer_to(tl.load(row + 3), FROM, ALIGNED) + begin
    return to, source, rest, begin, tl.load(row + 4)


@triton.jit(do_not_specialize=["size"])
def multi_cast_kernel(
    table,
    size,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    BEYOND: tl.constexpr,
):
    """Many tensors, a tile for each program; BEYOND: see `convert`."""
    to, source, rest, _, _ = find_tile(table, size, TO, FROM, ALIGNED, TILE)
    cast_tile(to, source, rest, TO, FROM, ALIGNED, TILE, BEYOND)
