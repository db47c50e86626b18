"""The policy fp32_set_opt_dtype: a call is asked for a float32 result by the overload that takes a
dtype, however it is written. Only CUDA's and XPU's autocast has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autocast_backend.state import AutocastState
from tests.conformance.one_call import call_under, compare, lowered, tensors_of
from tests.support import targets

X = "x"  # stands for the tensor
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (F.softmax, (X, 1), {"_stacklevel": 5}, "softmax.int"),
    (F.log_softmax, (X,), {"dim": -1}, "log_softmax.int"),
    (torch.softmax, (), {"input": X, "dim": 0}, "softmax.int"),
    ("softmax", (X, 0), {}, "softmax.int"),
    (torch.log_softmax, (X, 1), {}, "log_softmax.int"),
    (torch.sum, (), {"input": X}, "sum"),
    (torch.sum, (X, [0, 1]), {}, "sum.dim_IntList"),
    ("sum", (X, 0, True), {}, "sum.dim_IntList"),
    ("sum", (X,), {"dim": 0, "keepdim": True}, "sum.dim_IntList"),
    (torch.prod, (X,), {}, "prod"),
    ("prod", (X, 1), {}, "prod.dim_int"),
    (torch.cumsum, (), {"dim": 0, "input": X}, "cumsum"),
    (torch.linalg.norm, (X, "fro"), {}, "linalg_norm.ord_str"),
    (torch.linalg.norm, (X, 2), {"dim": 1}, "linalg_norm"),
    (torch.linalg.matrix_norm, (X, "fro"), {}, "linalg_matrix_norm.str_ord"),
    (torch.linalg.matrix_norm, (X, 1), {}, "linalg_matrix_norm"),
    (torch.linalg.vector_norm, (X,), {"dim": [1]}, "linalg_vector_norm"),
]


@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("target", "args", "kwargs", "becomes"), CALLS)
def test_every_way_to_call_it(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], becomes: str, dtype: torch.dtype
) -> None:
    state = AutocastState.of({"device_type": "cuda", "dtype": dtype})
    with tensors_of("cuda"):
        x = torch.empty(3, 3, device="cuda", dtype=dtype)
        args = tuple(x if a is X else a for a in args)
        kwargs = {k: x if v is X else v for k, v in kwargs.items()}
        module, report = lowered(target, args, kwargs, state)
        expected = call_under(state, target, args, kwargs)
        compare(call_under(AutocastState.off(), module, [x]), expected, bits=False)
    assert [t.dtype for t in expected.values] == [torch.float32]
    assert (report.lowered, report.bracketed) == (1, [])
    assert targets(module)[-1].removesuffix(".default") == becomes
