"""Kernels that start before the one ahead of them in the stream is done still wait for its work."""

from __future__ import annotations

import pytest
import torch

from autocast_backend import multi_cast
from autocast_backend.ops import KERNEL_TIER

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
cuda = pytest.importorskip("triton.language.extra.cuda")
launch_dependents = getattr(cuda, "gdc_launch_dependents", None)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="no kernel starts early before compute capability 9.0",
    ),
    pytest.mark.skipif(launch_dependents is None, reason="this Triton lets no kernel start early"),
]
BLOCKS, SIZE = 64, 1024
SLEEPS = 30  # of 10 us


@triton.jit
def copy_late(to, source, sleeps, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """It lets the next kernel start, and copies long after that."""
    launch_dependents()
    nothing = 0
    for _ in range(sleeps):
        nothing += tl.inline_asm_elementwise(
            "nanosleep.u32 10000; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    offsets = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(to + offsets, tl.load(source + offsets + nothing))


def numbers(value: float) -> list[torch.Tensor]:
    """Of which `multi_cast` with `out` makes a launch of its own kernel."""
    return list(torch.full((BLOCKS * SIZE,), value, dtype=torch.float32, device="cuda").chunk(3))


@pytest.mark.parametrize("attempt", range(3))
def test_what_is_read_has_been_written(attempt: int) -> None:
    tensors, source = numbers(0), torch.cat(numbers(attempt + 1))
    out = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
    copy_late[(BLOCKS,)](tensors[0]._base, source, SLEEPS, SIZE)
    multi_cast(tensors, torch.bfloat16, out=out)
    assert torch.equal(torch.cat(out), source.to(torch.bfloat16))


@pytest.mark.parametrize("attempt", range(3))
def test_what_is_written_has_been_read(attempt: int) -> None:
    out, found = numbers(attempt + 1), torch.zeros(BLOCKS * SIZE, device="cuda")
    tensors = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in out]
    before = torch.cat(out)
    copy_late[(BLOCKS,)](found, out[0]._base, SLEEPS, SIZE)
    multi_cast(tensors, torch.float32, out=out)
    assert torch.equal(found, before)
    assert not torch.cat(out).any()


def test_one_after_the_other() -> None:
    """Each reads what the one before has written, and all of them more than caches hold."""
    first = torch.randn(2**25, device="cuda")
    wanted, tensors = first.to(torch.bfloat16).float(), list(first.chunk(9))
    low = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
    for _ in range(50):
        multi_cast(tensors, torch.bfloat16, out=low)
        multi_cast(low, torch.float32, out=tensors)
    assert torch.equal(first, wanted)


@pytest.mark.skipif(KERNEL_TIER.devices["cuda"].name != "native", reason="the native kernels'")
def test_it_starts_early() -> None:
    tensors, source = numbers(0), torch.cat(numbers(1))
    out = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in tensors]

    def run() -> None:
        copy_late[(BLOCKS,)](tensors[0]._base, source, SLEEPS, SIZE)
        multi_cast(tensors, torch.bfloat16, out=out)
        torch.cuda.synchronize()

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    ranges = {event.name: event.time_range for event in profile.events()}
    (late,) = (ranges[name] for name in ranges if "copy_late" in name)
    (cast,) = (ranges[name] for name in ranges if "multi_cast_kernel" in name)
    assert late.start < cast.start < late.end < cast.end
