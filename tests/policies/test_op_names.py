"""Which calls the ops of overrides name."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from autocast_backend import lower_autocast
from tests.support import BF16, capture, targets

from .models import compile_model


def overridden(function: Any, op: str, *inputs: torch.Tensor, policy: str = "fp32") -> Any:
    """What a function gives under autocast with one op's policy, and how many calls that named."""
    torch._dynamo.reset()
    counters.clear()
    options = {"inner": "aot_eager", "policies": {"op": {op: policy}}}
    compiled = torch.compile(function, backend="smart_autocast", options=options)
    with torch.autocast(**BF16):
        return compiled(*inputs), counters["smart_autocast"]["overridden"]


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.relu(x.bfloat16()), "aten::relu"),
        (nn.ReLU(), "aten::relu"),  # F.relu(x, inplace=False)
        (lambda x: torch.neg(x, out=None), "aten::neg"),
        (lambda x: x / x, "aten::div"),
        (lambda x: x % 2, "aten::remainder"),
        (lambda x: operator.imatmul(x, x), "aten::matmul"),
        (lambda x: F.batch_norm(x.view(2, -1), None, None, training=True), "aten::batch_norm"),
        (lambda x: 1 - x, "aten::rsub"),
        (lambda x: 1 - x, "aten::sub"),
        (lambda x: x.__rsub__(1), "aten::sub"),
        (lambda x: 2 / x, "aten::reciprocal"),
        (lambda x: 2 / x, "aten::div"),
        (lambda x: x.__rtruediv__(2), "aten::div"),
        (lambda x: x.__radd__(1), "aten::add"),
        (lambda x: 2**x, "aten::pow"),
        (lambda x: 2 // x, "aten::floor_divide"),
        (lambda x: F.max_pool2d(x.view(1, 1, 2, 2), 2), "aten::max_pool2d"),
        (lambda x: F.nll_loss(x.view(1, 4), x.new_ones(1).long()), "aten::nll_loss_nd"),
        (lambda x: F.nll_loss(x.view(1, 4), x.new_ones(1).long()), "aten::nll_loss"),
        (lambda x: torch.norm(x, p=1), "aten::linalg_vector_norm"),
        (lambda x: torch.norm(x.view(2, 2), "fro", (0, 1)), "aten::linalg_vector_norm"),
        (lambda x: x.norm(dim=0), "aten::linalg_vector_norm"),
        (lambda x: x.norm(), "aten::norm"),
        (lambda x: F.dropout1d(x.view(1, 2, 2)), "aten::feature_dropout"),
        (lambda x: F.dropout2d(x.view(1, 1, 2, 2)), "aten::feature_dropout"),
        (lambda x: F.dropout3d(x.view(1, 1, 1, 2, 2)), "aten::feature_dropout"),
        (lambda x: F.unfold(x.view(1, 1, 2, 2), 2), "aten::im2col"),
        (lambda x: F.fold(x.view(1, 4, 1), 2, 2), "aten::col2im"),
        (
            lambda x: F.affine_grid(x.new_ones(1, 2, 3), [1, 1, 2, 2], align_corners=False),
            "aten::affine_grid_generator",
        ),
    ],
)
def test_a_call_by_another_spelling_is_named(function: Any, op: str) -> None:
    result, named = overridden(function, op, torch.ones(4).bfloat16())
    assert (result.dtype, named) == (torch.float32, 1)


def test_a_nuclear_norm_is_not_that_of_a_vector() -> None:
    x = torch.ones(2, 2)
    for function in (lambda x: torch.norm(x, "nuc"), lambda x: x.norm(p="nuc")):
        assert overridden(function, "aten::linalg_vector_norm", x)[1] == 0
        assert overridden(function, "aten::linalg_matrix_norm", x)[1] == 1


def test_a_number_minus_a_tensor_is_another_op_than_a_tensor_minus_a_number() -> None:
    for op, expected in (("aten::rsub", torch.bfloat16), ("aten::sub", torch.float32)):
        result, _ = overridden(lambda x: x - 1, op, torch.ones(4).bfloat16())
        assert result.dtype is expected
    graph = capture(torch.autocast(**BF16)(lambda x: 1 - x), torch.ones(4).bfloat16())
    both = {"op": {"aten::sub": "fp32", "aten::rsub": {"dtype": torch.float16}}}
    assert targets(lower_autocast(graph, policies=both)) == ["sub"]  # as `rsub` is asked for


def interpolate(dims: int, mode: str) -> Any:
    return lambda x: F.interpolate(x.reshape(1, 4, *[1] * dims), scale_factor=2, mode=mode)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (interpolate(1, "linear"), "upsample_linear1d"),
        (interpolate(2, "bilinear"), "upsample_bilinear2d"),
        (interpolate(2, "bicubic"), "upsample_bicubic2d"),
        (interpolate(3, "trilinear"), "upsample_trilinear3d"),
        (interpolate(3, "nearest-exact"), "_upsample_nearest_exact3d"),
        (interpolate(1, "area"), "adaptive_avg_pool1d"),
        (interpolate(2, "nearest"), "upsample_nearest2d"),
    ],
)
def test_an_interpolation_is_named_by_its_op(function: Any, op: str) -> None:
    for asked in {op, "upsample_nearest2d"}:
        policy = "lower_precision_fp"
        result, named = overridden(function, f"aten::{asked}", torch.ones(4), policy=policy)
        assert (result.dtype is torch.bfloat16, named) == (op == asked, op == asked)


@torch._dynamo.allow_in_graph
def softmax(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_users_function_is_not_the_op_whose_name_it_has() -> None:
    result, named = overridden(softmax, "aten::softmax", torch.ones(4).bfloat16())
    assert (result.dtype, named) == (torch.bfloat16, 0)


@torch._dynamo.allow_in_graph
def half() -> torch.Tensor:
    return torch.full((), 0.5)


def test_a_users_function_without_arguments_that_has_the_name_of_a_cast() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    compiled = compile_model(lambda x: model(x) * half(), {"module": {"**": "fp32"}})
    with torch.autocast(**BF16):
        assert compiled(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize(
    ("module", "op", "written"),
    [
        (nn.BatchNorm1d(4).bfloat16(), "aten::batch_norm", "running_mean"),
        (
            nn.InstanceNorm1d(4, track_running_stats=True).bfloat16(),
            "aten::instance_norm",
            "running_mean",
        ),
        (
            nn.Embedding(4, 4, max_norm=0.1).bfloat16().requires_grad_(False),
            "aten::embedding",
            "weight",
        ),
    ],
    ids=["batch_norm", "instance_norm", "embedding"],
)
def test_what_a_call_writes_to_its_arguments_is_not_lost(
    module: nn.Module, op: str, written: str
) -> None:
    module.bfloat16().requires_grad_(False)
    x = torch.arange(4) if op == "aten::embedding" else 2 + torch.rand(2, 4, 8).bfloat16()
    before = getattr(module, written).clone()
    _, named = overridden(module, op, x)
    assert named == 0
    assert not torch.equal(getattr(module, written), before)
