"""Each op that autocast registers, under real autocast and lowered: dtype for dtype the same.

A call is lowered once, for float32 tensors; the graph then serves the other dtypes too. Compared
are the ops below autograd with the dtypes they get, the dtypes of the results, and on the CPU their
bits. The other device types run on fake tensors, forward only.

On torch 2.13, of 458 registrations, 440 are lowered, 4 stay under autocast with the same result,
and 14 cannot be called: 12 for want of a device, and 2 are banned.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from autocast_backend._torch.autocast import autocast_registrations
from autocast_backend.state import AutocastState
from tests.conformance.calls import Tensors, arguments_of
from tests.conformance.one_call import (
    NO_DEVICE,
    NO_KERNEL,
    PINNED,
    call_under,
    compare,
    lowered,
    tensors_of,
)
from tests.support import autocast_put_right, lower_with_report, tensors

F32, F64 = torch.float32, torch.float64
BF16, F16 = torch.bfloat16, torch.float16
# The dtype of the region -> dtypes of the tensors of a call, in turn.
DTYPES = {
    BF16: ([F32], [BF16], [F64], [F32, BF16], [BF16, F32, F32]),
    F16: ([F32], [F16]),
}

REGISTERED = [
    (device_type, name.removeprefix("aten::"))
    for device_type in ("cpu", "cuda", "xpu", "mps")
    for name in sorted(autocast_registrations(device_type))
    # Named tensors are gone from torch 2.13, and nothing is said of them.
    if name.startswith("aten::") and "dimname" not in name.lower() and ".names" not in name
]

# Eager cannot run them without the device.
NOT_CALLABLE = {
    ("cuda", "_thnn_fused_gru_cell"),
    ("cuda", "cudnn_convolution"),
    ("cuda", "cudnn_convolution_transpose"),
    ("cuda", "grid_sampler"),
    ("cuda", "gru_cell"),
    ("mps", "_mps_convolution"),
    ("mps", "grid_sampler"),
    ("mps", "scaled_dot_product_attention"),
    ("xpu", "_thnn_fused_gru_cell"),
    ("xpu", "grid_sampler"),
    ("xpu", "gru_cell"),
    ("xpu", "scaled_dot_product_attention"),
}
BANNED = {("cuda", "binary_cross_entropy"), ("xpu", "binary_cross_entropy")}
# They stay under autocast.
BRACKETED = {
    # no kernel for fake tensors
    ("cpu", "_grid_sampler_2d_cpu_fallback"),
    ("cpu", "ctc_loss.IntList"),
    ("cpu", "ctc_loss.Tensor"),
    ("cpu", "linalg_lstsq"),
}
# Eager's own bits vary from call to call, with the alignment of its buffers.
VARYING = {("cpu", "linalg_lstsq")}


def fate(device_type: str, op: str) -> str:
    """What becomes of an op on the torch that this was written down for."""
    fates = {"not callable": NOT_CALLABLE, "banned": BANNED, "bracketed": BRACKETED}
    return next((fate for fate, ops in fates.items() if (device_type, op) in ops), "lowered")


@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.parametrize(("device_type", "op"), REGISTERED)
def test_dtypes(device_type: str, op: str) -> None:
    packet, _, overload = op.partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload or "default")
    for low in DTYPES:
        state = AutocastState.of({"device_type": device_type, "dtype": low})
        with tensors_of(device_type):
            args, kwargs = arguments_of(op, Tensors(device_type, [F32]))
            eager = call_under(state, target, args, kwargs)
            if eager.error is not None and low is F16 and device_type == "cpu":
                continue  # not every CPU has every kernel for float16
            if eager.error is not None:
                banned = fate(device_type, op) == "banned"
                assert re.search("unsafe to autocast" if banned else NO_DEVICE, eager.error)
                expected = (device_type, op) in NO_KERNEL or not PINNED
                assert banned or fate(device_type, op) == "not callable" or expected
                continue
            module, report = lowered(target, args, kwargs, state)
            assert report.lowered + len(report.bracketed) == 1
            became = "bracketed" if report.bracketed else "lowered"
            if became != fate(device_type, op):  # another torch has other kernels for fake tensors
                assert not PINNED, report.bracketed
                assert all("cannot run on fake tensors" in b.reason for b in report.bracketed)
            for dtypes in DTYPES[low]:
                args, kwargs = arguments_of(op, Tensors(device_type, dtypes))
                eager = call_under(state, target, args, kwargs)
                if eager.error is not None:
                    assert F64 in dtypes
                    continue
                ours = call_under(AutocastState.off(), module, tensors((args, kwargs)))
                compare(ours, eager, device_type == "cpu" and (device_type, op) not in VARYING)


def test_count() -> None:
    found = Counter(fate(*registration) for registration in REGISTERED)
    if PINNED:
        assert set(REGISTERED) >= NOT_CALLABLE | BANNED | BRACKETED
        assert found == {"lowered": 440, "bracketed": 4, "not callable": 12, "banned": 2}


@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_a_banned_op_raises_eagers_error(device_type: str) -> None:
    state = AutocastState.of({"device_type": device_type, "dtype": F16})
    op = torch.ops.aten.binary_cross_entropy.default
    with tensors_of(device_type):
        args, _ = arguments_of("binary_cross_entropy", Tensors(device_type, [F32]))
        module, report = lowered(op, args, {}, AutocastState.off())
        assert report.lowered == 0
        report = lower_with_report(module, state)
        (bracketed,) = report.bracketed
        assert "unsafe to autocast" in bracketed.reason
        eager = call_under(state, op, args)
        with autocast_put_right():  # the graph itself, run without a backend around it
            ours = call_under(AutocastState.off(), module, args)
    assert eager.error is not None
    assert ours.error == eager.error
