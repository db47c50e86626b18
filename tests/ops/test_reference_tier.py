"""The tests of this folder again, on the reference tier: a tier is chosen once per process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autocast_backend.ops import KERNEL_TIER


@pytest.mark.skipif(KERNEL_TIER.name == "reference", reason="this is the reference tier")
def test_reference_tier(pytestconfig: pytest.Config) -> None:
    folder = Path(__file__).parent
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider"]
    # One of the programs that ask what is loaded when: the others have nothing to do with a tier.
    options += ["-k", "not test_op_namespace or test_an_op_is_there"]
    if share := pytestconfig.getoption("--share"):
        options += ["--share", share]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    result = subprocess.run(
        command,
        cwd=folder.parents[1],
        env={**os.environ, "SMART_AUTOCAST_KERNELS": "reference"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
