"""Export, lower, save, load in a fresh process, run with four input dtypes: equal to eager
autocast, in dtypes and bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import autocast_backend.export
from autocast_backend._torch.autocast import wrap_with_autocast
from autocast_backend.graphs import nodes_of
from autocast_backend.ops import KERNEL_TIER
from tests.export.models import CASES, Case
from tests.export.run_programs import run, run_for_all_dtypes
from tests.support import assert_same_bits

ROOT = Path(__file__).parents[2]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All programs, exported, lowered and saved."""
    folder = tmp_path_factory.mktemp("programs")
    for case in CASES:
        program = case.export()
        lowered = autocast_backend.export.lower(program)
        assert str(lowered.graph_signature) == str(program.graph_signature)
        torch.export.save(lowered, folder / f"{case.name}.pt2")
    return folder


def results_of_a_fresh_process(folder: Path, mode: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.export.run_programs", str(folder), mode]
    # Sums of float32 numbers depend on how many threads share them.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    if mode != "package":  # as where this package is not installed: torch hears nothing of it
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.fixture(scope="module")
def with_package(folder: Path) -> dict[str, Any]:
    return results_of_a_fresh_process(folder, "package")


@pytest.fixture(scope="module")
def with_library(folder: Path) -> dict[str, Any]:
    if KERNEL_TIER.name != "native":
        pytest.skip(f"no library of the ops: {KERNEL_TIER.reason}")
    return results_of_a_fresh_process(folder, str(KERNEL_TIER.library))


@by_name
def test_every_dtype_in_a_fresh_process(case: Case, with_package: dict[str, Any]) -> None:
    """Inputs of each dtype with float32 parameters, and the whole model in each dtype. Where eager
    autocast refuses the mixture, the program does too."""
    expected = run_for_all_dtypes(case.model, case)
    ran = 0
    for (dtype, whole), outcome in expected.items():
        actual = with_package[case.name][dtype, whole]
        if isinstance(outcome, str):
            assert isinstance(actual, str), f"{dtype}, whole={whole}: eager raises {outcome}"
            continue
        assert not isinstance(actual, str), f"{dtype}, whole={whole}: {actual}"
        assert_same_bits(actual, outcome, f"{dtype}, whole={whole}")
        ran += 1
    assert ran >= 5


@by_name
def test_a_process_with_nothing_but_the_library(case: Case, with_library: dict[str, Any]) -> None:
    assert_same_bits(with_library[case.name], run(case.model(), case.inputs))


@by_name
def test_decomposed(case: Case) -> None:
    """`run_decompositions` takes a lowered program; smart casts become casts with dtypes."""
    lowered = autocast_backend.export.lower(case.export())
    if any(n.target is wrap_with_autocast for n in nodes_of(lowered.graph_module)):
        pytest.skip("a call stays under autocast")
    decomposed = lowered.run_decompositions({})
    targets = {str(n.target) for n in nodes_of(decomposed.graph_module)}
    assert not any("autocast" in t for t in targets)
    module = decomposed.module()
    for name, buffer in module.named_buffers():
        buffer.copy_(dict(case.model().named_buffers())[name])
    assert_same_bits(run(module, case.inputs), run(case.model(), case.inputs))


@by_name
def test_interpreted(case: Case) -> None:
    """`fx.Interpreter` runs the module's graph node by node."""
    module = autocast_backend.export.module(autocast_backend.export.lower(case.export()))
    outputs = fx.Interpreter(module).run(*case.inputs, enable_io_processing=False)
    assert_same_bits(outputs, torch.utils._pytree.tree_leaves(case.model()(*case.inputs)))
