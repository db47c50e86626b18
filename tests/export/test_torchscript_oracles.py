"""TorchScript's autocast pass (`torch/csrc/jit/passes/autocast.cpp`) once planned what this package
does: smart casts in an IR without dtypes. Its own tests, `test/jit/test_autocast.py`, say what has
to come out; here are their functions, exported and lowered, with the same expectations.

They are about CUDA and float16: each program is exported on the CPU, lowered for CUDA, run on the
CPU, and compared with CUDA's autocast on fake tensors as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autocast_backend.export
from tests.export.support import Region, cpu_region, cuda_dtypes, dtypes, export
from tests.support import assert_same_bits, targets

HALF, FULL, DOUBLE = torch.float16, torch.float32, torch.float64


def numbers(count: int, dtype: torch.dtype = FULL) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(2, 2, generator=generator).to(dtype) for _ in range(count)]


def minimal(region: Region, a: Tensor, b: Tensor) -> Any:
    with region():
        x = torch.mm(a, b)
        return x, torch.sum(x)


def off(region: Region, a: Tensor, b: Tensor) -> Any:
    with region(enabled=False):
        return torch.mm(a, b)


def explicit_casts(region: Region, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    with region():
        e = torch.mm(a.double(), b.double()).float()
        f = torch.mm(c, d).double()
    return e, f, torch.mm(c.double(), f)


def duplicate_inputs(region: Region, a: Tensor) -> Any:
    with region():
        e = torch.mm(a, a)
        return e, torch.mm(e, e)


def log(region: Region, a: Tensor) -> Any:
    with region():
        return torch.log(a)


def promote(region: Region, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    with region():
        e = torch.mm(a, b)
        return e, torch.addcmul(e, c, d, value=0.1)


def promote_alone(region: Region, a: Tensor, b: Tensor) -> Any:
    with region():
        return torch.addcmul(a, a, b, value=0.1)


def set_opt_dtype(region: Region, a: Tensor, b: Tensor, c: Tensor) -> Any:
    with region():
        return torch.softmax(a, 0), torch.softmax(b, 0, None), torch.softmax(c, 0, DOUBLE)


def nested(region: Region, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    with region(enabled=False):
        e = torch.mm(a, b)
        with region():
            f = torch.mm(e, c)
            with region(enabled=False):
                g = torch.mm(e, d)
    return e, f, g


def implicitly_nested(region: Region, a: Tensor, b: Tensor) -> Any:
    with region(enabled=False), region():
        return torch.mm(a, b)


def reused_context(region: Region, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
    context = region()
    with context:
        e = torch.mm(a, b)
    with context:
        f = torch.mm(d, torch.mm(c, d))
    return e, f, torch.mm(e, f)


def callees(region: Region, a: Tensor, b: Tensor) -> Any:
    def helper(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b)

    with region():
        once = helper(a, b)
        twice = helper(once, once)
        return helper(twice, b)


def callee_switches_on(region: Region, a: Tensor, b: Tensor) -> Any:
    def helper(a: Tensor, b: Tensor) -> Tensor:
        with region():
            return torch.mm(a, b)

    with region(enabled=False):
        return helper(a, b)


def callee_switches_off(region: Region, a: Tensor, b: Tensor) -> Any:
    def helper(a: Tensor, b: Tensor) -> Tensor:
        with region(enabled=False):
            return torch.mm(a, b)

    with region():
        return helper(a, b)


def in_place(region: Region, a: Tensor, b: Tensor, c: Tensor) -> Any:
    a = a + 0
    with region():
        return torch.addmm(a, b, c), a.addmm_(b, c)


# function, the inputs' dtype, the dtypes of the results
ORACLES: list[tuple[Callable[..., Any], int, torch.dtype, list[torch.dtype]]] = [
    (minimal, 2, FULL, [HALF, FULL]),
    (off, 2, FULL, [FULL]),
    (explicit_casts, 4, FULL, [FULL, DOUBLE, DOUBLE]),
    (duplicate_inputs, 1, FULL, [HALF, HALF]),
    (log, 1, HALF, [FULL]),
    (log, 1, DOUBLE, [DOUBLE]),  # never narrowed
    (promote, 4, FULL, [HALF, FULL]),
    (promote_alone, 2, DOUBLE, [DOUBLE]),
    (set_opt_dtype, 3, HALF, [FULL, FULL, DOUBLE]),
    (set_opt_dtype, 3, DOUBLE, [DOUBLE, DOUBLE, DOUBLE]),
    (nested, 4, FULL, [FULL, HALF, FULL]),
    (implicitly_nested, 2, FULL, [HALF]),
    (callees, 2, FULL, [HALF]),
    (callee_switches_on, 2, FULL, [HALF]),
    (callee_switches_off, 2, FULL, [FULL]),
    (in_place, 3, FULL, [HALF, FULL]),
]


@pytest.mark.parametrize(
    ("function", "count", "given", "expected"),
    ORACLES,
    ids=[f"{row[0].__name__}-{str(row[2])[6:]}" for row in ORACLES],
)
def test_what_the_jit_pass_expects(
    function: Callable[..., Any],
    count: int,
    given: torch.dtype,
    expected: list[torch.dtype],
) -> None:
    inputs = numbers(count, given)
    program = export(function, *inputs, dtype=HALF)
    lowered = autocast_backend.export.lower(program, device_type="cuda")
    assert dtypes(lowered.module()(*inputs)) == expected
    assert cuda_dtypes(function, *inputs) == expected


@pytest.mark.parametrize("function", [log, promote_alone, set_opt_dtype])
def test_one_program_for_float16_and_float64(function: Callable[..., Any]) -> None:
    """What needs two scripted functions with profiled types there is one lowered program here."""
    count = {log: 1, promote_alone: 2, set_opt_dtype: 3}[function]
    program = export(function, *numbers(count), dtype=HALF)
    module = autocast_backend.export.module(
        autocast_backend.export.lower(program, device_type="cuda")
    )
    for given in (HALF, FULL, DOUBLE):
        inputs = numbers(count, given)
        assert dtypes(module(*inputs)) == cuda_dtypes(function, *inputs)


def test_a_context_used_twice() -> None:
    """The JIT's test nests a context in itself, which in eager mode leaves autocast switched on; so
    here one use follows the other."""
    inputs = numbers(4)
    program = export(reused_context, *inputs, dtype=HALF)
    lowered = autocast_backend.export.lower(program, device_type="cuda")
    assert dtypes(lowered.module()(*inputs)) == [HALF] * 3


def test_divergent_branches() -> None:
    """A branch under autocast and one without: `torch.cond` wants both results of one dtype, which
    a cast in one of them gives."""

    def function(region: Region, a: Tensor, b: Tensor) -> Any:
        def on(a: Tensor, b: Tensor) -> Tensor:
            with region():
                return torch.mm(a, b).float()

        def off(a: Tensor, b: Tensor) -> Tensor:
            with region(enabled=False):
                return torch.mm(a, b)

        e = torch.cond(a[0, 0] > 0.5, on, off, (a, b))
        return e, torch.mm(e, e)

    for sign in (1.0, -1.0):
        a, b = numbers(2)
        inputs = (a + sign, b)
        lowered = autocast_backend.export.lower(export(function, *inputs, dtype=HALF))
        module = lowered.module()
        assert_same_bits(module(*inputs), function(cpu_region(HALF), *inputs))


def test_the_example_of_the_proposal() -> None:
    """`func(a_float32, b_float32)`, as in the proposal of smart casts: the lowered graph holds the
    casts, no dtype of a tensor, and gives the lower precision. So does TorchScript."""

    def func(region: Region, a: Tensor, b: Tensor) -> Any:
        with region():
            return torch.mm(a, b)

    a_float32, b_float32 = torch.rand(8, 8), torch.rand(8, 8)
    lowered = autocast_backend.export.lower(export(func, a_float32, b_float32))
    names = [name.rpartition(".")[0] or name for name in targets(lowered.graph_module)]
    assert names == ["autocast_to_bf16", "autocast_to_bf16", "mm"]
    result = lowered.module()(a_float32, b_float32)
    assert result.dtype is torch.bfloat16
    assert_same_bits(result, func(cpu_region(torch.bfloat16), a_float32, b_float32))

    before = torch._C._jit_set_autocast_mode(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            assert_same_bits(_scripted()(a_float32, b_float32), result)
    finally:
        torch._C._jit_set_autocast_mode(before)


def _scripted() -> Any:
    def func(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(a, b)

    return torch.jit.script(func)


def test_scripted_functions_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.export\.ExportedProgram.*ScriptFunc"):
        autocast_backend.export.lower(_scripted())  # type: ignore[arg-type]
