"""What happens when CUDA is initialised, on a GPU; tests/test_gpus.py has it without one. Each case
is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autocast_backend.ops import KERNEL_TIER

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KERNEL_TIER.devices["cuda"].name != "native", reason="the library's"),
]
PROGRAM = """
import os, torch, warnings
import autocast_backend.ops as ops

print("INITIALIZED", torch.cuda.is_initialized())
if "OTHER" in os.environ:
    ops.KERNEL_TIER.build_info["cuda_architectures"] = os.environ["OTHER"]
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    tensors = [torch.randn(1000 + i, device="cuda") for i in range(9)]
print("WARNED", *{str(one.message) for one in warned if "smart_autocast" in str(one.message)})
print("TIER", ops.kernels().devices["cuda"].name)
out = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
ops.multi_cast(tensors, torch.bfloat16, out=out)
print("RIGHT", all(torch.equal(a, b.bfloat16()) for a, b in zip(out, tensors)))
"""

CAPTURED = """
import torch
import autocast_backend.ops as ops

tensors = [torch.randn(1000 + i, device="cuda") for i in range(9)]
many = [torch.randn(10 + i % 7, device="cuda") for i in range(400)]  # a large table
scale = torch.tensor(2.0, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    stats = torch.ops.smart_autocast.cast_with_stats(tensors[0], torch.bfloat16)[1]
    cast = torch.ops.smart_autocast.multi_cast(tensors, torch.bfloat16)
    cast_many = torch.ops.smart_autocast.multi_cast(many, torch.float16)
    unscaled, _ = torch.ops.smart_autocast.unscale_cast(tensors, scale, torch.float32)
graph.replay()
print("RIGHT", all(torch.equal(a, b.bfloat16()) for a, b in zip(cast, tensors)),
      all(torch.equal(a, b.half()) for a, b in zip(cast_many, many)),
      all(torch.equal(a, b / 2) for a, b in zip(unscaled, tensors)),
      stats[0].item() == tensors[0].abs().max().item())
"""


def run(program: str = PROGRAM, **environment: str) -> tuple[dict[str, str], str]:
    """What the program says, and its errors."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SMART_AUTOCAST_KERNELS": "", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = (line.partition(" ") for line in result.stdout.splitlines())
    return {name: rest for name, _, rest in lines}, result.stderr


def test_a_library_for_this_gpu() -> None:
    said, errors = run()
    wanted = {"INITIALIZED": "False", "WARNED": "", "TIER": "native", "RIGHT": "True"}
    assert said == wanted, errors


def test_the_first_calls_may_be_captured() -> None:
    """The library joins the GPU's context, and its kernels are loaded, and asked how many registers
    they need, while nothing may be waited for; the first call begins with memory set to 0."""
    said, errors = run(CAPTURED)
    assert said == {"RIGHT": "True True True True"}, errors


def test_a_library_for_other_gpus() -> None:
    said, errors = run(OTHER="70-real")
    assert (said.get("TIER"), said.get("RIGHT")) == ("triton", "True"), errors
    assert said["WARNED"].startswith("smart_autocast uses triton kernels for CUDA: the CUDA lib")
    assert "built for 7.0 and does not run on cuda:0 (" in said["WARNED"]


def test_forced() -> None:
    said, errors = run(OTHER="70-real", SMART_AUTOCAST_KERNELS="native")
    assert said == {"INITIALIZED": "False"}
    assert "SMART_AUTOCAST_KERNELS=native: the CUDA library is built for 7.0 and does" in errors
    assert "build it with TORCH_CUDA_ARCH_LIST='" in errors
