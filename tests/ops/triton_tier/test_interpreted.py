"""The tests of the ops on the Triton tier, its kernels run by Triton's interpreter on the CPU.

The interpreter takes milliseconds for each tile, so these are chosen: every kernel, every dtype,
aligned or not, every bit pattern of 16 bits and most of a million others of float32. All of them:
``SMART_AUTOCAST_KERNELS=triton TRITON_INTERPRET=1 python -m pytest tests/ops``, some minutes.
"""

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autocast_backend import cast_with_stats
from autocast_backend._native import TIER_VARIABLE
from autocast_backend.ops import KERNEL_TIER, triton

pytest.importorskip("triton")
HERE = Path(__file__).parent
interpreted = pytest.mark.skipif(
    KERNEL_TIER.devices["cpu"].name != "triton", reason="needs Triton's interpreter"
)
F64, F32, F16, BF16, E4M3, E5M2 = range(6)  # as test_multi_cast_values.py numbers them
CHOSEN = [
    "triton_tier/test_interpreted.py",
    "test_multi_cast.py",
    *(
        f"test_multi_cast_values.py::test_every_value_as_to_rounds_it[source{source}-target{target}]"
        for source in (F64, F32, F16, BF16)
        for target in (F16, BF16)
        if (source, target) != (F64, F16)
    ),
    *(
        f"test_multi_cast_values.py::test_every_value_as_to_rounds_it[source{source}-target{target}]"
        for source, target in (
            *((F32, E4M3), (BF16, E4M3), (F16, E5M2), (E4M3, F32), (E5M2, BF16)),
            *((E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)),
        )
    ),
    f"test_multi_cast_values.py::test_sizes_and_alignment[source{F32}-target{BF16}]",
    f"test_multi_cast_values.py::test_sizes_and_alignment[source{F32}-target{E4M3}]",
    "test_cast_with_stats.py::test_table",
    "test_cast_with_stats.py::test_equals_the_reference_on_every_value[source1-target1]",
    "test_cast_with_stats.py::test_equals_the_reference_on_every_value[source2-target0]",
    "test_cast_with_stats.py::test_float64_beyond_float32_overflows_too",
    "test_cast_with_stats.py::test_opcheck",
    "test_cast_with_stats.py::test_errors",
    "test_unscale_cast.py::test_mixtures",
    "test_unscale_cast.py::test_scale_of_zero_and_nan",
    "test_unscale_cast.py::test_what_the_cast_makes_infinite_counts_but_not_what_the_scale_does",
    "test_unscale_cast.py::test_opcheck",
    "test_unscale_cast.py::test_errors",
    "test_unscale_cast_out.py::test_into_other_tensors",
    "test_unscale_cast_out.py::test_strides_and_what_lies_between",
    "test_unscale_cast_out.py::test_in_place",
    "test_unscale_cast_out.py::test_errors",
    "test_stochastic_cast.py::test_mixtures",
    "test_stochastic_cast.py::test_seeds_and_offsets",
    "test_stochastic_cast.py::test_values_of_every_kind",
    "test_stochastic_cast.py::test_beyond_the_largest_number",
    "test_stochastic_cast.py::test_opcheck",
    "test_stochastic_cast.py::test_errors",
]

# Processors' own: who casts what is large, and what they do with denormal numbers.
NOT = "not one_large and not in_the_caches and not one_by_one and not denormal"


