"""The program of the guide prints what the guide says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


@pytest.mark.slow
def test_the_program_of_the_guide() -> None:
    program, printed = re.findall(r"```(?:python)?\n(.*?)```", GUIDE.read_text(), re.DOTALL)[:2]
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == printed
