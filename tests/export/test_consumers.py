"""What takes a lowered program further: AOTInductor and ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch.export import ExportedProgram

import autocast_backend.export
from tests.export.models import CASES, Buffers, Case, DynamicShapes, Transformer
from tests.support import tensors

by_name = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
# Each takes a C++ compiler seven seconds, and many more where others want its processor.
packaged = pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.make in (Transformer, DynamicShapes)],
    ids=lambda c: c.name,
)

# Inductor and ONNX keep intermediate results in other precisions than eager ops: a few units in the
# last place of the narrowest dtype of the program.
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


def assert_close(actual: Any, expected: Any) -> None:
    """The same dtypes and shapes, and nearly the same values."""
    pairs = list(zip(tensors(actual), tensors(expected), strict=True))
    assert pairs
    for a, e in pairs:
        torch.testing.assert_close(a, e, **TOLERANCE)  # of which it compares dtypes too


@pytest.mark.slow
@packaged
def test_an_aotinductor_package(case: Case, tmp_path: Path) -> None:
    lowered = autocast_backend.export.lower(case.export())
    path = torch._inductor.aoti_compile_and_package(
        lowered,
        package_path=str(tmp_path / "model.pt2"),
        # Of two files a program: precompiling headers and optimizing take longer than they do.
        inductor_configs={
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False,
        },
    )
    package = torch._inductor.aoti_load_package(path)
    assert_close(package(*case.inputs), case.model()(*case.inputs))


def through_onnx(program: ExportedProgram, case: Case) -> tuple[set[str], list[torch.Tensor]]:
    """The op types of an ONNX model, and what ONNX's reference evaluator computes with it."""
    exported = torch.onnx.export(program, case.inputs, dynamo=True, verbose=False)
    assert exported is not None
    nodes = list(exported.model.graph.all_nodes())
    assert {n.domain for n in nodes} == {""}  # ONNX's own ops alone
    return {n.op_type for n in nodes}, list(exported.call_reference(*case.inputs))


@by_name
def test_onnx(case: Case) -> None:
    """Smart casts become ONNX casts, without a translation table: `torch.onnx.export` decomposes
    composite ops before it translates."""
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs it")
    program = case.export()
    ops, actual = through_onnx(autocast_backend.export.lower(program), case)
    assert "Cast" in ops
    expected: Any = case.model()(*case.inputs)
    if case.make is Buffers:  # torch.onnx writes batch norm as in eval mode, without autocast too
        _, expected = through_onnx(program, case)
    if case.make is DynamicShapes:  # torch.onnx makes a bfloat16 sum float32, without autocast too
        actual[2] = actual[2].bfloat16()
    assert_close(actual, expected)


def test_onnx_asks_no_translation_table() -> None:
    """`custom_translation_table` with a smart cast in it is not even looked at."""
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs it")

    def translate(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked after all: the guide should say what to put here")

    case = CASES[0]
    lowered = autocast_backend.export.lower(case.export())
    op = torch.ops.smart_autocast.autocast_to_bf16.default
    assert any(n.target is op for n in lowered.graph.nodes)
    torch.onnx.export(
        lowered, case.inputs, dynamo=True, verbose=False, custom_translation_table={op: translate}
    )
