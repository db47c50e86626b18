"""A backward under another state than the pinned one: what is said, and what can be pinned.

When it is said is in test_states.py.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

from autocast_backend import BackwardAutocastError, BackwardAutocastWarning
from autocast_backend.options import OptionTypeError, OptionValueError
from tests.backward.support import EAGER, OFF, STATES, STOCK, Steps, ours, same_bits
from tests.support import BF16, FP16, assert_same_bits

CONFIG = "backward_pass_autocast"


class Linear(nn.Linear):
    """Nothing of it is in low precision: any autocast around its backward changes it."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7))


def step(
    forward: dict[str, Any], backward: dict[str, Any], **compile_arguments: Any
) -> tuple[list[Any], list[str]]:
    """A first step of a fresh compilation, and the messages of its warnings."""
    steps = Steps(Linear, _x, **compile_arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = steps.step(forward, backward)
    said = [str(w.message) for w in caught if w.category is BackwardAutocastWarning]
    return values, said


def test_the_message_names_the_region_the_states_an_op_and_the_remedy() -> None:
    _, (message,) = step(OFF, BF16, **ours(backward_pass_autocast="off"))
    lines, start = inspect.getsourcelines(Linear)
    line = start + next(i for i, text in enumerate(lines) if "return super().forward" in text)
    assert message.startswith(f'the backward of File "{__file__}", line {line}, in forward ')
    assert "runs under autocast cpu: bfloat16, but backward_pass_autocast='off' assumes off" in (
        message
    )
    assert "aten.mm(float32, float32) would be aten.mm(bfloat16, bfloat16)" in message
    assert re.search(r"\(and \d more\)", message)
    assert 'backward_pass_autocast="auto"' in message


@pytest.mark.parametrize(
    ("option", "forward", "backward", "words"),
    [
        ("off", "off", "fp16", "under autocast cpu: float16, but .*='off' assumes off;"),
        ("same_as_forward", "bf16", "fp16", "='same_as_forward' assumes cpu: bfloat16;"),
        ("same_as_forward", "off", "bf16", "='same_as_forward' assumes off;"),
        (BF16, "off", "off", "under autocast off, but .* assumes cpu: bfloat16;"),
        (FP16, "bf16", "bf16", "under autocast cpu: bfloat16, but .* assumes cpu: float16;"),
    ],
)
def test_the_message_names_both_states(
    option: Any, forward: str, backward: str, words: str
) -> None:
    _, (message,) = step(STATES[forward], STATES[backward], **ours(backward_pass_autocast=option))
    assert re.search(words, message)


def test_an_error_comes_each_time_and_leaves_no_gradient() -> None:
    options = {"backward_pass_autocast": "off", "on_backward_autocast_mismatch": "error"}
    steps = Steps(Linear, _x, **ours(**options))
    for _ in range(2):
        with pytest.raises(BackwardAutocastError, match=r"assumes off; in eager mode aten\.mm"):
            steps.step(OFF, BF16)
        assert all(p.grad is None for p in steps.model.parameters())
    assert_same_bits(steps.step(OFF, OFF), Steps(Linear, _x, **EAGER).step(OFF, OFF))


def test_do_nothing_says_nothing() -> None:
    options = {"backward_pass_autocast": "off", "on_backward_autocast_mismatch": "do_nothing"}
    values, said = step(OFF, BF16, **ours(**options))
    assert said == []
    assert_same_bits(values, Steps(Linear, _x, **EAGER).step(OFF, OFF))


@pytest.mark.parametrize("reaction", ["warn", "error"])
@pytest.mark.parametrize("option", ["same_as_forward", "off", BF16])
def test_auto_is_not_concerned_and_the_assumed_state_is_no_mismatch(
    option: Any, reaction: str
) -> None:
    for value, state in (("auto", FP16), (option, OFF if isinstance(option, str) else BF16)):
        settings = {"backward_pass_autocast": value, "on_backward_autocast_mismatch": reaction}
        _, said = step(OFF, state, **ours(**settings))
        assert said == []


@pytest.mark.parametrize("setting", [BF16, [BF16]], ids=["dict", "list"])
def test_the_setting_of_stock_around_one_call(setting: Any) -> None:
    """Taken where the option is not given; its default, "same_as_forward", is not taken."""
    expected = Steps(Linear, _x, **EAGER)
    expected_off, expected_bf16 = expected.step(OFF, OFF), expected.step(OFF, BF16)
    assert not same_bits(expected_off, expected_bf16)
    with torch._functorch.config.patch(backward_pass_autocast=setting):
        values, said = step(OFF, OFF, **ours())
        assert_same_bits(values, expected_bf16)
        assert len(said) == 1
        values, said = step(OFF, OFF, **ours(backward_pass_autocast="off"))
        assert_same_bits(values, expected_off)
        assert said == []
    values, said = step(OFF, BF16, **ours())
    assert_same_bits(values, expected_bf16)
    assert said == []


def test_the_setting_counts_when_forward_compiles_not_when_backward_runs() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Linear()
    compiled = torch.compile(model, **ours())
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        y = compiled(_x())
    with torch.autocast(**BF16), pytest.warns(BackwardAutocastWarning):
        y.sum().backward()
    actual = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(_x()).sum().backward()
    assert_same_bits(actual, [p.grad for p in model.parameters()])


def test_a_dict_as_stock_documents_it() -> None:
    """Its documentation says `= kwargs`; its code wants a list."""
    with torch._functorch.config.patch(backward_pass_autocast=BF16):
        with pytest.raises(Exception, match="expected backward_pass_autocast to be a list"):
            step(OFF, OFF, **STOCK)
        values, _ = step(OFF, BF16, **ours())
    assert_same_bits(values, Steps(Linear, _x, **EAGER).step(OFF, BF16))


def test_the_region_of_the_option_autocast_is_the_forwards_state() -> None:
    options = {"autocast": BF16, "backward_pass_autocast": "same_as_forward"}
    values, (message,) = step(OFF, FP16, **ours(**options))
    assert re.search("under autocast cpu: float16, but .* assumes cpu: bfloat16;", message)
    assert_same_bits(values, Steps(Linear, _x, **EAGER).step(BF16, BF16))


def test_a_dict_can_say_off() -> None:
    values, said = step(BF16, OFF, **ours(backward_pass_autocast=OFF))
    assert said == []
    assert_same_bits(values, Steps(Linear, _x, **EAGER).step(BF16, OFF))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {CONFIG: "same_as_forwards"},
        OptionValueError,
        "expected one of 'auto', 'same_as_forward', 'off'",
    ),
    ({CONFIG: "on"}, OptionValueError, f"'{CONFIG}': unknown value 'on'"),
    ({CONFIG: True}, OptionTypeError, f"'{CONFIG}': expected 'auto', .*; got True"),
    ({CONFIG: {"dtype": torch.bfloat16}}, OptionValueError, '"device_type" is missing'),
    ({CONFIG: {"device_type": "gpu"}}, OptionValueError, "device_type: expected one of"),
    ({CONFIG: [BF16, {"device": "cpu"}]}, OptionValueError, "unknown torch.autocast argument"),
    ({CONFIG: [BF16, "off"]}, OptionTypeError, "dict of torch.autocast arguments"),
    ({"on_backward_autocast_mismatch": "raise"}, OptionValueError, "unknown value 'raise'"),
    (
        {"on_backward_autocast_mismatch": None},
        OptionTypeError,
        "expected one of 'warn', 'error', 'do_nothing'; got None",
    ),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD)
