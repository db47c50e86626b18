"""Graphs with tensors on two device types, each with an autocast state of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backward.twin_device import NAME

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("second", [NAME, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_device_types(second: str) -> None:
    """The tests of two_device_types.py, with a second device type that is made for them, or a real
    one."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(HERE / "two_device_types.py")],
        cwd=HERE.parents[1],
        env={**os.environ, "SECOND_DEVICE_TYPE": second},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^10 passed", result.stdout, re.MULTILINE), result.stdout
