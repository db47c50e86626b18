"""PyTorch's own lists of ops and arguments for its autocast tests, through the lowering and through
the backend.

Compared on torch 2.13: 73 of the CPU's 75 entries, in bfloat16 and in float16 regions, and 114 of
CUDA's 121 entries, on fake tensors, forward only. `untouched` are ops that promote by themselves.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from autocast_backend.state import AutocastState
from tests.conformance.one_call import NO_DEVICE, PINNED, call_under, compare, lowered, tensors_of
from tests.support import assert_same_bits, tensors

BF16, F16 = torch.bfloat16, torch.float16
LISTS = {"cpu": AutocastCPUTestLists, "cuda": AutocastTestLists}

# What eager says where it cannot run an entry, whatever the compiler does.
NOT_CALLABLE = {
    "binary_cross_entropy": "unsafe to autocast",  # banned
    "cat": "prioritize",  # float16 in a bfloat16 region, or the other way round
    "einsum": "expected Tensor",  # the entry has no list of operands
    "equal": "DataDependentOutputException",
    "stack": "prioritize",
}
FATES = ("lowered", "untouched", "bracketed", "not callable")


def entries(device_type: str) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """(name, target, args, kwargs) of every entry; the CPU's lists have second arguments."""
    for name, rows in vars(LISTS[device_type](torch.device(device_type))).items():
        for op, args, *rest in rows:
            homes = (torch, torch._C._nn, torch._C._linalg)
            found = (getattr(home, op) for home in homes if hasattr(home, op))
            target = op if name.startswith("methods") else next(found)
            kwargs = next((extra for extra in rest if isinstance(extra, dict)), {})
            seconds = [e for e in rest if isinstance(e, tuple) and device_type == "cpu"]
            yield from ((op, target, given, kwargs) for given in (args, *seconds))


@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.parametrize(
    ("device_type", "dtype", "expected"),
    [
        ("cpu", BF16, (37, 36, 0, 2)),
        ("cpu", F16, (37, 36, 0, 2)),
        ("cuda", F16, (94, 20, 0, 7)),
    ],
)
def test_dtypes(device_type: str, dtype: torch.dtype, expected: tuple[int, ...]) -> None:
    state = AutocastState.of({"device_type": device_type, "dtype": dtype})
    found: Counter[str] = Counter()
    with tensors_of(device_type):
        for op, target, args, kwargs in entries(device_type):
            eager = call_under(state, target, args, kwargs)
            if eager.error is not None:
                assert re.search(NOT_CALLABLE.get(op, NO_DEVICE), eager.error), op
                found["not callable"] += 1
                continue
            module, report = lowered(target, args, kwargs, state)
            assert not report.bracketed, report.bracketed
            found["lowered"] += report.lowered
            found["untouched"] += report.untouched
            found["bracketed"] += len(report.bracketed)
            ours = call_under(AutocastState.off(), module, tensors((args, kwargs)))
            compare(ours, eager, device_type == "cpu")
    if PINNED:
        assert tuple(found[f] for f in FATES) == expected
    assert found["lowered"] >= 37


@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.parametrize(("device_type", "dtype"), [("cpu", BF16), ("cuda", F16)])
def test_through_the_backend(device_type: str, dtype: torch.dtype) -> None:
    """All calls of a list in one compiled function. PyTorch's own test of this is switched off
    where torch.compile is on."""
    state = AutocastState.of({"device_type": device_type, "dtype": dtype})

    def run(calls: list[Any], **compile_arguments: Any) -> list[list[torch.Tensor]]:
        torch._dynamo.reset()
        compiled = torch.compile(lambda: [c() for c in calls], fullgraph=True, **compile_arguments)
        with torch.no_grad(), state.applied():
            return [tensors(value) for value in compiled()]

    with tensors_of(device_type):
        calls = []
        for _, target, args, kwargs in entries(device_type):
            if call_under(state, target, args, kwargs).error is None:
                function = getattr(torch.Tensor, target) if isinstance(target, str) else target
                calls.append(functools.partial(function, *args, **kwargs))
        counters.clear()
        ours = run(calls, backend="smart_autocast", options={"inner": "eager"})
        counted = counters["smart_autocast"]
        assert counted["lowered"] >= 37
        assert counted["bracketed"] == 0
        eager = run(calls, backend="eager")
    if device_type == "cpu":
        assert_same_bits(ours, eager)
    dtypes = [[t.dtype for t in value] for value in ours]
    assert dtypes == [[t.dtype for t in value] for value in eager]
