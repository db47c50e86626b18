"""What becomes of the tier of CUDA tensors when it does not run on the GPUs that are there. No GPU
is needed: those here are told of, and CUDA's kernels are called with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from autocast_backend import _gpus, _native, _triton, cli
from autocast_backend._gpus import Architecture, Gpu, problem_with
from autocast_backend._native import DeviceTier, KernelTier, KernelTierError
from autocast_backend.ops import KERNEL_TIER, gpus, triton
from tests.test_build import build  # noqa: F401 - a fixture

OPS = torch.ops.smart_autocast
OLD = Gpu(0, "Tesla T4", (7, 5))
HOPPER = Gpu(0, "NVIDIA H200", (9, 0))
CONSUMER = Gpu(1, "RTX 5090", (12, 0))
DEFAULT = "80-real 90"
AVAILABLE = {(7, 2), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)}


@pytest.mark.parametrize(
    ("architecture", "spelled", "capabilities"),
    [
        ("70-real", "7.0", {(7, 5)}),
        ("80-real", "8.0", {(8, 0), (8, 6), (8, 9)}),
        ("86-real", "8.6", {(8, 6), (8, 9)}),
        ("87-real", "8.7", {(8, 7)}),
        ("80", "8.0+PTX", {c for c in AVAILABLE if c >= (8, 0)}),
        ("90", "9.0+PTX", {(9, 0), (10, 0), (10, 3), (12, 0)}),
        ("90a", "9.0a+PTX", {(9, 0)}),
        ("100f", "10.0f+PTX", {(10, 0), (10, 3)}),
        ("120-real", "12.0", {(12, 0)}),
    ],
)
def test_architectures(
    architecture: str, spelled: str, capabilities: set[_gpus.Capability]
) -> None:
    parsed = Architecture.parse(architecture)
    assert str(parsed) == spelled
    assert {c for c in AVAILABLE if parsed.runs_on(c)} == capabilities


def test_all_that_a_build_may_be_asked_for_is_understood(
    build: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    monkeypatch.delenv("FORCE_CUDA", raising=False)
    for wanted in (build.CUDA_ARCHITECTURES, "7.5;9.0a;10.0f+PTX;12.1"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
        built_for = build.cuda_options()[-1].partition("=")[2].replace(";", " ")
        assert ";".join(str(Architecture.parse(name)) for name in built_for.split()) == wanted


@pytest.mark.skipif(
    KERNEL_TIER.build_info.get("cuda_architectures", "none") == "none", reason="no CUDA library"
)
def test_those_of_this_build_are_understood() -> None:
    for name in KERNEL_TIER.build_info["cuda_architectures"].split():
        assert str(Architecture.parse(name))


def test_problems() -> None:
    assert problem_with(DEFAULT, [HOPPER, CONSUMER]) is None
    assert problem_with(DEFAULT, []) is None
    assert problem_with(DEFAULT, [OLD, CONSUMER]) == (
        "the CUDA library is built for 8.0;9.0+PTX and does not run on cuda:0 (Tesla T4, 7.5); "
        "build it with TORCH_CUDA_ARCH_LIST='7.5;12.0', or hide such GPUs from this process "
        "(CUDA_VISIBLE_DEVICES)"
    )
    # No PTX for a newer one.
    assert "run on cuda:1 (RTX 5090, 12.0);" in (problem_with("80-real 90-real", [CONSUMER]) or "")


class Machine:
    """This process as one of a machine whose CUDA tensors have a tier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.libraries: list[torch.library.Library] = []
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "_queued_calls", [])
        monkeypatch.setattr(torch.cuda, "_initialized", False)
        monkeypatch.setattr(_triton, "_problem_with_package", lambda: None)
        monkeypatch.setattr(_triton, "_problem_with_launchers", lambda: None)
        monkeypatch.delenv(_triton.INTERPRETER_VARIABLE, raising=False)
        monkeypatch.setattr(
            triton, "KERNELS", {name: lambda *_: [torch.tensor(3.0)] for name in triton.KERNELS}
        )

    def library(self) -> torch.library.Library:
        self.libraries.append(torch.library.Library("smart_autocast", "FRAGMENT"))
        return self.libraries[-1]

    def watch(
        self, tier: str, *there: Gpu, forced: bool = False, initialized: bool = False
    ) -> KernelTier:
        """The tier after the package has been imported."""
        self.monkeypatch.setenv(_native.TIER_VARIABLE, tier if forced else "")
        self.monkeypatch.setattr(_gpus, "visible_gpus", lambda: list(there))
        self.monkeypatch.setattr(torch.cuda, "_initialized", initialized)
        if tier == "native":
            self.library().impl("multi_cast", lambda *_: [torch.tensor(7.0)], "CUDA")
        watched = replace(
            KERNEL_TIER,
            devices={"cpu": DeviceTier("native", "fast"), "cuda": DeviceTier(tier, "it loads")},
            build_info={"cuda_architectures": DEFAULT},
        )
        gpus.watch(watched, self.library())
        return watched

    def initialize_cuda(self) -> None:
        for call, _ in torch.cuda._queued_calls:
            call()

    def kernel(self) -> float:
        """What CUDA's kernel makes of 1: 7 the native one here, 3 Triton's, 1 PyTorch's."""
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        (result,) = OPS.multi_cast.default.redispatch(key, [torch.tensor(1.0)], torch.bfloat16)
        return float(result)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if torch.version.cuda is not None:
        pytest.skip("CUDA has kernels here")
    machine = Machine(monkeypatch)
    yield machine
    for library in machine.libraries:
        library._destroy()


