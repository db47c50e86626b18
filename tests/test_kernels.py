"""Ops of ATen whose kernels call ops that autocast has a rule for (`_torch/kernels.py`): equal to
eager, in the forward and in every state of the backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode

from autocast_backend import export, lower_autocast
from autocast_backend._torch import kernels
from autocast_backend._torch.autocast import autocast_registrations, has_autocast_kernel
from autocast_backend._torch.kernels import kernels_opened
from autocast_backend.state import AutocastState
from autocast_backend.validation import verdicts
from tests.support import (
    BF16,
    FP16,
    assert_same_bits,
    capture,
    graph_of,
    lower_with_report,
    targets,
)
from tests.test_backend import run_python

OURS = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}
ATEN = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its arguments, and whether eager's backward raises outside of
    autocast, because it mixes dtypes there."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    eager_raises: bool = False


CASES = {
    "bilinear": Case(F.bilinear, ((5, 3), (5, 4), (2, 3, 4), (2,))),
    "weight_twice": Case(lambda x, w: F.bilinear(x, x, w) * (x @ w[0, :, :2]), ((5, 4), (2, 4, 4))),
    "affine_grid": Case(lambda t: F.affine_grid(t, [4, 1, 5, 6], False) * 2, ((4, 2, 3),)),
    "affine_grid_3d": Case(lambda t: F.affine_grid(t, [4, 1, 5, 6, 2], True), ((4, 3, 4),)),
    "grid_sample": Case(
        lambda t, x: F.grid_sample(x, F.affine_grid(t, [4, 1, 5, 6], False), align_corners=False),
        ((4, 2, 3), (4, 1, 5, 6)),
    ),
    "pinv": Case(torch.linalg.pinv, ((5, 3),), eager_raises=True),
    "euclidean_dist": Case(ATEN._euclidean_dist, ((30, 3), (30, 3)), eager_raises=True),
}


def in_region(function: Callable[..., Any]) -> Callable[..., Any]:
    def region(*args: Any) -> Any:
        with torch.autocast(**BF16):
            return function(*args)

    return region


def arguments(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator).requires_grad_() for s in case.shapes]


def outcome(
    case: Case, region: bool, backward: dict[str, Any] | None, **compiler: Any
) -> list[torch.Tensor]:
    """The output and the gradients of a call that is compiled, with the backward in a state."""
    torch._dynamo.reset()
    function = in_region(case.function) if region else case.function
    inputs = arguments(case)
    output = torch.compile(function, **compiler)(*inputs)
    with torch.autocast(**(backward or BF16), enabled=backward is not None):
        return [output, *torch.autograd.grad(output.float().square().sum(), inputs)]


@pytest.mark.parametrize(
    ("name", "region"),
    [*((name, True) for name in CASES), ("weight_twice", False), ("affine_grid", False)],
)
def test_bits_in_every_state_of_the_backward(name: str, region: bool) -> None:
    case, gradients = CASES[name], []
    for backward in (None, BF16, FP16):
        if region and case.eager_raises and backward is None:
            continue
        expected = outcome(case, region, backward, backend="eager")
        assert_same_bits(outcome(case, region, backward, **OURS), expected, str(backward))
        gradients.append(expected[1:])
    same = [torch.equal(a, b) for a, b in zip(gradients[0], gradients[-1], strict=True)]
    assert not all(same), "a case that shows nothing"


@pytest.mark.parametrize("region", [True, False])
def test_a_result_that_comes_out_twice(region: bool) -> None:
    """The kernel of `_trilinear` returns a view of what it has made; the op does not."""

    def twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(**BF16) if region else contextlib.nullcontext():
            result = F.bilinear(x, x, w)
            return result, result.view(-1)

    def both(**compiler: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        inputs = arguments(Case(twice, ((5, 4), (2, 4, 4))))
        with torch.autocast(**BF16, enabled=not region):
            result, flat = torch.compile(twice, **compiler)(*inputs)
        assert flat.data_ptr() == result.data_ptr()
        loss = result.float().sum() + flat.float().square().sum()
        return [result, flat, *torch.autograd.grad(loss, inputs)]

    assert_same_bits(both(**OURS), both(backend="eager"))


def test_without_opening_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "OPENED", {})
    monkeypatch.setattr(kernels, "is_open", lambda: False)
    monkeypatch.setattr(verdicts, "compile_cache_dir", lambda: None)
    verdicts.forget()
    try:
        for name in ("bilinear", "affine_grid", "pinv"):
            expected = outcome(CASES[name], True, BF16, backend="eager")
            ours = outcome(CASES[name], True, BF16, **OURS)
            with pytest.raises(AssertionError):
                assert_same_bits(ours, expected)
    finally:
        verdicts.forget()


def test_example_values_are_eagers() -> None:
    """On fake tensors `affine_grid` gives float32 under autocast. What reads it is lowered for the
    bfloat16 that eager has."""

    def function(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.affine_grid(t, [4, 1, 5, 6], False).view(4, -1), x])

    case = Case(function, ((4, 2, 3), (2, 60)))
    counters.clear()
    expected = outcome(case, True, None, backend="eager")
    assert_same_bits(outcome(case, True, None, **OURS), expected)
    counted = counters["smart_autocast"]
    assert (counted["bracketed"], counted["lowered"]) == (1, 1)


@pytest.mark.parametrize(
    ("function", "dtype", "shapes", "bracketed"),
    [
        # Its own rule on CUDA switches autocast off inside.
        (F.bilinear, torch.float32, ((5, 3), (5, 4), (6, 3, 4)), 0),
        (torch.ldexp, torch.bfloat16, ((4,), (4,)), 1),  # calls pow
        (lambda x: torch.mvlgamma(x, 2), torch.bfloat16, ((4,),), 1),  # calls lgamma, then sum
        (lambda x: ATEN._safe_softmax(x, -1), torch.bfloat16, ((4, 4),), 1),
        (torch.linalg.pinv, torch.float32, ((5, 3),), 1),
    ],
    ids=["bilinear", "ldexp", "mvlgamma", "safe_softmax", "pinv"],
)
def test_cuda(
    function: Callable[..., Any],
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...],
    bracketed: int,
) -> None:
    state = AutocastState.of({"device_type": "cuda", "dtype": torch.bfloat16})
    with FakeTensorMode(), kernels_opened():
        inputs = [torch.empty(s, dtype=dtype, device="cuda") for s in shapes]
        graph = graph_of(function, tuple(inputs), {}, state)
    with torch.no_grad():
        report = lower_with_report(graph, state)
    assert (len(report.bracketed), report.lowered) == (bracketed, 1 - bracketed)


@pytest.mark.parametrize("name", ["_transformer_encoder_layer_fwd", "_native_multi_head_attention"])
def test_the_fast_path_of_transformer_layers(name: str) -> None:
    """In evaluation on the CPU: one ATen op for a whole layer, or its attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    own, x = layer.self_attn, torch.randn(2, 3, 16)
    weights = (own.in_proj_weight, own.in_proj_bias, own.out_proj.weight, own.out_proj.bias)

    def function(x: torch.Tensor) -> Any:
        if name.startswith("_transformer"):
            return layer(x)
        return torch._native_multi_head_attention(x, x, x, 16, 2, *weights)[0]

    with torch.no_grad(), torch.autocast(**BF16):
        assert name in targets(capture(function, x))
        expected = torch.compile(function, backend="eager")(x)
        torch._dynamo.reset()
        assert_same_bits(torch.compile(function, **OURS)(x), expected)
    with torch.no_grad():
        assert not torch.equal(function(x), expected)


