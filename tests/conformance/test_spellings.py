"""Each op that autocast registers, in every way to write it: the policy is found, not only where
the op stands as the dispatcher names it (tests/conformance/test_registrations.py).

On the CPU, and on CUDA by fake tensors, whose table has all kinds of policies: 473 and 482 ways on
torch 2.13.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

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
from tests.conformance.test_registrations import REGISTERED, fate
from tests.support import BF16, TORCH, assert_same_bits, tensors

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
Spelling = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""Where an op is written so, what is called, and with what."""

HOMES: dict[str, tuple[Any, str]] = {
    "torch": (torch, ""),
    "torch.nn.functional": (F, ""),
    "torch._C._nn": (torch._C._nn, ""),
    "torch.Tensor": (torch.Tensor, ""),
    "torch.linalg": (torch.linalg, "linalg_"),
    "torch.special": (torch.special, "special_"),
    "torch.fft": (torch.fft, "fft_"),
}
OPERATORS: dict[str, list[tuple[Any, Callable[[Any, Any], tuple[Any, ...]]]]] = {
    "matmul": [
        (operator.matmul, lambda x, y: (x, y)),
        ("__matmul__", lambda x, y: (x, y)),
        ("__rmatmul__", lambda x, y: (x, y)),
        (operator.imatmul, lambda x, y: (x, y)),
    ],
    "pow.Tensor_Tensor": [
        (operator.pow, lambda x, y: (x, y)),
        (operator.pow, lambda x, _: (x, 2.5)),
        (operator.pow, lambda x, _: (2.5, x)),
        ("__pow__", lambda x, y: (x, y)),
        ("__rpow__", lambda x, _: (x, 2.5)),
    ],
}


def spellings(device_type: str, op: str, dtypes: Sequence[torch.dtype]) -> Iterator[Spelling]:
    packet, _, overload = op.partition(".")
    args, kwargs = arguments_of(op, Tensors(device_type, dtypes))
    home = getattr(torch.ops.aten, packet)
    target = getattr(home, overload or "default")
    yield "torch.ops.aten", home, args, kwargs
    named = dict(zip((a.name for a in target._schema.arguments), args, strict=False))
    yield "keywords", target, (), {**named, **kwargs}
    for name, (home, prefix) in HOMES.items():
        if home is torch.Tensor and not isinstance(args[0], torch.Tensor):
            continue
        short = packet.removeprefix(prefix)
        if callable(getattr(home, short, None)):
            yield name, getattr(home, short), args, kwargs
    if hasattr(torch.Tensor, packet) and isinstance(args[0], torch.Tensor):
        yield "a method", packet, args, kwargs
    for written, given in OPERATORS.get(op, ()):
        yield "an operator", written, given(*args), kwargs


def dtypes_to_cast(device_type: str, op: str, state: AutocastState) -> Sequence[torch.dtype]:
    """Dtypes that eager autocast casts, for a call of the op as the dispatcher names it; the last
    ones where it makes no cast, but asks for another result."""
    packet, _, overload = op.partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload or "default")
    tried = [BFLOAT16, FLOAT32], [BFLOAT16], [FLOAT32]
    for dtypes in tried:
        args, kwargs = arguments_of(op, Tensors(device_type, dtypes))
        eager = call_under(state, target, args, kwargs)
        if eager.error is None and eager.casts:
            break
    return dtypes


