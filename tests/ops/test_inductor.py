"""What Inductor makes of the ops, read from the code that it generates."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from autocast_backend import autocast_to_bf16, multi_cast, promote
from tests.ops.smart_cast_suite import assert_same, sample
from tests.support import needs_torch

pytestmark = pytest.mark.slow
cast = torch.ops.smart_autocast.cast.default


def generated(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, str]:
    """The result of the compiled function, and its code: all that is called, kernels included."""
    torch.compiler.reset()
    # Without the second, what passes between fused ops is not rounded to bfloat16.
    config = {"force_disable_caches": True, "emulate_precision_casts": True}
    with torch._inductor.config.patch(config):
        result, codes = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    (code,) = codes
    return result, code


def kernels(code: str) -> set[str]:
    return set(re.findall(r"\b(?:cpp|triton)_fused_\w+", code))


@needs_torch(2, 13, because="emulate_precision_casts is for Triton only")
def test_smart_casts_fuse_into_their_neighbours() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        low, other = promote([autocast_to_bf16(x * 2), y])
        return low.sin() + other

    x, y = sample(torch.float32, 40, 50), sample(torch.float32, 40, 50)
    result, code = generated(function, x, y)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, function(x, y))
    assert len(kernels(code)) == 1
    assert "torch.ops.smart_autocast" not in code


@needs_torch(2, 13, because="emulate_precision_casts is for Triton only")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_cast_fuses_into_its_neighbours(mode: Callable[[], Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return cast(x * 2, torch.bfloat16).sin()

    with mode():
        x = sample(torch.float32, 40, 50).requires_grad_(mode is torch.enable_grad)
        result, code = generated(function, x)
        assert_same(result.detach(), function(x).detach())
    assert len(kernels(code)) == 1
    assert "torch.ops.smart_autocast" not in code


def test_multi_cast_is_one_call() -> None:
    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor * 2 for tensor in multi_cast([t + 1 for t in tensors], torch.bfloat16)]

    tensors = [sample(torch.float32, 8 + i, 16) for i in range(5)]
    results, code = generated(function, *tensors)
    for result, tensor in zip(results, tensors, strict=True):
        assert_same(result, (tensor + 1).bfloat16() * 2)
    assert len(re.findall(r"torch\.ops\.smart_autocast\.multi_cast\.default\(", code)) == 1


@needs_torch(2, 13, because="emulate_precision_casts is for Triton only")
def test_multi_cast_of_what_requires_grad_fuses() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        (low,) = multi_cast([x * 2], torch.bfloat16)
        return low.sin()

    x = sample(torch.float32, 40, 50).requires_grad_()
    result, code = generated(function, x)
    torch.testing.assert_close(result, function(x))
    assert len(kernels(code)) == 1
    assert "torch.ops.smart_autocast" not in code
