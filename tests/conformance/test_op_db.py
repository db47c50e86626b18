"""PyTorch's own list of operators, each in a region, forward and backward, in bfloat16 and in
float16; and each with its backward in such a region, in the first of them, and its forward outside
of autocast, or in a region where autocast does nothing to it. The first is the one Dynamo traces,
which `--region-dtype` names; `--device` names where they run.

Compared with the oracle (the same Dynamo graph under real autocast): dtypes and bits. Where
AOTAutograd itself computes other bits, ours must be those of stock, operator by operator. On a GPU,
too, where more of them differ, and some from run to run: those are skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.conformance.one_trace import OneTrace, may_be_stocks, same_bits_or_why_not, skip_for
from tests.support import DEVICE, TORCH, tensors, weighted_sum

OPS = {
    op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
    for op in op_db
    if torch.float32 in op.supported_dtypes(DEVICE)
}
# Their results are whatever the memory holds.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"} | {
    "new_empty_strided"
}


@dataclass(frozen=True)
class Traced:
    """An operator, compiled once. What it computes: outputs and gradients of its first sample."""

    name: str
    trace: OneTrace
    compiled: Callable[..., Any]

    @classmethod
    def of(cls, name: str, dtypes: Sequence[torch.dtype], in_region: bool) -> Traced:
        """Traced by its first call, in a region of the first dtype or without one."""
        op = OPS[name]
        torch._dynamo.reset()

        def plain(given: Any, args: Any, kwargs: Any) -> Any:
            return op.op(given, *args, **kwargs)

        def region(given: Any, args: Any, kwargs: Any) -> Any:
            with torch.autocast(DEVICE, dtype=dtypes[0]):
                return op.op(given, *args, **kwargs)

        ways = ("eager", "ours", *(("stock",) if may_be_stocks(name, DIFFERENT_IN_STOCK) else ()))
        trace = OneTrace(ways, dtypes if in_region else dtypes[:1])
        compiled = torch.compile(region if in_region else plain, backend=trace)
        return cls(name, trace, compiled)

    def outcome(
        self, way: str, dtype: torch.dtype, backward: torch.dtype | None = None
    ) -> tuple[list[Any], list[Any]]:
        """The outputs and gradients of one way to run it.

        Args:
            dtype: of the region it is traced in.
            backward: of a region around its backward; None: none.
        """
        op = OPS[self.name]
        torch.manual_seed(0)
        samples = op.sample_inputs(DEVICE, torch.float32, requires_grad=op.supports_autograd)
        sample = next(iter(samples))
        inputs = (sample.input, sample.args, sample.kwargs)
        leaves = [t for t in tensors(inputs) if t.requires_grad]
        torch.manual_seed(1)
        with self.trace.chosen(way, dtype):
            outputs = tensors(self.compiled(*inputs))
        roots = [t for t in outputs if t.requires_grad and t.is_floating_point()]
        if not roots or not leaves:
            return outputs, []
        loss = weighted_sum(roots)
        with torch.autocast(DEVICE, dtype=backward, enabled=backward is not None):
            return outputs, list(torch.autograd.grad(loss, leaves, allow_unused=True))


def resolved(value: Any) -> Any:
    """Without the lazy conjugation and negation that comparing bits trips over, and dense."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.detach().to_dense().resolve_conj().resolve_neg(),
        value,
    )


@pytest.mark.parametrize("name", sorted(OPS.keys() - UNINITIALIZED))
def test_bits(name: str, dtypes: Sequence[torch.dtype]) -> None:
    traced = Traced.of(name, dtypes, in_region=True)
    found = [check(traced, dtype) for dtype in dtypes]
    if OPS[name].supports_autograd:
        if traced.trace.acts:
            traced = Traced.of(name, dtypes, in_region=False)
        found.append(check(traced, dtypes[0], dtypes[0]))
    skip_for(found)


def check(traced: Traced, *dtypes: torch.dtype) -> str | None:
    """Compare with the oracle, or with stock; the reason where that says less."""
    name = traced.name
    try:
        expected = traced.outcome("eager", *dtypes)
    except Exception as error:
        if not name.startswith(EAGER_RAISES) and DEVICE == "cpu":
            raise
        return f"eager autocast itself raises: {str(error).splitlines()[0]}"
    return same_bits_or_why_not(
        lambda way: resolved(traced.outcome(way, *dtypes)),
        resolved(expected),
        name,
        DIFFERENT_IN_STOCK,
    )


# No GPU, or a kernel that mixes dtypes when autocast acts inside it.
EAGER_RAISES = ("jiterator_", "linalg.pinv")

DIFFERENT_IN_STOCK = {
    # decomposed by AOTAutograd of torch 2.11
    *(("cumprod", "masked.cumprod") if TORCH < (2, 13) else ()),
    # seen: gradients, and a result
    *(("linalg.lu_solve",) if TORCH < (2, 13) else ()),
    *(("linalg.qr", "qr") if TORCH < (2, 12) else ()),
    *(("linalg.polar",) if TORCH >= (2, 14) else ()),
}
