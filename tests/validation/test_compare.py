"""Translation validation: it must see every way in which a lowered call could differ."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from autocast_backend import AutocastState
from autocast_backend._torch.fake_tensors import failures_unlogged
from autocast_backend.lowering import proving, recipes
from autocast_backend.policies.table import Policy
from autocast_backend.validation import verdicts
from autocast_backend.validation.compare import Failed, difference, observe, observed
from tests.support import BF16, assert_same_bits, graph_of, lower_with_report, targets

STATE = AutocastState.of(BF16)


@pytest.fixture(autouse=True)
def _fresh_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask validation every question anew, whatever earlier runs left in memory and on disk."""
    monkeypatch.setattr(verdicts, "compile_cache_dir", lambda: None)
    verdicts.forget()


@pytest.fixture
def fake_mode() -> Any:
    with FakeTensorMode() as mode:
        yield mode


def why(eager: Any, ours: Any, mode: Any, level: Any = "ops") -> str | None:
    return difference(observe(eager, STATE, mode, True), observe(ours, None, mode, True), level)


def test_equal_calls_have_no_difference(fake_mode: Any) -> None:
    x = torch.empty(4, 4)
    assert why(lambda: x @ x, lambda: x.bfloat16() @ x.bfloat16(), fake_mode) is None


def test_a_nan_among_the_arguments_is_equal_to_itself(fake_mode: Any) -> None:
    x, nan = torch.empty(4, 4), float("nan")
    assert why(lambda: torch.full_like(x, nan), lambda: torch.full_like(x, nan), fake_mode) is None
    assert (
        why(lambda: torch.full_like(x, nan), lambda: torch.full_like(x, 0), fake_mode) is not None
    )


def test_a_result_of_another_dtype_is_seen(fake_mode: Any) -> None:
    x = torch.empty(4, 4)
    reason = why(lambda: x @ x, lambda: x @ x, fake_mode, "dtypes")
    assert reason == "autocast gives bfloat16, without it float32"


def test_an_op_that_computes_in_another_dtype_is_seen_behind_an_equal_result(
    fake_mode: Any,
) -> None:
    x = torch.empty(4, 4)
    eager, ours = lambda: (x @ x).float(), lambda: (x @ x).float()
    assert why(eager, ours, fake_mode, "dtypes") is None
    assert "aten.mm.default(bfloat16, bfloat16" in str(why(eager, ours, fake_mode))


def test_another_op_another_argument_or_another_shape_is_seen(fake_mode: Any) -> None:
    x = torch.empty(4, 8)
    assert "aten.sin" in str(why(lambda: x.cos(), lambda: x.sin(), fake_mode))
    assert why(lambda: x.sum(0), lambda: x.sum(0, keepdim=True), fake_mode) is not None
    assert why(lambda: x.cumsum(0), lambda: x.cumsum(1), fake_mode) is not None
    assert why(lambda: x.cos().cos(), lambda: x.cos(), fake_mode) is not None


def test_one_cast_is_not_two(fake_mode: Any) -> None:
    """Two casts of one tensor add their gradients in float32, one cast in bfloat16."""
    x = torch.empty(4, 4)

    def once() -> torch.Tensor:
        y = x.bfloat16()
        return y @ y

    assert why(lambda: x @ x, once, fake_mode) == "autocast makes 2 casts, without it 1"


def test_an_expand_before_or_after_the_cast_is_seen(fake_mode: Any) -> None:
    """Its backward is a sum, which rounds; a transpose only renames elements."""
    x = torch.empty(1, 4)
    eager = lambda: x.expand(4, 4) @ torch.ones(4, 4)  # noqa: E731
    assert why(eager, lambda: x.bfloat16().expand(4, 4) @ torch.ones(4, 4).bfloat16(), fake_mode)
    eager = lambda: x.t() @ x  # noqa: E731
    assert why(eager, lambda: x.bfloat16().t() @ x.bfloat16(), fake_mode) is None


def test_a_call_that_raises_is_an_answer(fake_mode: Any) -> None:
    x = torch.empty(4, 4)
    outcome = observe(lambda: x @ torch.empty(3, 3), None, fake_mode, True)
    assert isinstance(outcome, Failed)
    assert "RuntimeError" in outcome.message
    assert difference(observed(x), outcome, "dtypes")


def test_observing_leaves_the_fake_mode_and_the_state_alone(fake_mode: Any) -> None:
    before = AutocastState.current()
    x = torch.empty(4)
    observe(lambda: x.nonzero(), STATE, fake_mode, True)
    observe(lambda: 1 / 0, STATE, fake_mode, False)
    assert AutocastState.current() == before
    assert torch.is_grad_enabled()


def claim(monkeypatch: pytest.MonkeyPatch, policy: Policy | None) -> None:
    """Make the policy table answer `policy` to every question."""
    monkeypatch.setattr(recipes, "find_policy", lambda *_: policy)


