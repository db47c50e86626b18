"""Large results in memory that the system has just given: it is asked for huge pages."""

import re
from pathlib import Path

import pytest
import torch

from autocast_backend import cast_with_stats, multi_cast, unscale_cast
from autocast_backend.ops import KERNEL_TIER

SMAPS, HUGE = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage")
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

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


@pytest.fixture
def large() -> torch.Tensor:
    kilobytes = int(CACHE.read_text().rstrip("K\n")) if CACHE.exists() else 32 << 10
    # More than half of the cache, with a result that malloc has to ask the system for.
    return torch.ones(max(kilobytes << 8, 20 << 20))


def test_results_are(large: torch.Tensor) -> None:
    low = torch.bfloat16
    assert in_huge_pages(multi_cast([large], low)[0])
    assert in_huge_pages(cast_with_stats(large, low)[0])
    assert in_huge_pages(multi_cast([large], low, rounding="stochastic", seed=0)[0])
    assert in_huge_pages(unscale_cast([large], torch.tensor(2.0), low).tensors[0])


def test_what_is_there_is_left_alone(large: torch.Tensor) -> None:
    out = torch.ones_like(large, dtype=torch.bfloat16)
    assert not in_huge_pages(large)
    multi_cast([large], torch.bfloat16, out=[out])
    assert not in_huge_pages(out)
    assert not in_huge_pages(large)
