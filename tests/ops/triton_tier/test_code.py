"""The code that Triton makes of the kernels, compiled ahead of time: no GPU is needed."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autocast_backend import _triton
from autocast_backend._native import TIER_VARIABLE
from autocast_backend.ops.stochastic import GRIDS
from autocast_backend.ops.triton import launches

pytest.importorskip("triton")
if _triton.interpreted() or os.environ.get(TIER_VARIABLE):
    pytest.skip("compiled once, where no tier is forced", allow_module_level=True)

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
THREADS = launches.WARPS * 32
OTHERS = {
    "multi_cast_kernel": {},
    "unscale_cast_kernel": {"inverse": "*fp32", "found": "*fp32"},
    "stochastic_cast_kernel": {"seed": "i64"},
}
MODULES = {
    "multi_cast_kernel": "kernels",
    "unscale_cast_kernel": "unscale_kernel",
    "stochastic_cast_kernel": "stochastic_kernel",
    "cast_with_stats_kernel": "stats_kernel",
}


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return


@functools.cache
def ptx(name: str, source: torch.dtype, to: torch.dtype, aligned: bool, architecture: int) -> str:
    """What a launch of a kernel would run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launches._kernel(MODULES[name], name)
    if name == "cast_with_stats_kernel":
        tile = launches.STATS_TILE
        signature = dict.fromkeys(("to", "source", "count"), "i64")
        signature["tiles"] = "i32"
        signature["stats"] = "*fp64"
        pointers = [4]
    else:
        tile = launches.TILE
        signature = {"table": "*i64", "size": "i32", **OTHERS[name]}
        pointers = [0]
    variant = launches._variant(to, source, aligned, tile)
    options = {key: variant[key] for key in launches.OPTIONS}
    constants = {key: value for key, value in variant.items() if key not in options}
    if name == "stochastic_cast_kernel":
        constants |= {"FRACTION": GRIDS[to].fraction, "BOTTOM": GRIDS[to].bottom}
    if name in ("multi_cast_kernel", "stochastic_cast_kernel"):
        constants["BEYOND"] = 0x7E
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature=signature | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            attrs={(index,): [["tt.divisibility", 16]] for index in pointers},
        ),
        target=GPUTarget("cuda", architecture, 32),
        options=options,
    )
    return compiled.asm["ptx"]


def accesses(code: str) -> tuple[Counter[int], Counter[int]]:
    """How many loads and stores of global memory there are, by their bytes."""
    found = {"ld": Counter[int](), "st": Counter[int]()}
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global(?:\.v(\d))?\.[bfsu](\d+)", code):
        found[kind][int(vector or 1) * int(bits) // 8] += 1
    return found["ld"], found["st"]


CASES = [
    *(("multi_cast_kernel", s, t) for s, t in [(f32, bf16), (bf16, f32), (f64, f16)]),
    ("unscale_cast_kernel", f16, f32),
    ("stochastic_cast_kernel", f32, bf16),
    ("cast_with_stats_kernel", f32, f16),
]


def test_a_product_is_rounded_by_itself() -> None:
    products = re.findall(r"\bmul\.\S*f32", ptx("unscale_cast_kernel", f16, f32, True, 90))
    assert set(products) == {"mul.rn.f32"}  # without .rn, ptxas may fuse it with an addition


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("name", "source", "to"), CASES)
def test_aligned_tiles_are_loaded_and_stored_by_16_bytes(
    name: str, source: torch.dtype, to: torch.dtype, architecture: int
) -> None:
    loads, stores = accesses(ptx(name, source, to, True, architecture))
    tile = launches.STATS_TILE if name == "cast_with_stats_kernel" else launches.TILE
    assert loads[16] == tile * source.itemsize // (THREADS * 16)
    assert stores[16] == tile * to.itemsize // (THREADS * 16)
    # Beside the tile there are the row of the table, and less than one vector at its end.
    assert set(loads) <= {16, 8, source.itemsize, 4}
    assert stores[to.itemsize] >= 1


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("float8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_by_8_bytes(float8: torch.dtype, architecture: int) -> None:
    """As many elements as float16 has in 16; also where there are no instructions for float8."""
    for name in ("multi_cast_kernel", "stochastic_cast_kernel"):
        loads, stores = accesses(ptx(name, f32, float8, True, architecture))
        assert loads[16] == launches.TILE * 4 // (THREADS * 16)
        assert stores[8] == launches.TILE // (THREADS * 8)
    for name in ("multi_cast_kernel", "unscale_cast_kernel"):
        loads, stores = accesses(ptx(name, float8, bf16, True, architecture))
        assert loads[8] >= launches.TILE // (THREADS * 8)
        assert stores[16] == launches.TILE * 2 // (THREADS * 16)


@pytest.mark.parametrize(("name", "source", "to"), CASES)
def test_other_tiles_are_not(name: str, source: torch.dtype, to: torch.dtype) -> None:
    loads, stores = accesses(ptx(name, source, to, False, 90))
    assert loads[16] == stores[16] == 0
    assert loads[source.itemsize] >= launches.STATS_TILE // THREADS
    assert set(stores) <= {to.itemsize, 4}


@pytest.mark.parametrize(("name", "source", "to"), CASES)
def test_denormal_numbers_are_kept_and_nothing_is_spilled(
    name: str, source: torch.dtype, to: torch.dtype
) -> None:
    code = ptx(name, source, to, True, 90)
    assert ".ftz" not in code
    assert ".local" not in code