@pytest.mark.parametrize("validate", ["strict", "dtype"])
@pytest.mark.parametrize("policy", [Policy.FP32, None], ids=["wrong", "missing"])
def test_a_wrong_or_missing_policy_is_found_out(
    monkeypatch: pytest.MonkeyPatch, fake_mode: Any, validate: str, policy: Policy | None
) -> None:
    """And set right: eager was seen to cast both arguments of `mm` to bfloat16."""
    claim(monkeypatch, policy)
    x = torch.empty(4, 4)
    module = graph_of(torch.mm, (x, x), {}, STATE)
    report = lower_with_report(module, STATE, validate)
    assert (report.lowered, report.bracketed) == (1, [])
    assert targets(module) == ["autocast_to_bf16.default", "autocast_to_bf16.default", "mm"]


def test_without_validation_the_table_is_believed(
    monkeypatch: pytest.MonkeyPatch, fake_mode: Any
) -> None:
    claim(monkeypatch, Policy.FP32)
    x = torch.empty(4, 4)
    module = graph_of(torch.mm, (x, x), {}, STATE)
    lower_with_report(module, STATE, "off")
    assert targets(module)[0] == "autocast_to_full_precision.default"


@pytest.mark.parametrize(("validate", "casts"), [("strict", 1), ("dtype", 0)])
def test_only_the_strict_check_sees_behind_an_equal_result(
    monkeypatch: pytest.MonkeyPatch, fake_mode: Any, validate: str, casts: int
) -> None:
    """`smooth_l1_loss` of bfloat16 and float32 gives float32 with and without autocast; what it
    computes inside is another thing."""
    claim(monkeypatch, None)
    half, full = torch.empty(4, 4, dtype=torch.bfloat16), torch.empty(4, 4)
    report = lower_with_report(graph_of(F.smooth_l1_loss, (half, full), {}, STATE), STATE, validate)
    assert report.casts == casts


def test_composites_without_a_rule_are_looked_into(fake_mode: Any) -> None:
    """A GRU cell gives float32 with and without autocast; the products inside do not."""
    x, h = torch.empty(4, 4, dtype=torch.bfloat16), torch.empty(4, 4)
    weights = [torch.empty(12, 4), torch.empty(12, 4), torch.empty(12), torch.empty(12)]
    found = {}
    for validate in ("strict", "dtype"):
        module = graph_of(torch.gru_cell, (x, h, *weights), {}, STATE)
        lower_with_report(module, STATE, validate)
        found[validate] = targets(module)
    assert found["dtype"] == found["strict"] != ["gru_cell"]


def test_equal_questions_are_asked_once(monkeypatch: pytest.MonkeyPatch, fake_mode: Any) -> None:
    asked = []
    real = proving.observe
    monkeypatch.setattr(proving, "observe", lambda *a: asked.append(1) or real(*a))
    x = torch.empty(4, 4)
    for _ in range(3):
        lower_with_report(graph_of(torch.mm, (x, x), {}, STATE), STATE)
    once = len(asked)
    assert once > 0
    half = x.half()
    lower_with_report(graph_of(torch.mm, (half, half), {}, STATE), STATE)
    assert len(asked) == 2 * once


def test_one_tensor_twice_is_another_question_than_two_tensors(fake_mode: Any) -> None:
    x, y = torch.empty(4, 4), torch.empty(4, 4)
    assert lower_with_report(graph_of(torch.mm, (x, y), {}, STATE), STATE).checked == 1
    module = graph_of(torch.mm, (x, y), {}, STATE)
    (call,) = [n for n in module.graph.nodes if n.op == "call_function"]
    call.args = (call.args[0], call.args[0])
    assert lower_with_report(module, STATE).checked == 1


def test_functions_that_share_a_name_are_other_questions(fake_mode: Any) -> None:
    def make(function: Any) -> Any:
        return lambda x: function(x)

    x = torch.empty(4, 4)
    sine, product = make(torch.sin), make(lambda x: x @ x)
    assert lower_with_report(graph_of(sine, (x,), {}, STATE), STATE).untouched == 1
    assert lower_with_report(graph_of(product, (x,), {}, STATE), STATE).untouched == 0


