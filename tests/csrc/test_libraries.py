"""The built libraries: the stable ABI and nothing else of PyTorch, and the facts of module `_C`."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import autocast_backend
from autocast_backend._native import CUDA_LIBRARY
from autocast_backend.ops import KERNEL_TIER

CSRC = Path(__file__).parents[2] / "csrc"
FOLDER = Path(autocast_backend.__file__).parent
LIBRARIES = sorted([*FOLDER.glob("_C.*.so"), *FOLDER.glob(CUDA_LIBRARY)])

native = pytest.mark.skipif(KERNEL_TIER.name != "native", reason="no native library in use")


def nm(library: Path, *options: str) -> list[str]:
    if shutil.which("nm") is None:
        pytest.skip("needs nm (binutils)")
    command = ["nm", "-D", "-C", *options, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_needs_only_the_stable_abi(library: Path) -> None:
    """PyTorch's C++ symbols change with every release, the stable ABI's C functions do not."""
    undefined = [line.split(maxsplit=1)[-1].removeprefix("U ") for line in nm(library, "-u")]
    assert any(symbol.startswith("torch_library_impl") for symbol in undefined)
    assert [s for s in undefined if re.search(r"\b(c10|at|torch|caffe2)::", s)] == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_exports_only_what_is_loaded_by_name(library: Path) -> None:
    """Another extension's symbols (or a second CUDA runtime's) must not mix with ours."""
    strong = [line.split()[-1] for line in nm(library, "--defined-only") if " T " in line]
    assert set(strong) <= {"PyInit__C", "_init", "_fini"}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_holds_no_path_of_the_builder(library: Path) -> None:
    assert str(CSRC.parent).encode() not in library.read_bytes()


def test_one_schema_per_file_named_for_its_op() -> None:
    for path in (CSRC / "ops").glob("*.cpp"):
        defined = re.findall(r'm\.def\(\s*"(\w+)\(', path.read_text())
        assert defined == [path.stem]
    for path in (CSRC / "ops").glob("*/*_kernel.*"):
        assert (CSRC / "ops" / f"{path.stem.removesuffix('_kernel')}.cpp").exists()


@native
def test_build_info() -> None:
    from autocast_backend import _C

    info = _C.build_info()
    assert list(info) == ["torch", "python", "compiler", "cuda_architectures"]
    assert info["python"] == platform.python_version()
    assert torch.torch_version.TorchVersion(info["torch"]) >= "2.11"
    assert re.match(r"(GCC|Clang) \d+\.", info["compiler"])
    assert (info["cuda_architectures"] == "none") == (not (FOLDER / CUDA_LIBRARY).exists())


@native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have one capability")
def test_cpu_capability_is_the_one_that_aten_sees() -> None:
    from autocast_backend import _C

    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("ATen is told to use another")
    assert _C.cpu_capability() in ("AVX512", "AVX2", "DEFAULT")
    assert torch.backends.cpu.get_cpu_capability().startswith(_C.cpu_capability())


@native
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux writes down who made a CPU")
def test_cpu_vendor_is_the_one_that_linux_sees() -> None:
    from autocast_backend import _C

    found = re.search(r"^vendor_id\s*: (\w+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    names = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
    assert _C.cpu_vendor() == names.get(found[1] if found else "", "other")


@native
def test_cuda_library_is_loaded_exactly_where_torch_has_cuda() -> None:
    built = (FOLDER / CUDA_LIBRARY).exists()
    expected = built and torch.version.cuda is not None
    assert (KERNEL_TIER.cuda_library is not None) == expected
    assert (KERNEL_TIER.cuda_reason == "loaded") == expected
