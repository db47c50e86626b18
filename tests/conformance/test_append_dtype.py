"""The policy fp32_append_dtype: `norm` is asked for a float32 result, by its overloads that take a
dtype. Only CUDA's and XPU's autocast has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autocast_backend.state import AutocastState
from tests.conformance.one_call import call_under, compare, lowered, tensors_of
from tests.support import assert_same_bits, targets, tensors

NORM, NORM_DIM = torch.ops.aten.norm.Scalar, torch.ops.aten.norm.ScalarOpt_dim
WITH_DTYPE = {
    NORM: torch.ops.aten.norm.ScalarOpt_dtype,
    NORM_DIM: torch.ops.aten.norm.ScalarOpt_dim_dtype,
}
STATE = AutocastState.of({"device_type": "cuda", "dtype": torch.float16})
CALLS = [
    (NORM, (), {}),
    (NORM, (3,), {}),
    (NORM, (), {"p": 1.5}),
    (NORM_DIM, (None, [1]), {}),
    (NORM_DIM, (2,), {"dim": [0, 1], "keepdim": True}),
]


@pytest.mark.usefixtures("autocast_without_device")
@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS)
def test_every_way_to_call_it(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What eager does with fake CUDA tensors; and the gradients of the graph, which runs on the CPU
    as well."""
    with tensors_of("cuda"):
        x = torch.empty(3, 4, device="cuda")
        module, report = lowered(op, (x, *args), kwargs, STATE)
        assert (report.lowered, report.bracketed) == (1, [])
        expected = call_under(STATE, op, (x, *args), kwargs)
        compare(call_under(AutocastState.off(), module, [x]), expected, bits=False)
    assert targets(module)[-1] == WITH_DTYPE[op].__name__
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        wanted = torch.float64 if dtype is torch.float64 else torch.float32
        given = torch.linspace(-1, 2, 12, dtype=dtype).view(3, 4).requires_grad_()
        outputs = tensors(module(given))
        p, *rest = (*args, *kwargs.values(), *((2,) if not args and not kwargs else ()))
        rest += [False] if len(rest) == 1 else []
        reference = WITH_DTYPE[op](given, p, *rest, dtype=wanted)
        assert_same_bits(outputs, [reference])
        grads = (torch.autograd.grad(out.sum(), given) for out in (*outputs, reference))
        assert_same_bits(*grads)
