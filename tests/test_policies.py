"""The policy tables, against the dispatcher and against what real autocast does to fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from autocast_backend._torch.autocast import autocast_registrations
from autocast_backend.policies import TABLES, Policy, find_policy, op_name
from autocast_backend.state import AutocastState
from tests.support import graph_of, lower_with_report


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_table_has_every_op_the_dispatcher_has(device_type: str) -> None:
    registered = {name.removeprefix("aten::") for name in autocast_registrations(device_type)}
    registered = {name for name in registered if "::" not in name}  # ops of other libraries
    # Named tensors, gone from 2.13: their overloads have the policy of the op's other ones.
    named = {n for n in registered if "dimname" in n.lower() or n.startswith("norm.names")}
    assert registered - named - TABLES[device_type].keys() == set()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_overloads_of_one_op_share_a_policy(device_type: str) -> None:
    by_base: dict[str, set[Policy]] = {}
    for op, policy in TABLES[device_type].items():
        by_base.setdefault(op.partition(".")[0], set()).add(policy)
    assert {op: policies for op, policies in by_base.items() if len(policies) > 1} == {}


def _entries(lists: Any, names: tuple[str, ...]) -> Iterator[tuple[str, tuple, dict]]:
    for name in names:
        for entry in getattr(lists, name, []):
            kwargs = entry[2] if len(entry) > 2 and isinstance(entry[2], dict) else {}
            yield entry[0], entry[1], kwargs


_POLICY_LISTS = (
    "torch_16",
    "torch_fp16",
    "torch_fp32",
    "torch_need_autocast_promote",
    "nn_16",
    "nn_fp16",
    "nn_fp32",
    "methods_fp16",
    "methods_fp32",
)
# Fake tensors cannot answer for some ops without a GPU, or without a build of torch for it.
_NO_ANSWER = (RuntimeError, NotImplementedError, AssertionError, TypeError)


@pytest.mark.parametrize(
    ("device_type", "dtype"),
    [("cpu", torch.bfloat16), ("cuda", torch.float16)],
)
def test_pytorchs_own_lists_are_lowered(device_type: str, dtype: torch.dtype) -> None:
    """Every op of PyTorch's autocast tests is lowered and proved equal below autograd, not
    bracketed; but for `torch.norm`, a Python composite."""
    state = AutocastState.of({"device_type": device_type, "dtype": dtype})
    lists = {"cpu": AutocastCPUTestLists, "cuda": AutocastTestLists}[device_type]
    lowered, bracketed, asked = 0, [], 0
    with FakeTensorMode(), torch.no_grad():
        for op, args, kwargs in _entries(lists(torch.device(device_type)), _POLICY_LISTS):
            homes = (torch, torch._C._nn, F)
            target = next((getattr(m, op) for m in homes if hasattr(m, op)), op)
            try:
                module = graph_of(target, args, kwargs, state)
            except _NO_ANSWER:
                assert device_type == "cuda", op
                continue
            report = lower_with_report(module, state)
            asked += 1
            lowered += report.lowered
            bracketed += [b.call for b in report.bracketed]
    assert set(bracketed) <= {"norm"}
    assert lowered + len(bracketed) == asked >= 30


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
    ids=str,
)
def test_every_spelling_of_an_op_reaches_its_policy(spelling: Any) -> None:
    state = AutocastState.of({"device_type": "cpu", "dtype": torch.bfloat16})
    with FakeTensorMode():
        x = torch.empty(4, 4)
        module = graph_of(spelling, (x, x), {}, state)
    (call,) = [n for n in module.graph.nodes if n.op.startswith("call")]
    assert find_policy(op_name(call), "cpu") is Policy.LOWER_PRECISION_FP
    assert lower_with_report(module, state).lowered == 1


def test_a_device_type_without_a_table_has_no_policies() -> None:
    assert find_policy("matmul", "xpu") is None