BRACKETED = {
    # Lowered where they are written as anybody writes them, `x.norm()`, or with their overload.
    ("torch.ops.aten", "norm.Scalar"),
    ("torch.ops.aten", "norm.ScalarOpt_dim"),
    # It draws random numbers of the dtype it is given, before anything is cast.
    ("torch.nn.functional", "fractional_max_pool2d"),
    ("torch.nn.functional", "fractional_max_pool3d"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("device_type", "count"),
    [("cpu", 473), ("cuda", 482)],
)
def test_every_way_to_write_it(device_type: str, count: int) -> None:
    """Written so, the op is lowered, and calls the ops that eager does, with their dtypes."""
    state = AutocastState.of({"device_type": device_type, "dtype": torch.bfloat16})
    found: Counter[str] = Counter()
    with tensors_of(device_type):
        for op in (op for device, op in REGISTERED if device == device_type):
            if op.partition(".")[0] in ("quantile", "nanquantile") and TORCH < (2, 13):
                continue  # cannot run on fake tensors
            dtypes = dtypes_to_cast(device_type, op, state)
            for where, target, args, kwargs in spellings(device_type, op, dtypes):
                eager = call_under(state, target, args, kwargs)
                if eager.error is not None:  # no device, or other arguments than those of the op
                    other = (
                        where not in ("torch.ops.aten", "keywords")
                        or (not PINNED and re.search(NO_DEVICE, eager.error))
                        or (device_type, op) in NO_KERNEL
                    )
                    assert other or fate(device_type, op) != "lowered", (where, op, eager.error)
                    continue
                module, report = lowered(target, args, kwargs, state)
                ours = call_under(AutocastState.off(), module, tensors((args, kwargs)))
                for outcome in (ours, eager):  # a view is the same before and after a cast
                    outcome.ops = [call for call in outcome.ops if call[0] != "aten.view.default"]
                compare(ours, eager, bits=False)
                if fate(device_type, op) == "lowered":
                    expected = (0, 1) if (where, op) in BRACKETED else (1, 0)
                    became = (report.lowered, len(report.bracketed))
                    assert became == expected, (where, op, report.bracketed)
                    found[where] += 1
    if PINNED and not (device_type == "cpu" and NO_KERNEL):
        assert sum(found.values()) == count


LISTS_AND_OPTIONS: list[Callable[..., Any]] = [
    lambda x, w, b: x @ w,
    lambda x, w, b: x.__rmatmul__(w),
    lambda x, w, b: torch.matmul(input=x, other=w),
    lambda x, w, b: torch.matmul(other=w, input=x),
    lambda x, w, b: F.linear(x, w),
    lambda x, w, b: F.linear(x, w, None),
    lambda x, w, b: F.linear(x, w, bias=b),
    lambda x, w, b: F.linear(bias=b, weight=w, input=x),
    lambda x, w, b: torch._C._nn.linear(x, w, b),
    lambda x, w, b: torch.ops.aten.linear(x, w, b),
    lambda x, w, b: torch.ops.aten.linear.default(x, w),
    lambda x, w, b: torch.addmm(b, x, w, beta=2),
    lambda x, w, b: b.addmm(x, w, alpha=0.5),
    lambda x, w, b: F.conv1d(x[None], w[:, :, None], bias=b, padding="same"),
    lambda x, w, b: torch.conv1d(x[None], w[:, :, None], None, 1, 0),
    lambda x, w, b: torch.cat([x.bfloat16(), w]),
    lambda x, w, b: torch.cat((x.bfloat16(), w), dim=-1),
    lambda x, w, b: torch.concat(tensors=[x.bfloat16(), w]),
    lambda x, w, b: torch.stack(dim=1, tensors=(x.bfloat16(), w)),
    lambda x, w, b: torch.ops.aten.cat.default([x.bfloat16(), w], 1),
    lambda x, w, b: torch.einsum("ij,jk->ik", x, w),
    lambda x, w, b: torch.einsum("ij,jk->ik", [x, w]),
    lambda x, w, b: torch.linalg.multi_dot([x, w, b]),
    lambda x, w, b: torch.chain_matmul(x, w, w),
    lambda x, w, b: torch.fft.fft(x.bfloat16(), dim=0).abs(),
]


def test_lists_operators_and_optional_arguments() -> None:
    """As Dynamo writes them; outputs and gradients are eager autocast's."""

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [call(x, w, b) for call in LISTS_AND_OPTIONS]

    def run(**compile_arguments: Any) -> Any:
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator) for shape in ((4, 4), (4, 4), (4,))]
        given = [t.requires_grad_() for t in inputs]
        with torch.autocast(**BF16):
            outputs = torch.compile(function, fullgraph=True, **compile_arguments)(*given)
        loss = torch.stack([t.float().square().mean() for t in outputs]).sum()
        return outputs, torch.autograd.grad(loss, given)

    counters.clear()
    ours = run(backend="smart_autocast", options={"inner": "aot_eager"})
    counted = counters["smart_autocast"]
    assert (counted["lowered"], counted["bracketed"]) == (len(LISTS_AND_OPTIONS), 0)
    assert_same_bits(ours, run(backend="eager"))
