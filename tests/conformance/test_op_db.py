"""PyTorch's own list of operators, each in a region on the CPU, forward and backward; and each
outside of autocast with its backward in such a region. Of bfloat16, or with `--region-dtype
float16`.

Compared with the oracle (the same Dynamo graph under real autocast): dtypes and bits. Where
AOTAutograd itself computes other bits - it decomposes batch norm, interpolation and QR - ours must
be those of stock, operator by operator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

from tests.support import assert_same_bits, tensors

OPS = {
    op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
    for op in op_db
    if torch.float32 in op.supported_dtypes("cpu")
}
# Their results are whatever the memory holds.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"} | {
    "new_empty_strided"
}


def outcome(
    op: OpInfo, *, around: str, autocast: dict[str, Any], **compile_arguments: Any
) -> tuple[list[Any], list[Any]]:
    """Outputs and gradients of the operator's first sample, with autocast around the operator
    ("forward") or around its backward ("backward")."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)))

    def plain(given: Any, args: Any, kwargs: Any) -> Any:
        return op.op(given, *args, **kwargs)

    def region(given: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast(**autocast):
            return op.op(given, *args, **kwargs)

    function = region if around == "forward" else plain
    inputs = (sample.input, sample.args, sample.kwargs)
    leaves = [t for t in tensors(inputs) if t.requires_grad]
    torch.manual_seed(1)
    outputs = tensors(torch.compile(function, **compile_arguments)(*inputs))
    roots = [t for t in outputs if t.requires_grad and t.is_floating_point()]
    if not roots or not leaves:
        return outputs, []
    loss = torch.stack([t.float().sum() for t in roots]).sum()
    with torch.autocast(**autocast, enabled=around == "backward"):
        return outputs, list(torch.autograd.grad(loss, leaves, allow_unused=True))


def resolved(value: Any) -> Any:
    """Without the lazy conjugation and negation that comparing bits trips over, and dense."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.detach().to_dense().resolve_conj().resolve_neg(),
        value,
    )


@pytest.mark.parametrize("name", sorted(OPS.keys() - UNINITIALIZED))
def test_bits(name: str, region: dict[str, Any]) -> None:
    check(name, "forward", region)


@pytest.mark.parametrize(
    "name", sorted(n for n in OPS.keys() - UNINITIALIZED if OPS[n].supports_autograd)
)
def test_bits_with_backward_under_autocast(name: str, region: dict[str, Any]) -> None:
    check(name, "backward", region)


def check(name: str, around: str, autocast: dict[str, Any]) -> None:
    """Compare with the oracle, or with stock where stock's bits are known to be others."""
    op = OPS[name]
    try:
        expected = outcome(op, around=around, autocast=autocast, backend="eager")
    except Exception as error:
        if not name.startswith(EAGER_RAISES):
            raise
        pytest.skip(f"eager autocast itself raises: {str(error).splitlines()[0]}")
    options = {"inner": "aot_eager"}
    actual = outcome(
        op, around=around, autocast=autocast, backend="smart_autocast", options=options
    )
    try:
        assert_same_bits(resolved(actual), resolved(expected), name)
    except AssertionError:
        assert name in DIFFERENT_IN_STOCK
        stock = outcome(op, around=around, autocast=autocast, backend="aot_eager")
        assert_same_bits(resolved(actual), resolved(stock), name)


# No GPU, or a kernel that mixes dtypes when autocast acts inside it.
EAGER_RAISES = ("jiterator_", "linalg.pinv")

DIFFERENT_IN_STOCK = {
    # decomposed by AOTAutograd
    "_batch_norm_with_update",
    "_native_batch_norm_legit",
    "linalg.qr",
    "native_batch_norm",
    "nn.functional.batch_norm",
    "nn.functional.instance_norm",
    "nn.functional.interpolate.bicubic",
    "nn.functional.interpolate.bilinear",
    "nn.functional.interpolate.linear",
    "nn.functional.interpolate.trilinear",
    "nn.functional.upsample_bilinear",
    "qr",
    # a kernel with an autocast op inside (DESIGN.md)
    "nn.functional.bilinear",
}
