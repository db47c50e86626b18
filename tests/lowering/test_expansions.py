"""Composites that are written out: equal to what they replace, and proved before they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from autocast_backend import AutocastState
from autocast_backend.lowering.expansions import EXPANSIONS, Caller
from tests.support import assert_same_bits, graph_of, lower_with_report, targets

DTYPE, TO_FP32 = "full_precision_dtype.default", "autocast_to_full_precision.default"
VECTOR_NORM = [DTYPE, "linalg_vector_norm.default"]
CROSS_ENTROPY = ["log_softmax.int", TO_FP32, "nll_loss_nd.default"]

Case = tuple[str, Any, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]], dict, list[str]]

CASES: dict[str, Case] = {
    "cross_entropy": (
        "cross_entropy_loss",
        F.cross_entropy,
        lambda x, t: (x, t),
        {},
        CROSS_ENTROPY,
    ),
    "cross_entropy with weights": (
        "cross_entropy_loss",
        F.cross_entropy,
        lambda x, t: (x, t, x.detach().sum(0).abs().bfloat16()),
        {"ignore_index": 1, "reduction": "sum"},
        ["log_softmax.int", TO_FP32, TO_FP32, "nll_loss_nd.default"],
    ),
    "cross_entropy of images": (
        "cross_entropy_loss",
        F.cross_entropy,
        lambda x, t: (x.unsqueeze(-1) * 2, t.unsqueeze(1)),
        {"reduction": "none"},
        CROSS_ENTROPY,
    ),
    "norm": ("norm", torch.norm, lambda x, _: (x,), {}, VECTOR_NORM),
    "norm of rows": ("norm", "norm", lambda x, _: (x, 1, -1, True), {}, VECTOR_NORM),
    "largest": ("norm", torch.norm, lambda x, _: (x, float("inf"), (0, 1)), {}, VECTOR_NORM),
    "normalize": (
        "normalize",
        F.normalize,
        lambda x, _: (x,),
        {"dim": 0},
        [*VECTOR_NORM, "clamp_min", "expand_as", "truediv"],
    ),
}
"""Name -> expansion, composite, its arguments from logits and classes, keywords, calls made."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_and_xpu(name: str, dtype: torch.dtype) -> None:
    """On fake tensors, against real autocast."""
    _, target, arguments, kwargs, calls = CASES[name]
    for device in ("cuda", "xpu"):
        state = AutocastState.of({"device_type": device, "dtype": dtype})
        with FakeTensorMode(), torch.no_grad():
            x = torch.empty(4, 8, dtype=dtype, device=device)
            classes = torch.zeros(4, dtype=torch.long, device=device)
            module = graph_of(target, arguments(x, classes), kwargs, state)
            report = lower_with_report(module, state)
        assert (report.lowered, report.bracketed) == (1, [])
        assert targets(module) == calls


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    """In float32, where no cast does anything, an expansion is the composite, bit for bit."""
    expansion, target, arguments, kwargs, _ = CASES[name]

    def results(call: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        given = arguments(x, torch.tensor([0, 7, 1, 2]))
        given = tuple(
            t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in given
        )
        value = call(*given)
        value.square().sum().backward()
        return [value.detach(), x.grad]

    def expanded(first: torch.Tensor, *others: Any) -> torch.Tensor:
        caller = Caller(lambda f, args, kwargs: f(*args, **kwargs), first.dim())
        last, args, more = EXPANSIONS[expansion](caller, first, *others, **kwargs)
        return last(*args, **more)

    def composite(first: torch.Tensor, *others: Any) -> torch.Tensor:
        call = getattr(torch.Tensor, target) if isinstance(target, str) else target
        return call(first, *others, **kwargs)

    assert_same_bits(results(expanded), results(composite))


def test_what_an_expansion_does_not_know_stays_under_autocast() -> None:
    state = AutocastState.of({"device_type": "cuda", "dtype": torch.bfloat16})
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda")
        classes = torch.zeros(4, dtype=torch.long, device="cuda")
        for args, kwargs in (((x, classes), {"label_smoothing": 0.1}), ((x, x.softmax(1)), {})):
            report = lower_with_report(graph_of(F.cross_entropy, args, kwargs, state), state)
            assert len(report.bracketed) == 1