def test_a_bad_value_is_an_error_before_anything_compiles(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    def inner(*_: Any) -> Any:
        raise AssertionError("compiled")

    torch._dynamo.reset()
    with pytest.raises(error, match=words):
        torch.compile(Linear(), **ours(inner, **options))(_x())


def test_a_bad_setting_of_stock_is_an_error_too() -> None:
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(backward_pass_autocast="of"),
        pytest.raises(OptionValueError, match=r"'backward_pass_autocast'.*expected one of .*'off'"),
    ):
        torch.compile(Linear(), **ours())(_x())


class LoopsBackward(torch.autograd.Function):
    """A loop in its backward carries a product: under autocast its dtypes do not fit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (w,) = ctx.saved_tensors
        start = torch.tensor(0), grad
        _, result = while_loop(lambda i, g: i < 2, lambda i, g: (i + 1, g @ w), start)
        return result, None


def test_a_backward_that_raises_in_eager_mode_runs_as_pinned() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return LoopsBackward.apply(x, w).sin()  # type: ignore[no-any-return, no-untyped-call]

    torch._dynamo.reset()
    compiled = torch.compile(function, **ours(backward_pass_autocast="off"))
    x, w = _x().requires_grad_(), torch.eye(8) / 2
    loss = compiled(x, w).sum()
    with torch.autocast(**BF16), pytest.warns(BackwardAutocastWarning, match="it raises: Expected"):
        (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, torch.cos(x * 2) / 4)