def test_a_library_that_runs_on_the_gpus_stays(machine: Machine) -> None:
    tier = machine.watch("native", HOPPER, CONSUMER)
    machine.initialize_cuda()
    assert tier.devices["cuda"] == DeviceTier("native", "it loads")
    assert machine.kernel() == 7


@pytest.mark.parametrize("initialized", [False, True])
def test_the_next_tier_is_triton(machine: Machine, initialized: bool) -> None:
    def run() -> KernelTier:
        tier = machine.watch("native", OLD, CONSUMER, initialized=initialized)
        if not initialized:
            assert (tier.devices["cuda"].name, machine.kernel()) == ("native", 7)
            machine.initialize_cuda()
        return tier

    with pytest.warns(UserWarning, match="uses triton kernels for CUDA: the CUDA lib") as warned:
        tier = run()
    assert len(warned) == 1
    assert str(tier.devices["cuda"]).startswith("triton: the CUDA library is built for 8.0;9.0+PTX")
    assert "TORCH_CUDA_ARCH_LIST='7.5;12.0'" in tier.devices["cuda"].reason
    assert machine.kernel() == 3
    assert tier.devices["cpu"].name == "native"


@pytest.mark.parametrize("without", ["a GPU it compiles for", "its package"])
def test_where_triton_cannot_either(machine: Machine, without: str) -> None:
    if without == "its package":
        machine.monkeypatch.setattr(_triton, "_problem_with_package", lambda: "not installed")
    tier = machine.watch("native", *([OLD] if without != "its package" else [OLD, CONSUMER]))
    with pytest.warns(UserWarning, match="uses reference kernels for CUDA"):
        machine.initialize_cuda()
    found = tier.devices["cuda"]
    assert found.name == "reference"
    assert "does not run on cuda:0 (Tesla T4, 7.5)" in found.reason
    if without == "its package":
        assert found.reason.endswith("; no Triton: not installed")
    else:
        assert "no Triton: Triton's kernels need a GPU of capability 8.0 or newer" in found.reason
    assert machine.kernel() == 1


def test_all_of_the_tiers_kernels_are_replaced() -> None:
    assert set(gpus.REFERENCE_KERNELS) == set(triton.KERNELS)


def test_triton_alone(machine: Machine) -> None:
    tier = machine.watch("triton", OLD, CONSUMER)
    machine.initialize_cuda()
    assert tier.devices["cuda"].name == "triton"
    tier = machine.watch("triton", OLD)
    machine.initialize_cuda()
    assert str(tier.devices["cuda"]) == (
        "reference: it loads, but Triton's kernels need a GPU of capability 8.0 or newer, and "
        "there is cuda:0 (Tesla T4, 7.5)"
    )


@pytest.mark.parametrize("tier", ["native", "triton"])
def test_forced(machine: Machine, tier: str) -> None:
    """Before any work, at each attempt; where CUDA is initialised, when the package is imported."""
    found = machine.watch(tier, OLD, forced=True)
    text = f"^SMART_AUTOCAST_KERNELS={tier}: .*T4, 7.5"
    for _ in range(2):
        with pytest.raises(KernelTierError, match=text) as error:
            machine.initialize_cuda()
        remedy = "build it with TORCH_CUDA_ARCH_LIST='7.5'"
        assert (remedy in str(error.value)) == (tier == "native")
    assert found.devices["cuda"].name == tier
    with pytest.raises(KernelTierError):
        machine.watch(tier, OLD, forced=True, initialized=True)


def test_the_reference_tier_does_not_look(machine: Machine) -> None:
    machine.watch("reference", OLD, forced=True)
    assert torch.cuda._queued_calls == []


def test_info_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=available: there)
        cli.info()
    assert calls == ["init"]