def test_a_function_that_is_defined_again_is_another_question(fake_mode: Any) -> None:
    """As in a notebook: the same name, another body."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def again(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    x = torch.empty(4, 4)
    for f, untouched in ((function, 1), (again, 0)):
        f.__qualname__ = "function"
        assert lower_with_report(graph_of(f, (x,), {}, STATE), STATE).untouched == untouched


def _product(x: torch.Tensor) -> torch.Tensor:
    made = torch.ones(4, 4)
    return (made @ made).to(x) * x


def _product_if_deterministic(x: torch.Tensor) -> torch.Tensor:
    return x @ x if torch.are_deterministic_algorithms_enabled() else x * x


def _product_if_einsum_is_optimized(x: torch.Tensor) -> torch.Tensor:
    return x @ x if torch.backends.opt_einsum.is_available() else x * x


def _make_opt_einsum_available(available: bool) -> None:
    torch.backends.opt_einsum.is_available = lambda: available


@pytest.mark.parametrize(
    ("function", "get", "put", "values"),
    [
        # autocast leaves a product of float64 alone, and one on a device it is not on for
        (
            _product,
            torch.get_default_dtype,
            torch.set_default_dtype,
            (torch.float64, torch.float32),
        ),
        (_product, lambda: None, torch.set_default_device, ("meta", None)),
        (
            _product_if_deterministic,
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            (False, True),
        ),
        (
            _product_if_einsum_is_optimized,
            torch.backends.opt_einsum.is_available,
            _make_opt_einsum_available,
            (False, True),
        ),
    ],
    ids=["dtype", "device", "deterministic", "einsum"],
)
def test_another_default_is_another_question(
    function: Any, get: Any, put: Any, values: Any, fake_mode: Any
) -> None:
    """A function finds them inside."""
    x = torch.empty(4, 4)
    before = get()
    try:
        for value, untouched in zip(values, (1, 0), strict=True):
            put(value)
            report = lower_with_report(graph_of(function, (x,), {}, STATE), STATE)
            assert report.untouched == untouched
    finally:
        put(before)


def test_a_refusal_in_one_thread_is_no_silence_in_others(
    caplog: pytest.LogCaptureFixture, fake_mode: Any
) -> None:
    """Fake tensors log what they refuse; while a call is tried, that is nobody's business."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    with failures_unlogged():
        with failures_unlogged():
            log.error("here")
        thread = threading.Thread(target=log.error, args=("there",))
        thread.start()
        thread.join()
    log.error("after")
    log.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == ["there", "after"]


def test_what_a_function_reads_elsewhere_is_asked_again(fake_mode: Any) -> None:
    """Nothing says that it is another question: the answer is kept for one graph only."""
    x, product = torch.empty(4, 4), False

    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ x if product else x.sin()

    assert lower_with_report(graph_of(function, (x,), {}, STATE), STATE).untouched == 1
    product = True
    assert lower_with_report(graph_of(function, (x,), {}, STATE), STATE).untouched == 0


def test_a_function_under_the_name_of_pytorchs_is_another_question(fake_mode: Any) -> None:
    """As libraries make them that replace one of PyTorch's."""

    @functools.wraps(F.hardswish)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    assert verdicts.comes_with_torch(F.hardswish)
    assert not verdicts.comes_with_torch(function)
    x = torch.empty(4, 4)
    for f, untouched in ((F.hardswish, 1), (function, 0)):
        assert lower_with_report(graph_of(f, (x,), {}, STATE), STATE).untouched == untouched


def test_a_rule_of_the_users_for_an_op_of_pytorchs_is_asked_again(fake_mode: Any) -> None:
    x = torch.empty(4, 4)

    def untouched() -> int:
        return lower_with_report(graph_of(torch.sin, (x,), {}, STATE), STATE).untouched

    def rule(x: torch.Tensor) -> torch.Tensor:
        with AutocastState.off().applied():
            return torch.sin(x.bfloat16())

    assert untouched() == 1
    library = torch.library.Library("aten", "IMPL")
    library.impl("sin", rule, "AutocastCPU")
    try:
        assert untouched() == 0
    finally:
        library._destroy()
    assert untouched() == 1


class Weight(torch.Tensor):
    """One that decides by a field of its own what `linear` does with it."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, product: bool) -> Weight:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: torch.Tensor, product: bool) -> None:
        self.values_, self.product = values, product

    def __repr__(self) -> str:
        return f"Weight(product={self.product})"

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["values_"], self.product

    @staticmethod
    def __tensor_unflatten__(inner: Any, product: bool, size: Any, stride: Any) -> Weight:
        return Weight(inner["values_"], product)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is F.linear:
            x, weight, *_ = args
            values = weight.values_
            return x @ values.t() if weight.product else (x.unsqueeze(-2) * values).mean(-1)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any, kwargs: Any = None):
        assert op is torch.ops.aten.detach.default
        return Weight(args[0].values_.detach(), args[0].product)


def test_fields_of_a_tensor_subclass_are_another_question() -> None:
    """As of torchao's int8 weights, with which `linear` multiplies integers or floating-point
    numbers: kept by the class alone, the answer for the one took autocast from the other."""

    def function(x: torch.Tensor, weight: Weight) -> torch.Tensor:
        with torch.autocast(**BF16):
            return F.linear(x, weight)

    x, values = torch.ones(3, 8), torch.randn(8, 8)
    for product in (False, True):
        torch._dynamo.reset()
        weight = Weight(values, product)
        compiled = torch.compile(function, backend="smart_autocast", options={"inner": "aot_eager"})
        assert_same_bits(compiled(x, weight), function(x, weight))
