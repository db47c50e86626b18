"""Count the casts that a piece of PyTorch code executes, compiled or not.

with CastCounter() as counter:
    loss(model(x)).backward()
print(counter.casts)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class CastCounter(TorchDispatchMode):
    """Counts the tensors whose floating dtype is changed by `aten._to_copy` or by an op of ours.

    It sees every op that the dispatcher runs, in forward and backward, and inside graphs compiled
    with `aot_eager`. A cast inside a generated kernel is not an op, and not counted. Compile
    before: what is compiled for the first time under a counter is traced by Python code whose ops
    would count too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise compiled functions silently run as eager ones under this mode

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if op.overloadpacket is torch.ops.aten._to_copy or op.namespace == "smart_autocast":
            results = (kwargs or {}).get("out", result)
            # What one side has more of, a loss scale or statistics, comes last and is no cast.
            self.casts += sum(
                before.dtype != after.dtype
                and before.is_floating_point()
                and after.is_floating_point()
                for before, after in zip(_tensors(args), _tensors(results), strict=False)
            )
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
