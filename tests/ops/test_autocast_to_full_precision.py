import torch

from autocast_backend import autocast_to_full_precision
from tests.ops.smart_cast_suite import SmartCastSuite


class TestAutocastToFullPrecision(SmartCastSuite):
    op = torch.ops.smart_autocast.autocast_to_full_precision.default
    cast = staticmethod(autocast_to_full_precision)
    table = {  # noqa: RUF012
        torch.float32: torch.float32,
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float64: torch.float64,
        torch.float8_e4m3fn: torch.float32,
        torch.int64: torch.int64,
        torch.bool: torch.bool,
    }
