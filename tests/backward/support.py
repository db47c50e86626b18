"""One compiled model, run many times: forward under one autocast state, backward under another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.support import BF16, FP16, tensors

OFF = {"device_type": "cpu", "enabled": False}
STATES: dict[str, dict[str, Any]] = {"off": OFF, "bf16": BF16, "fp16": FP16}

EAGER: dict[str, Any] = {"backend": "eager"}
STOCK: dict[str, Any] = {"backend": "aot_eager"}


def ours(inner: Any = "aot_eager", **options: Any) -> dict[str, Any]:
    """Arguments of `torch.compile` for this backend."""
    return {"backend": "smart_autocast", "options": {"inner": inner, **options}}


class Steps:
    """A model compiled afresh; each step starts from the same gradients, seed and input."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        make_input: Callable[[], torch.Tensor],
        **compile_arguments: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = make()
        self._make_input = make_input
        self._compiled = torch.compile(self.model, **compile_arguments)

    def step(self, forward: Mapping[str, Any], backward: Mapping[str, Any]) -> list[Any]:
        """Outputs, gradients (of the input first) and buffers."""
        self.model.zero_grad()
        x = self._make_input().requires_grad_()
        torch.manual_seed(1)
        with torch.autocast(**forward):
            outputs = tensors(self._compiled(x))
        loss = torch.stack([y.float().square().sum() for y in outputs]).sum()
        with torch.autocast(**backward):
            loss.backward()
        gradients = [x.grad, *(p.grad for p in self.model.parameters())]
        return [*outputs, *gradients, *(b.clone() for b in self.model.buffers())]


def variants() -> int:
    """How many backward variants have been compiled since `forget_variants`."""
    return torch._dynamo.utils.counters["smart_autocast"]["backward_variants"]


def forget_variants() -> None:
    torch._dynamo.utils.counters["smart_autocast"].clear()


def same_bits(first: list[Any], second: list[Any]) -> bool:
    """Whether two results have the same dtypes and bits, None for a missing gradient."""
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )
