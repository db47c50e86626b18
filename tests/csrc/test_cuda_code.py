"""The CUDA kernels without a GPU: what nvcc makes of them, and their code run on the CPU."""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import autocast_backend

LIBRARY = Path(autocast_backend.__file__).with_name("libsmart_autocast_cuda.so")
CSRC = Path(__file__).parents[2] / "csrc"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
# Of a processor's 65,536 registers, blocks of 256 threads get them by eight for each thread: six
# such blocks, three quarters of all the threads that it takes.
MOST_REGISTERS = 40

INCLUDE = Path(torch.__file__).parent / "include"
COMPILER = shlex.split(os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CSRC.exists(), reason="needs the source tree"),
]


# How many kernels each op has: pairs of dtypes, and tables of two sizes.
KERNELS = {
    "multi_cast": 6 * 6 * 2,
    "unscale_cast": (4 + 3) * 2,
    "stochastic_cast": 4 * 2,
    "cast_with_stats": 4 * 2,
}


@functools.cache
def dumped(option: str, path: Path = LIBRARY) -> str:
    """What cuobjdump, of nvcc or of Triton, finds in a file of kernels."""
    triton = importlib.util.find_spec("triton")
    program = shutil.which("cuobjdump") or (
        triton
        and triton.origin
        and shutil.which("cuobjdump", path=Path(triton.origin).parent / "backends/nvidia/bin")
    )
    if not program:
        pytest.skip("needs cuobjdump")
    if not path.exists():
        pytest.skip(f"there is no {path.name}")
    done = subprocess.run([program, option, str(path)], capture_output=True, text=True, check=True)
    return done.stdout


def assert_registers_and_no_spills(resources: str, op: str) -> None:
    used = re.findall(rf"Function \S+_{op}_kernel_cu_\S+:\n +(.*)", resources)
    assert len(used) == KERNELS[op]
    for line in used:
        registers, stack, local = re.findall(r"(?:REG|STACK|LOCAL):(\d+)", line)
        assert int(registers) <= MOST_REGISTERS
        # The table stays where parameters are: nothing of it is copied to a thread's own memory.
        assert stack == local == "0"


@pytest.mark.parametrize("architecture", ["80", "90"])
@pytest.mark.parametrize("op", KERNELS)
def test_registers_and_spills(op: str, architecture: str) -> None:
    parts = dumped("-res-usage").split("\nFatbin ")
    built = [part for part in parts if part.startswith("elf") and f"sm_{architecture}\n" in part]
    if not built:
        pytest.skip(f"the library was not built for sm_{architecture}")
    assert_registers_and_no_spills("".join(built), op)


def test_tables_are_not_read_as_constants_of_instructions() -> None:
    """Whose cache the search for a block's tensor misses at each step: the index must not be in
    uniform registers."""
    kernels = dumped("-sass").split("Function : ")[1:]
    several = [kernel for kernel in kernels if "_cast_with_stats_kernel_cu_" not in kernel]
    if not several:
        pytest.skip("the library holds PTX alone")
    for kernel in several:
        assert re.search(r"\bLDC\S* R\d+, c\[0x0\]\[R\d+", kernel), kernel.split("\n")[0]
        assert not re.search(r"\bULDC\S* \S+, c\[0x0\]\[UR", kernel), kernel.split("\n")[0]


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_a_newer_architecture(tmp_path: Path) -> None:
    known = subprocess.run([str(NVCC), "--list-gpu-code"], capture_output=True, text=True).stdout
    if "sm_100" not in known.split():
        pytest.skip("this nvcc does not know sm_100")
    cubin = tmp_path / "out.cubin"
    command = [str(NVCC), "-cubin", "-std=c++20", "-arch=sm_100", "-o", str(cubin), "-DUSE_CUDA"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    command += ["-I", str(INCLUDE), str(CSRC / "ops/cuda/cast_with_stats_kernel.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_registers_and_no_spills(dumped("-res-usage", cubin), "cast_with_stats")


@pytest.mark.parametrize("op", KERNELS)
def test_stores_are_vectors_of_16_bytes(op: str) -> None:
    """In the code of the newest architecture, which newer ones compile anew."""
    targets = re.split(r"\n\.target sm_(\d+)\w*\n", dumped("-ptx"))  # and what stands after each
    if len(targets) == 1:
        pytest.skip("the library was built without PTX: TORCH_CUDA_ARCH_LIST without +PTX")
    newest = max(targets[1::2], key=int)
    parts = [p for target, p in zip(targets[1::2], targets[2::2], strict=True) if target == newest]
    named = [(k.split("(")[0], k) for part in parts for k in part.split(".entry ")[1:]]
    kernels = [(name, kernel) for name, kernel in named if f"_{op}_kernel_cu_" in name]
    assert len(kernels) == KERNELS[op]
    for name, kernel in kernels:
        stores = re.findall(r"st\.global\.(\S+)", kernel)
        vectors = [store for store in stores if re.fullmatch(r"v4\.[bfu]32|v2\.[bfu]64", store)]
        if op == "stochastic_cast":
            # Four numbers have random words in common: of 16 bits they fill half of it, of 8 a
            # quarter.
            packed = r"[bu]32" if "Float8" in name else r"[bu]64|v2\.[bfu]32"
            assert any(re.fullmatch(packed, store) for store in stores), name
            # What is read is on its way while random words are made, by this factor.
            load, words = kernel.index("ld.global.nc.v4"), kernel.index(str(0xD2511F53))
            assert load < words, name
        else:
            # One for each vector: two at once, a third that is left, and where loads are single
            # ones; or one at once. Where results are wider than what is read, too.
            assert len(vectors) in (4, 2), name
            # At both ends, and what is found.
            assert len(stores) - len(vectors) <= (6 if op == "cast_with_stats" else 3), name
        # What is read is as many elements, in no more loads than they need.
        assert re.search(r"ld\.global\.(nc\.)?v[24]\.", kernel), name
        assert "ld.param" in kernel, name
        if op == "unscale_cast":
            # A gradient may be written where it is: nothing but the scale is read as what never
            # changes.
            assert kernel.count("ld.global.nc") == 1, name
        if re.search(r"kernelIN3c101\dFloat8_e(4m3fn|5m2)E[fd]?Li", name):
            # To float8 none of the sixteen elements of a vector has a branch of its own.
            assert len(re.findall(r"@!?%p\d+ bra", kernel)) <= 16, name
        # Address spaces are known: a generic access would have to find out at run time.
        assert not re.search(r"\b(ld|st)\.(v\d\.)?[bfu]\d", kernel), name


def test_what_starts_early_waits_before_it_touches_memory() -> None:
    """Of each kernel that start_early starts, on each architecture on which it does."""
    parts = dumped("-ptx").split("\n.target sm_")[1:]
    newer = [part for part in parts if int(re.match(r"\d+", part)[0]) >= 90]  # type: ignore[index]
    if not newer:
        pytest.skip("the library holds no PTX of 9.0 or newer")
    kernels = [k for part in newer for k in part.split(".entry ")[1:]]
    early = [kernel for kernel in kernels if "_multi_cast_kernel_cu_" in kernel.split("(")[0]]
    assert len(early) == KERNELS["multi_cast"]
    for kernel in early:
        before, wait, after = kernel.partition("griddepcontrol.wait;")
        assert wait, kernel.split("(")[0]
        assert not re.search(r"\b(ld|st|red|atom)\.global", before), kernel.split("(")[0]
        assert "st.global" in after


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_thread_by_thread(tmp_path: Path) -> None:
    program = tmp_path / "emulate"
    source = Path(__file__).with_name("emulate_kernels.cpp")
    sanitizers = ["-Og", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [*COMPILER, "-std=c++20", *sanitizers, "-Wno-unknown-pragmas"]
    built = subprocess.run(
        [*command, f"-I{INCLUDE}", str(source), "-o", str(program)], capture_output=True, text=True
    )
    if "asan" in built.stderr and built.returncode != 0:
        pytest.skip("the compiler has no AddressSanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_what_is_loaded_in_a_capture(tmp_path: Path) -> None:
    """With a CUDA runtime of the test's own, in the place of its header, too."""
    (tmp_path / "cuda_runtime.h").write_text("#pragma once\n")
    program = tmp_path / "emulate"
    source = Path(__file__).with_name("emulate_captures.cpp")
    command = [*COMPILER, "-std=c++20", "-O1", "-DUSE_CUDA", f"-I{tmp_path}", f"-I{INCLUDE}"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr
