"""Where there is no memory for a result, an op says what PyTorch says: programs look for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autocast_backend.ops import KERNEL_TIER
from tests.support import TORCH

PROGRAM = """
import resource
import torch
from autocast_backend.ops import (
    autocast_to_bf16, cast_with_stats, multi_cast, promote, unscale_cast
)

cast = torch.ops.smart_autocast.cast

scale, x = torch.tensor(2.0), torch.ones(2**24)  # 64 MiB
half = x.half()
parts = x[: 2**10].expand(2**14, 2**10)
few = x[:8]  # what is loaded at first use
cast_with_stats(few, torch.bfloat16), unscale_cast([few], scale), multi_cast([few], torch.half)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2**23
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for call in (
    lambda: x.double(),
    lambda: autocast_to_bf16(x),
    lambda: promote([half, scale]),
    lambda: cast(x, torch.float64),
    lambda: multi_cast([x], torch.float64),
    lambda: multi_cast([parts], torch.float64),
    lambda: multi_cast([x], torch.bfloat16, rounding="stochastic", seed=0, offset=0),
    lambda: cast_with_stats(x, torch.bfloat16),
    lambda: unscale_cast([x], scale),
):
    try:
        print("no error", call())
    except RuntimeError as error:
        print(str(error).replace(chr(10), " "))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory as Linux does")
@pytest.mark.skipif(
    KERNEL_TIER.name == "native" and TORCH < (2, 13), reason="torch cannot be asked before 2.13"
)
def test_the_error_is_torchs() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    expected, *found = result.stdout.splitlines()
    assert "can't allocate memory" in expected
    assert len(found) == 8
    where = expected.partition("DefaultCPUAllocator")[0]
    for line in found:
        assert line.startswith(where), line
        assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate" in line
