"""PyTorch's own lists of ops and arguments for its autocast tests, through the lowering.

Compared on torch 2.13: 73 of the CPU's 75 entries, in bfloat16 and in float16 regions, and 114 of
CUDA's 121 entries, on fake tensors, forward only. `untouched` are ops that promote by themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from autocast_backend.state import AutocastState
from tests.conformance.one_call import NO_DEVICE, PINNED, call_under, compare, lowered, tensors_of
from tests.support import tensors

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
# A composite in Python, which calls an op of the policy fp32_set_opt_dtype.
BRACKETED = {"norm"}


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
            assert not report.bracketed or op in BRACKETED, report.bracketed
            found["lowered"] += report.lowered
            found["untouched"] += report.untouched
            found["bracketed"] += len(report.bracketed)
            ours = call_under(AutocastState.off(), module, tensors((args, kwargs)))
            compare(ours, eager, device_type == "cpu")
    if PINNED:
        assert tuple(found[f] for f in FATES) == expected
    assert found["lowered"] >= 37
