"""What the kernels of custom ops call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._C import DispatchKey
from torch._higher_order_ops.base_hop import FunctionWithNoFreeVars
from torch._ops import HigherOrderOperator, OpOverload
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


def custom_ops_of(node: fx.Node) -> list[OpOverload]:
    """The ops that a node may call and that are none of PyTorch's or of this package."""
    # `auto_functionalized` and `with_effects` have the op that they call as an argument.
    ops = (op for target in (node.target, *node.args[:2]) for op in overloads_of(target))
    return [op for op in ops if op.namespace not in _KNOWN]


class Watching(TorchDispatchMode):
    """Tells of every op that the kernels of some ops call, also in the bodies of higher-order ops.

    Args:
        ops: whose kernels.
        tell: called with one of them, an op that its kernel calls, and the tensors that gets; the
            kernels of custom ops that it calls are looked into as well.

    Attributes:
        ran: those of `ops` that were called.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        ops: Collection[OpOverload],
        tell: Callable[[OpOverload, OpOverload, list[torch.Tensor]], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: set[OpOverload] = set()
        # By name: an op that was defined again has had another object before, which graphs or the
        # dispatcher may still have.
        self._ops = {op.name(): op for op in ops}
        self._tell = tell
        self._inside: OpOverload | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        values = pytree.tree_leaves((args, kwargs))
        if isinstance(func, HigherOrderOperator):
            if any(isinstance(op, OpOverload) and op.name() in self._ops for op in values):
                kernel = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
                if kernel is not None:  # `auto_functionalized`, which calls the op
                    with self:
                        return kernel(*args, **kwargs)
            bodies = map(_unwrapped, values)
            with self._entered_by(body for body in bodies if isinstance(body, nn.Module)):
                return func(*args, **kwargs)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        outer = self._inside
        if outer is None:
            known = self._ops.get(func.name())
            is_watched = known is not None
            if known is not None:
                self.ran.add(known)
        else:
            known = outer
            self._tell(outer, func, tensors)
            is_watched = bool(opaque_ops(func, {t.device.type for t in tensors}))
        key = _key_of_kernel(func, tensors) if is_watched else None
        if key is None:
            return func(*args, **kwargs)
        self._inside = known
        try:
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._inside = outer

    @contextmanager
    def _entered_by(self, bodies: Iterable[nn.Module]) -> Iterator[None]:
        """Have the bodies of a higher-order op enter this mode: the op itself runs outside of it,
        as most have no rule for one."""

        def enter(*_: Any) -> None:
            self.__enter__()  # type: ignore[no-untyped-call]

        def leave(*_: Any) -> None:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        hooks = []
        for body in bodies:
            hooks.append(body.register_forward_pre_hook(enter))
            hooks.append(body.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _unwrapped(body: Any) -> Any:
    """The body that some higher-order ops wrap, once for each call that got it."""
    while isinstance(body, FunctionWithNoFreeVars):
        body = body.fn
    return body


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