@pytest.mark.skipif(bool(os.environ.get(TIER_VARIABLE)), reason="this is the run of one tier")
def test_interpreted(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NOT]
    if share := pytestconfig.getoption("--share"):
        command += ["--share", share]
    result = subprocess.run(
        [*command, *(str(HERE.parent / chosen) for chosen in CHOSEN)],
        cwd=HERE.parents[2],
        env={**os.environ, TIER_VARIABLE: "triton", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert "passed" in result.stdout


@interpreted
def test_kernels_are_registered() -> None:
    for name in triton.KERNELS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"smart_autocast::{name}", "CPU")


@interpreted
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_the_kernels(monkeypatch: pytest.MonkeyPatch, target: torch.dtype) -> None:
    """To it and from it, and not ATen's."""
    from autocast_backend.ops.triton import launches

    seen = []
    real = launches.over_table

    def recorded(*args: Any, to: torch.dtype, source: torch.dtype, **others: Any) -> None:
        seen.append((source, to))
        real(*args, to=to, source=source, **others)

    monkeypatch.setattr(launches, "over_table", recorded)
    tensors = [torch.tensor([1.0, -3.3, 1e-3, torch.inf]), torch.ones(3, dtype=torch.float16)]
    results = torch.ops.smart_autocast.multi_cast.default(tensors, target)
    back = torch.ops.smart_autocast.multi_cast.default(results, torch.float32)
    (other,) = {torch.float8_e4m3fn, torch.float8_e5m2} - {target}
    torch.ops.smart_autocast.multi_cast.default(results, other)
    sources = [tensor.dtype for tensor in tensors]
    to_it, from_it = [(source, target) for source in sources], [torch.float32, other]
    assert seen == to_it + [(target, wanted) for wanted in from_it]
    seen.clear()
    torch.ops.smart_autocast.stochastic_cast.default([*tensors, *results], target, 1, 2)
    assert seen == [*to_it, (target, target)]
    seen.clear()
    scale = torch.tensor(2.0)
    (half, _), found = torch.ops.smart_autocast.unscale_cast.default(results, scale, torch.float32)
    assert seen == [(target, torch.float32)]
    assert found == float(not back[0].isfinite().all())
    assert torch.equal(half[:-1], back[0][:-1] / 2)
    for tensor, result, again in zip(tensors, results, back, strict=True):
        assert torch.equal(result.view(torch.uint8), tensor.to(target).view(torch.uint8))
        assert torch.equal(again.isnan(), result.float().isnan())
        assert torch.equal(again.nan_to_num(), result.float().nan_to_num())


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_addresses_below_32_bits(dtype: torch.dtype) -> None:
    """Triton takes a small number for one of 32 bits, an address, too; the heap of a Python that is
    no position-independent program is there."""
    map_32bit = 0x40
    low = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | map_32bit)
    tensor = torch.frombuffer(low, dtype=dtype, count=24)
    assert tensor.data_ptr() < 2**31
    tensor.copy_(torch.linspace(-1e6, 1e6, 24))
    result, stats = cast_with_stats(tensor, torch.float16)
    assert torch.equal(result, tensor.to(torch.float16))
    assert stats.overflows == result.isinf().sum() > 0


@interpreted
def test_places_past_32_bits() -> None:
    """The tile behind the first 2^32 elements of a tensor, of which only these are there."""
    from autocast_backend.ops.triton import kernels, launches

    tile, before, count = launches.TILE, 2**32, 100
    for source, to in ((torch.float32, torch.bfloat16), (torch.float64, torch.float32)):
        tensor = torch.randn(count, dtype=source)
        result = torch.zeros(count + 8, dtype=to)
        row = (
            -(before // tile),
            before + count,
            result.data_ptr() - before * to.itemsize,
            tensor.data_ptr() - before * source.itemsize,
            0,
        )
        aligned = launches.is_aligned(result.data_ptr(), tensor.data_ptr())
        variant = launches._variant(to, source, aligned, tile)
        kernels.multi_cast_kernel[1,](torch.tensor(row), 1, BEYOND=0x7F, **variant)
        assert torch.equal(result[:count], tensor.to(to))
        assert not result[count:].any()


@interpreted
def test_aligned_and_other_tensors_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from autocast_backend.ops.triton import launches

    seen = []
    real = launches._kernel("kernels", "multi_cast_kernel")

    class Recorder:
        def __getitem__(self, grid: object) -> object:
            def launch(table: torch.Tensor, size: int, **variant: object) -> None:
                seen.append((size, variant["ALIGNED"]))
                real[grid](table, size, **variant)

            return launch

    monkeypatch.setattr(launches, "_kernel", lambda module, name: Recorder())
    memory = torch.arange(64.0)
    tensors = [memory[:16], memory[4:20], memory[1:17], memory[20:40], memory[8:]]
    results = torch.ops.smart_autocast.multi_cast.default(tensors, torch.bfloat16)
    assert seen == [(4, True), (1, False)]
    for result, tensor in zip(results, tensors, strict=True):
        assert torch.equal(result, tensor.bfloat16())
