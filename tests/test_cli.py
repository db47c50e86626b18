import subprocess
import sys

import pytest
import torch

from autocast_backend import cli
from autocast_backend.ops import KERNEL_TIER


def test_info_prints_what_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name: value.strip() for name, value in lines.items()}
    assert facts["torch"].startswith(torch.__version__)
    assert facts["kernel tier"] == f"{KERNEL_TIER.name}: {KERNEL_TIER.reason}"
    assert facts["native library"] == str(KERNEL_TIER.library or "none")
    assert KERNEL_TIER.cuda_reason in facts["CUDA library"]
    assert facts["backend"] == "autocast_backend.backend:smart_autocast"
    assert sys.executable in facts["python"]


def test_info_of_a_tier_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMART_AUTOCAST_KERNELS", "triton")
    command = [sys.executable, "-m", "autocast_backend.cli", "info"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("smart-autocast: SMART_AUTOCAST_KERNELS=triton: there are no")


@pytest.mark.parametrize("arguments", [[], ["inform"], ["info", "extra"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert "usage: smart-autocast" in capsys.readouterr().err
