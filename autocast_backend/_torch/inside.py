"""What the kernels of custom ops call."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .autocast import autocast_key, has_autocast_kernel
from .kernels import body_of_triton_op
from .ops import overloads_of

_KNOWN = frozenset({"aten", "prim", "prims", "quantized", "_c10d_functional", "smart_autocast"})


def opaque_ops(target: Any, device_types: Collection[str]) -> list[OpOverload]:
    """The custom ops that a node's target may call and whose kernel nobody has looked into: those
    that are none of PyTorch's or of this package, have no autocast rule for these device types, and
    are not made of other ops above autograd, where autocast would be seen to act on them."""
    return [
        op
        for op in overloads_of(target)
        if op.namespace not in _KNOWN
        and not has_autocast_kernel(op, device_types)
        and not op._can_decompose()
        and body_of_triton_op(op) is None
    ]


class Watching(TorchDispatchMode):
    """Tells of every op that the kernels of some ops call.

    Args:
        ops: whose kernels.
        tell: called with one of them, an op that its kernel calls, and the tensors that gets.
    """

    def __init__(
        self,
        ops: Collection[OpOverload],
        tell: Callable[[OpOverload, OpOverload, list[torch.Tensor]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops = ops
        self._tell = tell
        self._inside: OpOverload | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        values = pytree.tree_leaves((args, kwargs))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if self._inside is not None:
            self._tell(self._inside, func, tensors)
            return func(*args, **kwargs)
        key = _key_of_kernel(func, tensors) if func in self._ops else None
        if key is None:
            return func(*args, **kwargs)
        self._inside = func
        try:
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._inside = None


def _key_of_kernel(op: OpOverload, tensors: list[torch.Tensor]) -> Any | None:
    """The key of the kernel that the dispatcher has for these tensors; None where it is not for
    sure."""
    own = {autocast_key(t.device.type).removeprefix("Autocast") for t in tensors}
    if len(own) != 1:
        return None
    for key in (*own, "CompositeExplicitAutograd"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return torch._C._dispatch_key_parse(key)
    return None
