"""Random words and stochastic rounding in plain PyTorch, bit by bit as the kernels compute them.

The definition is the comment at the schema, in ``csrc/ops/stochastic_cast.cpp``. All numbers here
are int64, and wrap around where that is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
# Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), Philox4x32-10.
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Tensor, seed: int) -> Tensor:
    """The four random words, in [0, 2^32), of each 64-bit counter: int64 of shape (n, 4)."""
    key = seed & _LOW, seed >> 32 & _LOW
    c0, c1 = counter & _LOW, counter >> 32 & _LOW
    c2 = c3 = torch.zeros_like(counter)
    for _ in range(_ROUNDS):
        # int64 holds the 64 bits of a product modulo 2^64: both of its halves are right.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (second >> 32 & _LOW) ^ c1 ^ key[0], (first >> 32 & _LOW) ^ c3 ^ key[1]
        c1, c3 = second & _LOW, first & _LOW
        key = (key[0] + _KEY_STEPS[0]) & _LOW, (key[1] + _KEY_STEPS[1]) & _LOW
    return torch.stack([c0, c1, c2, c3], dim=1)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The numbers of a dtype narrower than float32, without an upper end."""

    fraction: int
    """Bits of the fraction."""
    bottom: int
    """The exponent, biased as float32's are, of the smallest number that is normal in both."""


GRIDS = {
    torch.bfloat16: Grid(fraction=7, bottom=0),  # what float32 has denormal, bfloat16 has too
    torch.float16: Grid(fraction=10, bottom=113),
    torch.float8_e4m3fn: Grid(fraction=3, bottom=121),
    torch.float8_e5m2: Grid(fraction=2, bottom=113),
}


def round_to_grid(values: Tensor, words: Tensor, grid: Grid) -> Tensor:
    """float32 numbers to neighbours on the grid, by random words of the same shape."""
    bits = values.view(torch.int32).long() & _LOW
    magnitude = bits & 0x7FFFFFFF
    dropped = 23 - grid.fraction
    # A carry out of the fraction is one more in the exponent: the next binade.
    normal = (magnitude + (words >> (32 - dropped))) >> dropped << dropped

    # Below the smallest normal number more bits are dropped, the leading one with them. All of what
    # is denormal as a float32 is less than a random word can tell from nothing.
    exponent = magnitude >> 23
    more = dropped + grid.bottom - exponent
    significand = (magnitude & 0x7FFFFF) | 0x800000
    quanta = significand >> more.clamp(0, 31)
    share = significand << (32 - more).clamp(0, 31) >> (more - 32).clamp(0, 31) & _LOW
    quanta = quanta + ((words + share) >> 32)
    quantum = 2.0 ** (grid.bottom - 127 - grid.fraction)
    denormal = quanta.float().mul(quantum).view(torch.int32).long()

    result = torch.where(exponent < grid.bottom, denormal, normal)
    result = torch.where(magnitude < 0x7F800000, result, magnitude) | (bits & 0x80000000)
    return result.to(torch.int32).view(torch.float32)
