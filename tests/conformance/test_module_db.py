"""PyTorch's own list of modules, each in a region, forward and backward: in bfloat16 and in
float16. Dynamo traces the first of them, which `--region-dtype` names; `--device` names where they
run.

Each of the 114 modules runs in training mode with the first and the last of its samples. Compared
with the oracle (the same Dynamo graph under real autocast) are the bits of the outputs, the buffers
and the gradients of parameters and inputs. Where AOTAutograd itself computes other bits, ours must
be those of stock, module by module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from tests.conformance.one_trace import (
    OneTrace,
    may_be_stocks,
    ours,
    same_bits_or_why_not,
    skip_for,
)
from tests.support import DEVICE, assert_same_bits, autocast_put_right, tensors, weighted_sum

MODULES = {info.formatted_name: info for info in module_db}


def sample_of(info: ModuleInfo, index: int) -> ModuleInput:
    torch.manual_seed(0)
    samples = info.module_inputs_func(
        info, device=DEVICE, dtype=torch.float32, requires_grad=True, training=True
    )
    return list(samples)[index]


@dataclass(frozen=True)
class Traced:
    """A module with one of its samples, compiled once. What it computes: outputs, buffers and
    gradients."""

    info: ModuleInfo
    index: int
    module: nn.Module
    state: dict[str, Any]
    trace: OneTrace
    compiled: Callable[..., Any]

    @classmethod
    def of(cls, info: ModuleInfo, index: int, dtypes: Sequence[torch.dtype]) -> Traced:
        """Traced by its first call, in a region of the first dtype."""
        torch._dynamo.reset()
        sample = sample_of(info, index)
        made, given = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(DEVICE)

        def region(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(DEVICE, dtype=dtypes[0]):
                return module(*args, **kwargs)

        if isinstance(module, LazyModuleMixin):
            module(*given.args, **given.kwargs)
        state = copy.deepcopy(module.state_dict())
        stock = ("stock",) if may_be_stocks(info.formatted_name, DIFFERENT_IN_STOCK) else ()
        trace = OneTrace(("eager", "ours", *stock), dtypes)
        compiled = torch.compile(region, backend=trace)
        return cls(info, index, module, state, trace, compiled)

    def outcome(self, way: str, dtype: torch.dtype) -> tuple[list[Any], ...]:
        """What one way to run it, with a region of `dtype`, gives."""
        self.module.load_state_dict(self.state)
        with self.trace.chosen(way, dtype):
            return outcome(self.compiled, self.module, sample_of(self.info, self.index))


def outcome(call: Callable[..., Any], module: nn.Module, sample: ModuleInput) -> tuple[Any, ...]:
    """Outputs, buffers and gradients of a call of a module."""
    given = sample.forward_input
    torch.manual_seed(1)
    outputs = tensors(call(*given.args, **given.kwargs))
    inputs = (*module.parameters(), *tensors((given.args, given.kwargs)))  # lazy ones exist by now
    leaves = [t for t in inputs if t.requires_grad]
    roots = [t for t in outputs if t.requires_grad]
    gradients: list[Any] = []
    if roots and leaves:
        loss = weighted_sum(roots)
        gradients += torch.autograd.grad(loss, leaves, allow_unused=True)
    return outputs, [b.clone() for b in module.buffers()], gradients


@pytest.mark.parametrize("index", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", MODULES)
def test_bits(name: str, index: int, dtypes: Sequence[torch.dtype]) -> None:
    traced = Traced.of(MODULES[name], index, dtypes)
    skip_for([check(traced, dtype) for dtype in dtypes])


def check(traced: Traced, dtype: torch.dtype) -> str | None:
    """Compare with the oracle, or with stock; the reason where that says less."""
    name = traced.info.formatted_name
    try:
        with autocast_put_right():
            expected = traced.outcome("eager", dtype)
    except Exception as error:
        if NO_FLOAT16 in str(error):
            return None
        if name not in EAGER_RAISES and DEVICE == "cpu":
            raise
        return f"eager autocast itself raises: {str(error).splitlines()[0]}"
    return same_bits_or_why_not(
        lambda way: traced.outcome(way, dtype), expected, name, DIFFERENT_IN_STOCK
    )


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("nn_Lazy")])
def test_parameters_that_the_compiled_call_makes(name: str) -> None:
    def lazily(backend: Any) -> tuple[Any, ...]:
        torch._dynamo.reset()
        sample = sample_of(MODULES[name], 0)
        module = MODULES[name].module_cls(*sample.constructor_input.args).to(DEVICE)

        def region(*args: Any) -> Any:
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                return module(*args)

        return outcome(torch.compile(region, backend=backend), module, sample)

    stock = name in DIFFERENT_IN_STOCK
    assert_same_bits(lazily(ours), lazily("aot_eager" if stock else "eager"), name)


# The kernel refuses random samples of another dtype than the input that autocast has cast.
EAGER_RAISES = {"nn_FractionalMaxPool2d", "nn_FractionalMaxPool3d"}

# oneDNN has no LSTM in float16 for every processor.
NO_FLOAT16 = "could not create a primitive descriptor for the LSTM forward"

DIFFERENT_IN_STOCK = {
    # a custom op without an autocast rule (`CustomOpWarning` says so); since torch 2.15
    "nn_LinearCrossEntropyLoss",
}
