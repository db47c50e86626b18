from typing import Any

import pytest
import torch

from autocast_backend import autocast_to_reduced_precision
from tests.ops.smart_cast_suite import SmartCastSuite, assert_same, sample


class ReducedPrecisionSuite(SmartCastSuite):
    op = torch.ops.smart_autocast.autocast_to_reduced_precision.default
    dtype: torch.dtype

    @classmethod
    def cast(cls, tensor: torch.Tensor, *, device_type: str | None = None) -> torch.Tensor:
        return autocast_to_reduced_precision(tensor, cls.dtype, device_type=device_type)

    def call_op(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.op(tensor, self.dtype, **kwargs)

    def opcheck_args(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return (tensor, self.dtype)


class TestToFloat16(ReducedPrecisionSuite):
    dtype = torch.float16
    table = {  # noqa: RUF012
        torch.float32: torch.float16,
        torch.float16: torch.float16,
        torch.bfloat16: torch.float16,
        torch.float64: torch.float64,
        torch.float8_e4m3fn: torch.float16,
        torch.int64: torch.int64,
        torch.bool: torch.bool,
    }


class TestToBfloat16(ReducedPrecisionSuite):
    dtype = torch.bfloat16
    table = {  # noqa: RUF012
        torch.float32: torch.bfloat16,
        torch.float16: torch.bfloat16,
        torch.bfloat16: torch.bfloat16,
        torch.float64: torch.float64,
        torch.float8_e4m3fn: torch.bfloat16,
        torch.int64: torch.int64,
        torch.bool: torch.bool,
    }


def test_float8() -> None:
    tensor = sample(torch.float32, 3, 5)
    result = autocast_to_reduced_precision(tensor, torch.float8_e5m2)
    assert_same(result, tensor.to(torch.float8_e5m2))


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"'dtype' must be a torch.dtype .*, got str"):
        autocast_to_reduced_precision(sample(torch.float32, 3), "bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.complex32])
def test_a_dtype_that_is_not_narrower(dtype: torch.dtype) -> None:
    tensor = sample(torch.float32, 3)
    message = "'dtype' must be a floating dtype narrower than float32, .*, got "
    with pytest.raises(ValueError, match=f"{message}{dtype}"):
        autocast_to_reduced_precision(tensor, dtype)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.smart_autocast.autocast_to_reduced_precision(tensor, dtype)


def test_a_dtype_that_pytorch_casts_nothing_to() -> None:
    with pytest.raises(ValueError, match=r"'dtype' must be a floating dtype .*, got torch.float4"):
        autocast_to_reduced_precision(sample(torch.float32, 3), torch.float4_e2m1fn_x2)
