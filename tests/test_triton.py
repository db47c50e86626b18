"""When the Triton tier is chosen, with no GPU needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autocast_backend import _native, _triton
from autocast_backend._native import KernelTierError
from tests.test_native import LIBRARY, Report, copy, report  # noqa: F401 - fixtures are among them

pytest.importorskip("triton")
CUDA_WITHOUT_A_GPU = "import torch; torch.version.cuda = '13.0'\n"
REPORT = """
import sys, torch, autocast_backend.ops as ops
tier = ops.kernels()
print("TIER", tier.name)
for device in ("cpu", "cuda"):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = [has(f"smart_autocast::{name}", device.upper()) for name in (
        "multi_cast", "multi_cast.out", "cast_with_stats", "unscale_cast", "stochastic_cast")]
    print(device.upper(), tier.devices[device], "| kernels", set(own))
print("IMPORTED", sys.modules.get("triton") is not None)
x = torch.randn(99)
print("RIGHT", torch.equal(ops.multi_cast([x, x], torch.bfloat16)[0], x.bfloat16()))
"""


def lines(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    return dict(line.split(" ", 1) for line in result.stdout.splitlines())


def test_cuda_without_a_native_library(report: Report, copy: Path) -> None:  # noqa: F811
    found = lines(report(copy, program=CUDA_WITHOUT_A_GPU + REPORT, TRITON_INTERPRET=""))
    assert found == {
        "TIER": "reference",
        "CPU": found["CPU"],
        "CUDA": "triton: there is no native library that loads; Triton compiles for CUDA "
        "| kernels {True}",
        "IMPORTED": "False",
        "RIGHT": "True",
    }
    assert found["CPU"].startswith("reference: there is no native library: expected")
    assert found["CPU"].endswith("| kernels {False}")


def test_without_the_package_all_works(report: Report, copy: Path) -> None:  # noqa: F811
    before = "import sys; sys.modules['triton'] = None\n" + CUDA_WITHOUT_A_GPU
    found = lines(report(copy, program=before + REPORT, TRITON_INTERPRET=""))
    assert found["CUDA"].startswith("reference: there is no native library that loads; no Triton:")
    assert found["CUDA"].endswith("| kernels {False}")
    assert (found["TIER"], found["RIGHT"]) == ("reference", "True")


def test_forced_and_interpreted(report: Report, copy: Path) -> None:  # noqa: F811
    (copy / LIBRARY).write_bytes(b"not a library")  # and is not loaded
    found = lines(report(copy, "triton", REPORT, TRITON_INTERPRET="1"))
    assert found == {
        "TIER": "triton",
        "CPU": "triton: SMART_AUTOCAST_KERNELS=triton, TRITON_INTERPRET=1: interpreted "
        "| kernels {True}",
        "CUDA": "reference: Triton's interpreter is for tensors on the CPU | kernels {False}",
        "IMPORTED": "False",
        "RIGHT": "True",
    }


def refused_by_force() -> str:
    with pytest.raises(KernelTierError) as refusal:
        _native._forced_triton()
    return str(refusal.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_forced_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = refused_by_force()
    assert "SMART_AUTOCAST_KERNELS=triton: Triton has neither a GPU that it compiles" in message
    assert "set TRITON_INTERPRET=1 to interpret the kernels, slowly, on the CPU; or" in message


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    message = "there is no triton package; install it: pip install triton"
    assert f"SMART_AUTOCAST_KERNELS=triton: {message}; or unset" in refused_by_force()
    tier = _native.without_native_cuda("no library")
    assert (tier.name, tier.reason) == ("reference", f"no library; no Triton: {message}")


def test_the_interpreter_is_not_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "the interpreter is for tensors on the CPU" in (_triton.problem_with_cuda() or "")


def test_launchers_need_a_compiler_and_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"does not find {tmp_path / 'Python.h'}" in (_triton.problem_with_cuda() or "")
    (tmp_path / "Python.h").touch()
    assert _triton.problem_with_cuda() is None
    (tmp_path / "gcc").unlink()
    assert "Triton needs a C compiler and finds none" in (_triton.problem_with_cuda() or "")
    monkeypatch.setenv("CC", "my-compiler")
    assert _triton.problem_with_cuda() is None
