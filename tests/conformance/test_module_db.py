"""PyTorch's own list of modules, each in a region on the CPU, forward and backward: of bfloat16, or
with `--region-dtype float16`.

Each of the 114 modules runs in training mode with the first and the last of its samples. Compared
with the oracle (the same Dynamo graph under real autocast) are the bits of the outputs, the buffers
and the gradients of parameters and inputs. Where AOTAutograd itself computes other bits, ours must
be those of stock, module by module.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from tests.support import assert_same_bits, autocast_put_right, tensors

MODULES = {info.formatted_name: info for info in module_db}


def sample_of(info: ModuleInfo, index: int) -> ModuleInput:
    torch.manual_seed(0)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    return list(samples)[index]


def outcome(
    info: ModuleInfo, index: int, autocast: dict[str, Any], **compile_arguments: Any
) -> tuple[list[Any], ...]:
    """Outputs, buffers and gradients of one sample."""
    torch._dynamo.reset()
    sample = sample_of(info, index)
    made, given = sample.constructor_input, sample.forward_input
    module = info.module_cls(*made.args, **made.kwargs)

    def region(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(**autocast):
            return module(*args, **kwargs)

    torch.manual_seed(1)
    outputs = tensors(torch.compile(region, **compile_arguments)(*given.args, **given.kwargs))
    inputs = (*module.parameters(), *tensors((given.args, given.kwargs)))  # lazy ones exist by now
    leaves = [t for t in inputs if t.requires_grad]
    roots = [t for t in outputs if t.requires_grad]
    gradients: list[Any] = []
    if roots and leaves:
        loss = torch.stack([t.float().sum() for t in roots]).sum()
        gradients += torch.autograd.grad(loss, leaves, allow_unused=True)
    return outputs, list(module.buffers()), gradients


@pytest.mark.parametrize("index", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", MODULES)
def test_bits(name: str, index: int, region: dict[str, Any]) -> None:
    info = MODULES[name]
    try:
        with autocast_put_right():
            expected = outcome(info, index, region, backend="eager")
    except Exception as error:
        if name not in EAGER_RAISES and NO_FLOAT16 not in str(error):
            raise
        pytest.skip(f"eager autocast itself raises: {str(error).splitlines()[0]}")
    options = {"inner": "aot_eager"}
    actual = outcome(info, index, region, backend="smart_autocast", options=options)
    try:
        assert_same_bits(actual, expected, name)
    except AssertionError:
        assert name in DIFFERENT_IN_STOCK
        assert_same_bits(actual, outcome(info, index, region, backend="aot_eager"), name)


# The kernel refuses random samples of another dtype than the input that autocast has cast.
EAGER_RAISES = {"nn_FractionalMaxPool2d", "nn_FractionalMaxPool3d"}

# oneDNN has no LSTM in float16 for every processor.
NO_FLOAT16 = "could not create a primitive descriptor for the LSTM forward"

DIFFERENT_IN_STOCK = {
    # decomposed by AOTAutograd
    "nn_BatchNorm1d",
    "nn_BatchNorm2d",
    "nn_BatchNorm3d",
    "nn_InstanceNorm1d",
    "nn_InstanceNorm2d",
    "nn_InstanceNorm3d",
    "nn_MultiLabelMarginLoss",
    "nn_MultiMarginLoss",
    # a kernel with an autocast op inside (DESIGN.md)
    "nn_Bilinear",
}
