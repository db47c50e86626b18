import subprocess
import sys
from importlib import metadata

import pytest
import torch

from autocast_backend import cli
from autocast_backend.ops import KERNEL_TIER
from autocast_backend.policies import table as policies


def test_info_prints_what_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name: value.strip() for name, value in lines.items()}
    assert facts["torch"].startswith(torch.__version__)
    assert facts["kernel tier"] == f"{KERNEL_TIER.name}: {KERNEL_TIER.reason}"
    for device, tier in KERNEL_TIER.devices.items():
        assert facts[f"{device} kernels"] == f"{tier.name}: {tier.reason}"
    assert facts["native library"] == str(KERNEL_TIER.library or "none")
    assert KERNEL_TIER.cuda_reason in facts["CUDA library"]
    assert facts["backend"] == "autocast_backend.backend:smart_autocast"
    assert sys.executable in facts["python"]


def test_info_of_a_tier_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMART_AUTOCAST_KERNELS", "fastest")
    command = [sys.executable, "-m", "autocast_backend.cli", "info"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("smart-autocast: SMART_AUTOCAST_KERNELS must be native, triton")


def test_policies_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies", "--device", "mps"]) == 0
    rows = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert rows == {op: policy.value for op, policy in policies.TABLES["mps"].items()}
    assert list(rows) == sorted(rows)


def test_policies_of_all_device_types_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies"]) == 0
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == list(policies.ROWS)
    rows = {op: dict(zip(head, cells, strict=True)) for op, *cells in lines}
    for device_type, table in policies.TABLES.items():
        column = {op: cells[device_type] for op, cells in rows.items()}
        assert {op: c for op, c in column.items() if c != "-"} == {
            op: policy.value for op, policy in table.items()
        }


def test_check_is_quiet_where_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies", "--check"]) == 0
    printed = capsys.readouterr()
    assert [line.partition(":")[0] for line in printed.out.splitlines()] == list(policies.ROWS)
    assert printed.err == ""


def test_check_notices_what_a_newer_torch_registers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = policies.autocast_registrations

    def newer(device_type: str) -> list[str]:
        names = [n for n in real(device_type) if n != "aten::matmul"]
        return [*names, "aten::brand_new.out", "torchvision::nms"]

    monkeypatch.setattr(policies, "autocast_registrations", newer)
    assert cli.main(["policies", "--check", "--device", "xpu"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["xpu:", "brand_new.out", "matmul"]
    assert "has no row" in lines[1]
    assert "is not registered" in lines[2]
    assert cli.main(["policies", "--check"]) == 1


def test_policies_of_an_unknown_device_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies", "--device", "gpu"]) == 2
    assert capsys.readouterr().err == (
        "smart-autocast policies: --device: expected one of cpu, cuda, xpu, mps, mtia, maia; "
        "got 'gpu'\n"
    )


def test_a_reader_that_stops_early() -> None:
    command = f"{sys.executable} -m autocast_backend.cli policies | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stdout.split() == list(policies.ROWS)
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["inform"], ["info", "extra"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert "usage: smart-autocast" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"smart_autocast {metadata.version('smart_autocast')}\n"


def test_what_explain_needs_is_a_program_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain"])
    assert capsys.readouterr().err.endswith("the following arguments are required: PROGRAM\n")
