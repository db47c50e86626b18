"""`unscale_cast` on the device: the cast, a product and a look for infinities in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import WIDTH, convert, find_tile, load, main_mask


@triton.jit
def unscale_lanes(to, source, mask, inverse, TO: tl.constexpr, FROM: tl.constexpr):
    """Whether an element, as TO has it before the product, is not finite: 1 or 0."""
    narrow = convert(load(source, mask, FROM), TO)
    if TO == tl.bfloat16:
        wide = (narrow.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif TO == tl.float16:
        wide = narrow.to(tl.float32)
    else:
        wide = narrow
    tl.store(to, convert(wide * inverse.to(wide.dtype), TO), mask=mask)
    finite = tl.abs(wide) < float("inf")
    return 1 - tl.min(finite.to(tl.int32), 0)


@triton.jit(do_not_specialize=["size"])
def unscale_cast_kernel(
    table,
    size,
    inverse,
    found,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Many tensors, a tile for each program. `inverse` and `found` point to one float32; 1 is
    written to the latter where a number is not finite."""
    to, source, rest, _, _ = find_tile(table, size, TO, FROM, ALIGNED, TILE)
    factor = tl.load(inverse)
    lanes = tl.max_contiguous(tl.arange(0, TILE), TILE)
    mask = main_mask(lanes, rest, ALIGNED)
    bad = unscale_lanes(to + lanes, source + lanes, mask, factor, TO, FROM)
    if ALIGNED and rest < TILE:
        few = rest // WIDTH * WIDTH + tl.arange(0, WIDTH)
        bad += unscale_lanes(to + few, source + few, few < rest, factor, TO, FROM)
    if bad > 0:
        tl.store(found, 1.0)
