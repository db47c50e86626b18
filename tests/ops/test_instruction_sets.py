"""Kernels whose bits are not ATen's give the same ones with every instruction set."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autocast_backend import multi_cast, unscale_cast
from autocast_backend.ops import KERNEL_TIER
from tests.ops.smart_cast_suite import bits
from tests.ops.test_multi_cast_values import patterns


def digest() -> str:
    """Of what the ops make of numbers of every dtype, to every dtype."""
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    pools = [patterns(dtype)[::7] for dtype in dtypes]
    tensors = [pool[pool.isfinite()] for pool in pools]
    results = []
    for dtype in dtypes:
        results += unscale_cast(tensors, torch.tensor(3.0), dtype).tensors
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        results += multi_cast(tensors, dtype, rounding="stochastic", seed=5)
    return hashlib.sha256(torch.cat([bits(result) for result in results]).numpy()).hexdigest()


@pytest.mark.skipif(KERNEL_TIER.name != "native", reason="the native kernels'")
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_narrower_instruction_sets(capability: str) -> None:
    program = "from tests.ops.test_instruction_sets import digest; print(digest())"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == digest(), result.stderr[-2000:]
