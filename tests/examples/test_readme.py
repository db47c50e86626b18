"""The programs in the README run, and do what their comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"

CHECKS = """
assert loss.isfinite() and model[0].weight.grad.dtype == torch.float32
assert autocast_to_bf16(x).dtype == torch.bfloat16
wide = x.double()
assert autocast_to_bf16(wide) is wide
assert autocast_to_bf16(x, device_type="cuda") is x
assert [t.dtype for t in promote([x, x.bfloat16()])] == [torch.float32] * 2
assert [(t.dtype, t.shape) for t in low] == [(torch.bfloat16, w.shape) for w in weights]
assert (stats.overflows, stats.underflows) == (1, 1)
"""


@pytest.mark.slow
def test_the_programs_run() -> None:
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(programs) == 7
    # One fresh process: the first program must find the backend without an import of ours.
    command = [sys.executable, "-c", "\n".join([*programs, CHECKS])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "0.weight: float32 -> bfloat16, outside of the graph" in result.stdout
    assert "matmul -> float16, 16 of 16 infinite" in result.stdout
