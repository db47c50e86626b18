"""Large results in memory that the system has just given: it is asked for huge pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from autocast_backend import multi_cast, unscale_cast
from autocast_backend.ops import KERNEL_TIER

SMAPS, HUGE = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage")
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
CACHE_BYTES = 1024 * int(CACHE.read_text().rstrip("K\n")) if CACHE.exists() else 32 << 20

pytestmark = [
    pytest.mark.skipif(KERNEL_TIER.name != "native", reason="the native kernels'"),
    pytest.mark.skipif(not (SMAPS.exists() and HUGE.exists()), reason="needs Linux's huge pages"),
]


def in_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether the middle of its memory may be: the flag that `madvise` sets."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in SMAPS.read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no such address")


def new_memory(elements: int) -> torch.Tensor:
    """Straight from the system: malloc may have memory that something was written to."""
    size = 2 * elements
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.bfloat16)


@pytest.fixture
def large() -> torch.Tensor:
    """A call with it moves 48 MiB; some caches are many times larger."""
    return torch.ones(8 << 20)


def test_new_results_are(large: torch.Tensor) -> None:
    first, second = new_memory(large.numel()), new_memory(large.numel())
    assert not in_huge_pages(first)
    multi_cast([large], torch.bfloat16, out=[first])
    unscale_cast([large], torch.tensor(1.0), torch.bfloat16, out=[second])
    for result in (first, second):
        assert in_huge_pages(result)
        assert bool((result == 1).all())


def test_what_was_written_to_and_what_is_small_is_left_alone(large: torch.Tensor) -> None:
    out = new_memory(large.numel()).zero_()
    multi_cast([large], torch.bfloat16, out=[out])
    assert not in_huge_pages(out)
    some = large[: min(CACHE_BYTES, 64 << 20) // 16]  # 6 bytes an element
    result = new_memory(some.numel())
    multi_cast([some], torch.bfloat16, out=[result])
    assert not in_huge_pages(result)
