"""Lists of shapes to cast: single tensors, many small ones, and the parameters of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
SINGLE_KIB = (1, 16, 64, 256, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
SMALL_KIB = (1, 4, 16, 64)
SMALL_COUNT = 150


@dataclass(frozen=True, kw_only=True)
class CastSet:
    """A list of shapes. `kind` is "single", "small" (many small tensors) or "model"."""

    name: str
    kind: str
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        """Of all tensors together."""
        return sum(prod(shape) for shape in self.shapes)


def transformer(
    width: int, layers: int, outside: list[Shape], *, gated: bool = False
) -> tuple[Shape, ...]:
    """The parameters of `layers` blocks, as GPT-2 and ViT have them, after those outside of them;
    `gated`: as Llama has them."""
    if gated:
        inner = 2 * ((4 * width * 2 // 3 + 127) // 256 * 128)
        block = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)] + [(width,)] * 2
    else:
        weights = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        block = [*weights, *((shape[1],) for shape in weights), *[(width,)] * 4]
    return (*outside, *block * layers)


MODELS: dict[str, Callable[[], tuple[Shape, ...]]] = {
    "gpt2-small": lambda: transformer(768, 12, [(50257, 768), (1024, 768), (768,), (768,)]),
    "vit-b16": lambda: transformer(
        768,
        12,
        [
            (768, 3, 16, 16),
            (768,),
            (1, 1, 768),
            (1, 197, 768),
            (768,),
            (768,),
            (1000, 768),
            (1000,),
        ],
    ),
    "llama-1.3b": lambda: transformer(
        2048, 24, [(32000, 2048), (32000, 2048), (2048,)], gated=True
    ),
}


def sizes_name(kib: int) -> str:
    """ "64 KiB", "4 MiB", "1 GiB"."""
    for unit, factor in (("GiB", 2**20), ("MiB", 2**10)):
        if kib >= factor:
            return f"{kib // factor} {unit}"
    return f"{kib} KiB"


def cast_sets(*, largest_kib: int, models: list[str]) -> list[CastSet]:
    """All sets, by their sizes in float32, whatever is cast; single ones up to `largest_kib`."""
    single = [
        CastSet(name=f"1 x {sizes_name(kib)}", kind="single", shapes=((kib * 256,),))
        for kib in SINGLE_KIB
        if kib <= largest_kib
    ]
    small = [
        CastSet(
            name=f"{SMALL_COUNT} x {sizes_name(kib)}",
            kind="small",
            shapes=((kib * 8, 32),) * SMALL_COUNT,
        )
        for kib in SMALL_KIB
    ]
    chosen = [CastSet(name=name, kind="model", shapes=MODELS[name]()) for name in models]
    return [*single, *small, *chosen]
