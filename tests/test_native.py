"""Finding and loading the native library; each case is a process of its own, on a copy."""

import importlib.machinery
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import autocast_backend
from autocast_backend import _native
from autocast_backend.ops import KERNEL_TIER
from tests.forked import forked

PACKAGE = Path(autocast_backend.__file__).parent
LIBRARY = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
# It looks for packages such as ours, and should find the copy.
END_OF_IMPORT = "import torch\ntorch._import_device_backends()\n"
REPORT = """
import torch, autocast_backend.ops as ops
print("TIER", ops.KERNEL_TIER.name, "|", ops.KERNEL_TIER.reason)
print("BF16", ops.autocast_to_bf16(torch.ones(3)).dtype)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package without libraries."""
    target = tmp_path / "autocast_backend"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return target


Report = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    """Runs a program beside a copy of the package, with the tier that a variable asks for."""
    with forked("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0") as run:

        def report(
            copy: Path, kernels: str = "", program: str = REPORT, **environment: str
        ) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, "SMART_AUTOCAST_KERNELS": kernels, **environment}
            return run(END_OF_IMPORT + program, env=environment, cwd=copy.parent)

        yield report


def error(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0, result.stdout
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("autocast_backend._native.KernelTierError: ")
    return last


def test_no_library_is_the_reference_tier_without_a_warning(report: Report, copy: Path) -> None:
    result = report(copy)
    assert result.returncode == 0, result.stderr
    assert (
        f"TIER reference | there is no native library: expected {copy / LIBRARY}" in result.stdout
    )
    assert "BF16 torch.bfloat16" in result.stdout
    assert "smart_autocast" not in result.stderr


def test_no_library_is_an_error_where_native_is_asked_for(report: Report, copy: Path) -> None:
    message = error(report(copy, "native"))
    assert "SMART_AUTOCAST_KERNELS=native: there is no native library: expected" in message
    assert "pip install -e . --no-build-isolation" in message


@pytest.mark.parametrize("kernels", ["", "native"])
def test_library_of_another_python(report: Report, copy: Path, kernels: str) -> None:
    (copy / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    result = report(copy, kernels)
    expected = (
        "the native library is for another Python: found _C.cpython-39-x86_64-linux-gnu.so, "
        f"expected {LIBRARY}; rebuild it with this Python and this torch: `pip install -e ."
    )
    if kernels == "native":
        assert expected in error(result)
    else:
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("smart_autocast runs without native kernels") == 1
        assert expected in result.stderr
        assert "TIER reference" in result.stdout


@pytest.mark.parametrize("kernels", ["", "native"])
def test_library_that_does_not_load(report: Report, copy: Path, kernels: str) -> None:
    """As one does that was built for a torch with other symbols."""
    (copy / LIBRARY).write_bytes(b"not a library")
    result = report(copy, kernels)
    assert "the native library does not load with torch" in result.stderr
    assert f"found {copy / LIBRARY}, expected one built for torch 2.11 or newer" in result.stderr
    if kernels == "native":
        error(result)
    else:
        assert result.returncode == 0
        assert "BF16 torch.bfloat16" in result.stdout


@pytest.mark.skipif(KERNEL_TIER.name != "native", reason="no native library in use")
@pytest.mark.parametrize("kernels", ["", "native"])
def test_library_with_a_missing_symbol(report: Report, copy: Path, kernels: str) -> None:
    """The real library, with one function of the stable ABI renamed to one that no torch has."""
    assert KERNEL_TIER.library is not None
    content = KERNEL_TIER.library.read_bytes()
    assert b"torch_call_dispatcher\0" in content
    (copy / LIBRARY).write_bytes(
        content.replace(b"torch_call_dispatcher\0", b"torch_call_dispatchxx\0")
    )
    result = report(copy, kernels)
    assert "undefined symbol: torch_call_dispatchxx" in result.stderr
    assert (result.returncode == 0) == (kernels == "")


@pytest.mark.skipif(KERNEL_TIER.name != "native", reason="no native library in use")
def test_library_of_other_sources(report: Report, copy: Path) -> None:
    assert KERNEL_TIER.library is not None
    shutil.copy(KERNEL_TIER.library, copy / LIBRARY)
    schemas = copy / "ops" / "schemas.py"
    text = schemas.read_text()
    schemas.write_text(text.replace('"cast": "(Tensor self,', '"cast": "(Tensor self, int new,'))
    message = error(report(copy))
    assert (
        "not of this version of the sources: expected smart_autocast::cast(Tensor self, int"
        in message
    )
    assert (
        "found smart_autocast::cast(Tensor self, ScalarType dtype) -> Tensor; rebuild it" in message
    )


def test_forced_reference_tier_loads_no_library(report: Report, copy: Path) -> None:
    (copy / LIBRARY).write_bytes(b"not a library")
    result = report(copy, "reference")
    assert "TIER reference | SMART_AUTOCAST_KERNELS=reference" in result.stdout
    assert "smart_autocast" not in result.stderr


@pytest.mark.skipif(KERNEL_TIER.name != "native", reason="no native library in use")
@pytest.mark.parametrize("gpus", [0, 1])
def test_native_is_asked_for_and_there_is_no_cuda_library(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU nobody would use it."""
    monkeypatch.setenv("SMART_AUTOCAST_KERNELS", "native")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(_native, "_load_cuda", lambda *_, **__: (None, "not built"))
    if gpus:
        with pytest.raises(_native.KernelTierError, match="a GPU, and the CUDA library is not bui"):
            _native.load.__wrapped__()
    else:
        assert _native.load.__wrapped__().devices["cuda"].name == "reference"


def test_unknown_tier(report: Report, copy: Path) -> None:
    expected = "must be native, triton or reference, got 'cuda'; unset it"
    assert expected in error(report(copy, "cuda"))


def test_kernels_tells_the_tier_in_use() -> None:
    assert autocast_backend.kernels() is KERNEL_TIER
    tiers = autocast_backend.kernels().devices
    assert tiers["cpu"].name == KERNEL_TIER.name
    assert tiers["cuda"].name in ("native", "triton", "reference")
