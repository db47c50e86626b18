import torch

from autocast_backend import autocast_to_fp16
from tests.ops.smart_cast_suite import SmartCastSuite


class TestAutocastToFp16(SmartCastSuite):
    op = torch.ops.smart_autocast.autocast_to_fp16.default
    cast = staticmethod(autocast_to_fp16)
    table = {  # noqa: RUF012
        torch.float32: torch.float16,
        torch.float16: torch.float16,
        torch.bfloat16: torch.float16,
        torch.float64: torch.float64,
        torch.float8_e4m3fn: torch.float16,
        torch.int64: torch.int64,
        torch.bool: torch.bool,
    }
