"""Which state a backward sees, told by ops that have kernels of their own for autocast.

In the manner of PyTorch's own tests of `torch._functorch.config.backward_pass_autocast`: an op
whose autocast kernel gives another value, called in a forward and in its backward.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config

from autocast_backend import BackwardAutocastError, BackwardAutocastWarning
from tests.backward.support import EAGER, STATES, STOCK, ours
from tests.support import BF16, FP16

NAMESPACE = "smart_autocast_backward_tests"
SAYS = {"off": 0.0, "bf16": 1.0, "fp16": 2.0}
"""What `probe` returns under each state."""

FLOAT32, BFLOAT16 = 3.0, 4.0
"""What `dtype_probe` returns: the dtype it is called with."""


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("probe(Tensor x) -> Tensor")
    library.define("composite(Tensor x) -> Tensor")

    def without_autocast(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 0.0)

    def under_autocast(x: torch.Tensor) -> torch.Tensor:
        is_bf16 = torch.get_autocast_dtype("cpu") == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            return torch.full_like(x, 1.0 if is_bf16 else 2.0)

    library.impl("probe", without_autocast, "CompositeExplicitAutograd")
    library.impl("composite", without_autocast, "CompositeImplicitAutograd")
    for name in ("probe", "composite"):
        library.impl(name, under_autocast, "AutocastCPU")

    @torch.library.custom_op(f"{NAMESPACE}::dtype_probe", mutates_args=())
    def dtype_probe(x: torch.Tensor) -> torch.Tensor:
        code = FLOAT32 if x.dtype == torch.float32 else BFLOAT16
        return torch.full(x.shape, code)

    @dtype_probe.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape)

    dtype_probe.register_autocast("cpu", torch.bfloat16)

    @torch.library.custom_op(f"{NAMESPACE}::copy", mutates_args=())
    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @copy.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    copy.register_autograd(lambda ctx, grad: probe(grad))
    yield
    library._destroy()


def probe(x: torch.Tensor) -> torch.Tensor:
    return getattr(torch.ops, NAMESPACE).probe(x)


class Probed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return probe(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return probe(grad)


class DtypeProbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops, NAMESPACE).dtype_probe(grad)


def step(
    function: Callable[[torch.Tensor], torch.Tensor],
    forward: str,
    backward: str,
    **compile_arguments: Any,
) -> tuple[float, float]:
    """The first elements of the result and of the gradient."""
    torch._dynamo.reset()
    x = torch.full((2,), 7.0, requires_grad=True)
    with torch.autocast(**STATES[forward]):
        y = torch.compile(function, **compile_arguments)(x)
    with torch.autocast(**STATES[backward]):
        y.sum().backward()
    assert x.grad is not None
    return y[0].item(), x.grad[0].item()


PAIRS = pytest.mark.parametrize(("forward", "backward"), list(itertools.product(STATES, STATES)))


@PAIRS
def test_auto_sees_the_state_of_the_backward(forward: str, backward: str) -> None:
    expected = (SAYS[forward], SAYS[backward])
    assert step(Probed.apply, forward, backward, **EAGER) == expected
    assert step(Probed.apply, forward, backward, **ours()) == expected


@pytest.mark.parametrize("backward", STATES)
def test_auto_sees_it_in_the_backward_of_a_custom_op(backward: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops, NAMESPACE).copy(x)

    expected = (7.0, SAYS[backward])
    assert step(function, "bf16", backward, **EAGER) == expected
    assert step(function, "bf16", backward, **ours()) == expected


class Composite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops, NAMESPACE).composite(grad)


@pytest.mark.parametrize("backward", STATES)
def test_auto_sees_it_in_an_op_that_tracing_takes_apart(backward: str) -> None:
    """Of a composite op there is nothing left in the graph: two states differ in an argument."""
    expected = (7.0, SAYS[backward])
    assert step(Composite.apply, "off", backward, **EAGER) == expected
    assert step(Composite.apply, "off", backward, **ours()) == expected


@pytest.mark.parametrize(("backward", "code"), [("off", FLOAT32), ("bf16", BFLOAT16)])
@pytest.mark.parametrize("forward", ["off", "bf16"])
def test_register_autocast(forward: str, backward: str, code: float) -> None:
    assert step(DtypeProbed.apply, forward, backward, **EAGER) == (7.0, code)
    assert step(DtypeProbed.apply, forward, backward, **ours()) == (7.0, code)


PINNED: dict[str, tuple[Any, Callable[[str], str]]] = {
    "on": ("same_as_forward", lambda forward: forward),
    "off": ("off", lambda _: "off"),
    "dict": (FP16, lambda _: "fp16"),
    "list": ([BF16], lambda _: "bf16"),
}


@pytest.mark.parametrize("backward", STATES)
@pytest.mark.parametrize(
    ("setting", "forward"),
    [
        ("on", "off"),
        ("on", "bf16"),
        ("on", "fp16"),
        ("off", "bf16"),
        ("dict", "off"),
        ("list", "off"),
    ],
)
def test_pinned_sees_the_assumed_state(setting: str, forward: str, backward: str) -> None:
    option, assumed = PINNED[setting]
    expected = (SAYS[forward], SAYS[assumed(forward)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(Probed.apply, forward, backward, **ours(backward_pass_autocast=option))
    assert found == expected
    warned = any(w.category is BackwardAutocastWarning for w in caught)
    assert warned == (assumed(forward) != backward)


STOCKS_SETTINGS: list[tuple[Any, str, str, str]] = [
    ("same_as_forward", "bf16", "bf16", "off"),
    ("off", "bf16", "off", "off"),
    ([{"device_type": "cpu"}], "off", "bf16", "bf16"),
]


@pytest.mark.parametrize(("setting", "forward", "stock", "mine"), STOCKS_SETTINGS)
def test_the_settings_of_stock(setting: Any, forward: str, stock: str, mine: str) -> None:
    """As upstream tests them, with backward outside of autocast. The first is the default, which
    here is "auto"; another setting means what it means to stock."""
    quiet = ours(on_backward_autocast_mismatch="do_nothing")
    with torch._functorch.config.patch(backward_pass_autocast=setting):
        assert step(Probed.apply, forward, "off", **STOCK) == (SAYS[forward], SAYS[stock])
        assert step(Probed.apply, forward, "off", **quiet) == (SAYS[forward], SAYS[mine])


def test_stock_sees_the_state_of_the_forward() -> None:
    """That is what is wrong with it. Only where autocast was off around the forward does it leave
    the state alone in which the compiled backward runs."""
    assert step(Probed.apply, "bf16", "off", **STOCK) == (SAYS["bf16"], SAYS["bf16"])
    assert step(Probed.apply, "bf16", "fp16", **STOCK) == (SAYS["bf16"], SAYS["bf16"])
    assert step(Probed.apply, "off", "bf16", **STOCK) == (SAYS["off"], SAYS["bf16"])


def test_an_error_where_the_op_would_see_another_state() -> None:
    options = {"backward_pass_autocast": "off", "on_backward_autocast_mismatch": "error"}
    with pytest.raises(BackwardAutocastError, match="assumes off; in eager mode"):
        step(Probed.apply, "off", "bf16", **ours(**options))
    assert step(Probed.apply, "bf16", "off", **ours(**options)) == (SAYS["bf16"], SAYS["off"])


def test_a_constant_that_hangs_on_the_state() -> None:
    """The traces of two states are the same but for what is in it."""

    @torch.library.custom_op(f"{NAMESPACE}::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        under_autocast = torch.is_autocast_enabled("cpu")
        return grad * torch.tensor([2.0, 3.0] if under_autocast else [5.0, 7.0])

    twice.register_autograd(backward)
    compiled = torch.compile(lambda x: twice(x), **ours())
    for state, expected in (("off", [5.0, 7.0]), ("bf16", [2.0, 3.0])):
        x = torch.ones(2, requires_grad=True)
        result = compiled(x)
        with torch.autocast(**STATES[state]):
            result.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == expected
