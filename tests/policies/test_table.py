"""The policy tables, against the dispatcher and against what real autocast does to fake tensors."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from autocast_backend._torch.autocast import autocast_registrations
from autocast_backend.policies.table import (
    ROWS,
    TABLES,
    Policy,
    differences,
    find_policy,
    op_name,
    table,
)
from autocast_backend.state import AutocastState
from tests.conformance.calls import Tensors, arguments_of
from tests.conformance.one_call import call_under, tensors_of
from tests.support import capture, graph_of, lower_with_report, tensors

F32, BF16 = torch.float32, torch.bfloat16
REGISTERED = [
    (device_type, op)
    for device_type in ("cpu", "cuda", "xpu", "mps", "mtia")
    for op in TABLES[device_type]
    if f"aten::{op}" in autocast_registrations(device_type)
    if "dimname" not in op.lower() and ".names" not in op and op != "_cudnn_rnn"
]


@pytest.mark.parametrize("device_type", ROWS)
def test_the_table_is_what_the_dispatcher_has(device_type: str) -> None:
    found = differences(device_type)
    assert (found.missing, found.gone) == ((), ())
    assert found.equal >= 95


# Counted once in the dispatcher of each wheel: cpu, cuda, xpu, mps.
COUNTS = {
    "2.11.0+cu130": (129, 126, 123, 101),
    "2.12.1+cu130": (129, 127, 124, 101),
    "2.13.0+cpu": (127, 120, 117, 95),  # 119 of CUDA: this wheel has no cuDNN
    "2.14.1+cu130": (126, 121, 117, 95),
    "2.15.0+cu132": (126, 121, 117, 95),
}


@pytest.mark.parametrize("version", COUNTS)
def test_every_version_has_its_rows(version: str) -> None:
    assert tuple(len(table(d, version)) for d in ("cpu", "cuda", "xpu", "mps")) == COUNTS[version]


def test_a_nightly_is_taken_for_the_release_it_leads_to() -> None:
    assert "qr" in table("cpu", "2.13.0")
    for version in ("2.14.0.dev20260601", "2.14.0a0+gitabc", "2.14.0rc1", "2.14.0"):
        assert "qr" not in table("cpu", version)


def test_only_cudnns_op_may_be_absent() -> None:
    optional = {op for rows in ROWS.values() for op, row in rows.items() if row.optional}
    assert optional == {"_cudnn_rnn"}


@pytest.mark.parametrize("device_type", ROWS)
def test_overloads_of_one_op_share_a_policy(device_type: str) -> None:
    by_base: dict[str, set[Policy]] = {}
    for op, row in ROWS[device_type].items():
        by_base.setdefault(op.partition(".")[0], set()).add(row.policy)
    assert {op: policies for op, policies in by_base.items() if len(policies) > 1} == {}


def _seen(device_type: str, op: str) -> Policy | None:
    """The policy that real autocast is seen to follow, from the casts of float tensors that are
    all float32, all bfloat16, or bfloat16 first and float32 then; a dtype that is asked for stays
    where it is. An op that has no kernel on this machine raises after its casts."""
    packet, _, overload = op.partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload or "default")
    state = AutocastState.of({"device_type": device_type, "dtype": BF16})

    def casts(*dtypes: torch.dtype, **given: Any) -> tuple[list[torch.dtype | None], Any]:
        args, kwargs = arguments_of(op, Tensors(device_type, dtypes))
        did = call_under(state, target, args, {**kwargs, **given})
        floating = [t for t in tensors((args, kwargs)) if t.is_floating_point()]
        return [did.casts.get(id(t)) for t in floating], did

    takes_dtype = any(a.name == "dtype" for a in target._schema.arguments)
    with tensors_of(device_type):
        full, did = casts(F32)
        if did.error is not None and "unsafe to autocast" in did.error:
            return Policy.BANNED
        if set(full) == {BF16}:
            return Policy.LOWER_PRECISION_FP
        low, did = casts(BF16, **({"dtype": BF16} if takes_dtype else {}))
        if set(low) == {F32}:
            return Policy.FP32
        mixed, _ = casts(BF16, *[F32] * 10)
        if set(full) | set(low) == {None} and mixed[0] is F32 and set(mixed[1:]) == {None}:
            return Policy.PROMOTE
        _, did = casts(BF16)
        if set(low) == {None} and [t.dtype for t in did.values] == [F32]:
            return Policy.FP32_SET_OPT_DTYPE if takes_dtype else Policy.FP32_APPEND_DTYPE
    return None


@pytest.mark.parametrize(("device_type", "op"), REGISTERED)
def test_autocast_does_what_the_row_says(device_type: str, op: str) -> None:
    assert _seen(device_type, op) is TABLES[device_type][op]


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps", "mtia"])
@pytest.mark.parametrize("dtype", [torch.float16, F32], ids=str)
def test_a_composite_has_the_policy_of_what_it_calls(device_type: str, dtype: Any) -> None:
    state = AutocastState.of({"device_type": device_type, "dtype": torch.float16})
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, 4, dtype=dtype, device=device_type)
        report = lower_with_report(graph_of(torch.linalg.norm, (x,), {}, state), state)
    assert (report.lowered, report.bracketed) == (1, [])


@pytest.mark.parametrize("validate", ["dtype", "strict"])
def test_cross_entropy_of_float16_is_no_float32_op(validate: str) -> None:
    """Off the CPU it has no kernel for autocast: its log_softmax runs in float16, for it is given
    a dtype, and nll_loss in float32."""
    state = AutocastState.of({"device_type": "cuda", "dtype": torch.float16})
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, 4, dtype=torch.float16, device="cuda")
        target = torch.empty(4, dtype=torch.int64, device="cuda")
        module = graph_of(torch.nn.functional.cross_entropy, (x, target), {}, state)
        report = lower_with_report(module, state, validate)
    assert (report.lowered, len(report.bracketed)) == (1, 0)


def test_what_promotes_by_itself_is_left_alone() -> None:
    state = AutocastState.of({"device_type": "cuda", "dtype": torch.float16})
    with FakeTensorMode(), torch.no_grad():
        half, full = (
            torch.empty(4, dtype=torch.float16, device="cuda"),
            torch.empty(4, device="cuda"),
        )
        for op in (torch.add, torch.mul, torch.eq, torch.lt):
            report = lower_with_report(graph_of(op, (half, full), {}, state), state)
            assert (report.lowered, report.untouched, len(report.bracketed)) == (0, 1, 0), op


@pytest.mark.parametrize(
    "spelling",
    [
        torch.matmul,
        torch.ops.aten.matmul.default,
        torch.ops.aten.matmul,
        "matmul",
        "__matmul__",
        operator.matmul,
        torch.Tensor.matmul,
    ],
    ids=[
        "torch.matmul",
        "aten.matmul.default",
        "aten.matmul",
        "matmul",
        "__matmul__",
        "operator.matmul",
        "torch.Tensor.matmul",
    ],
)
def test_every_spelling_of_an_op_reaches_its_policy(spelling: Any) -> None:
    state = AutocastState.of({"device_type": "cpu", "dtype": torch.bfloat16})
    with FakeTensorMode():
        x = torch.empty(4, 4)
        module = graph_of(spelling, (x, x), {}, state)
    (call,) = [n for n in module.graph.nodes if n.op.startswith("call")]
    assert find_policy(op_name(call), "cpu") is Policy.LOWER_PRECISION_FP
    assert lower_with_report(module, state).lowered == 1


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_interpolation_with_antialiasing_is_another_op(mode: str) -> None:
    module = capture(
        lambda x: F.interpolate(x, 2, None, mode, antialias=True), torch.ones(1, 1, 4, 4)
    )
    (call,) = [n for n in module.graph.nodes if n.op.startswith("call")]
    assert op_name(call) == f"_upsample_{mode}2d_aa"


def test_a_device_type_without_a_table_has_no_policies() -> None:
    assert find_policy("matmul", "hpu") is None