def test_sizes_are_compiled_for_as_they_come() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(in_region(F.bilinear), dynamic=True, **OURS)
    for batch in (5, 7):
        inputs = [torch.randn(batch, 3), torch.randn(batch, 4), torch.randn(2, 3, 4)]
        assert_same_bits(compiled(*inputs), in_region(F.bilinear)(*inputs))


def test_a_graph_lowered_alone_keeps_its_bracket() -> None:
    case = CASES["bilinear"]
    inputs = arguments(case)
    alone = lower_autocast(capture(case.function, *inputs), ambient=BF16)
    assert targets(alone) == ["_enter_autocast", "bilinear", "_exit_autocast"]
    assert_same_bits(alone(*inputs), (in_region(case.function)(*inputs),))


def test_an_exported_program() -> None:
    """What reads `affine_grid` is proved for the dtype that eager has there."""

    class Model(torch.nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            with torch.autocast(**BF16):
                return F.affine_grid(t, [4, 1, 5, 6], False).sum(-1) * 2

    t = torch.randn(4, 2, 3)
    program = export.lower(torch.export.export(Model(), (t,)))
    assert_same_bits(program.module()(t), Model()(t))


def test_the_dispatcher_is_changed_once() -> None:
    """Other threads read it meanwhile, without a lock."""

    def dumped() -> list[str]:
        names = [name.partition(".") for name in kernels.OPENED]
        ops = [getattr(getattr(ATEN, n, None), o or "default", None) for n, _, o in names]
        return [torch._C._dispatch_dump_table(op.name()) for op in ops if op is not None]

    with kernels_opened():
        before = dumped()
        assert any("autocast_backend" in table for table in before)
    assert dumped() == before
    with kernels_opened():
        assert dumped() == before


UNTOUCHED = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
CASES = [
    (lambda x, y, w: F.bilinear(x, y, w), [(5, 3), (5, 4), (2, 3, 4)]),
    (lambda t: F.affine_grid(t, [4, 1, 5, 6], False) * 2, [(4, 2, 3)]),
    (torch.ldexp, [(4,), (4,)]),
    (lambda x: layer(x), [(2, 4, 8)]),
]

def results():
    found = []
    for function, shapes in CASES:
        for call in (function, torch.compile(function, backend="aot_eager")):
            for grad in (False, True):
                torch._dynamo.reset()
                torch.manual_seed(0)
                inputs = [torch.randn(shape, requires_grad=grad) for shape in shapes]
                with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
                    result = call(*inputs)
                found.append(result)
                if grad:
                    found += torch.autograd.grad(result.float().square().sum(), inputs)
    return found

before = results()
from autocast_backend._torch.kernels import kernels_opened
with kernels_opened():
    pass
for a, b in zip(before, results(), strict=True):
    assert a.dtype is b.dtype and torch.equal(a, b)
"""


@pytest.mark.slow
def test_eager_mode_and_stock_are_as_without_our_kernels() -> None:
    ran = run_python(UNTOUCHED)
    assert ran.returncode == 0, ran.stderr


def test_our_kernels_are_no_rules_of_autocast() -> None:
    op = ATEN._trilinear.default
    with kernels_opened():
        assert not has_autocast_kernel(op, ("cpu",))
        assert "aten::_trilinear" not in autocast_registrations("cpu")
        assert not kernels.has_kernels_of_users()


def test_a_users_rule_takes_the_place_of_our_kernel() -> None:
    with kernels_opened():
        pass
    op, x = ATEN.mvlgamma.default, torch.full((2,), 3.0)
    library = torch.library.Library("aten", "IMPL")
    library.impl(op, lambda x, p: x * 2, "AutocastCPU")
    try:
        assert has_autocast_kernel(op, ("cpu",))
        assert kernels.has_kernels_of_users()
        with torch.autocast(**BF16):
            assert torch.equal(op(x, 1), x * 2)
    finally:
        library._destroy()
    assert not has_autocast_kernel(op, ("cpu",))
    with torch.autocast(**BF16):
        assert torch.equal(op(x, 1), torch.lgamma(x))


def test_a_users_kernel_for_an_op_of_pytorchs_is_noticed() -> None:
    """Autocast acts on what it calls. What PyTorch gives its own ops this way does not count."""
    assert not kernels.has_kernels_of_users()
    library = torch.library.Library("aten", "IMPL")
    library.impl("hardswish", lambda x: torch.mm(x, x), "AutogradCPU")
    try:
        assert kernels.has_kernels_of_users()
    finally:
        library._destroy()
    assert not kernels.has_kernels_of_users()


def test_calls_of_other_threads_are_eagers() -> None:
    case, found = CASES["bilinear"], []
    inputs = arguments(case)
    expected = in_region(case.function)(*inputs)
    with kernels_opened():
        thread = threading.Thread(target=lambda: found.append(in_region(case.function)(*inputs)))
        thread.start()
        thread.join()
        here = in_region(case.function)(*inputs)
    assert_same_bits(found, [expected])
    assert_same_bits(here, expected)
    assert not torch.equal(expected, case.function(*inputs))


@pytest.mark.slow
def test_inductor() -> None:
    case = CASES["affine_grid"]
    expected = outcome(case, True, None, backend="eager")
    actual = outcome(case, True, None, backend="smart_autocast")
    assert actual[0].dtype is torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("set_default", "values"),
    [
        (torch.set_default_dtype, (torch.float64, torch.float32)),
        (torch.set_default_device, ("meta", None)),
    ],
    ids=["dtype", "device"],
)
def test_what_a_process_finds_out_first_whatever_its_defaults(
    set_default: Callable[[Any], None], values: tuple[Any, Any]
) -> None:
    kernels._scaled_mm_is_emulated.cache_clear()
    kernels._openable.cache_clear()
    x, w = torch.randn(3, 8), nn.Parameter(torch.randn(8, 8))
    torch._dynamo.reset()
    set_default(values[0])
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.compile(lambda x: x @ w, **OURS)(x).dtype is torch.bfloat16
    finally:
        set_default(values[1])
