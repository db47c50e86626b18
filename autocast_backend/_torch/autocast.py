"""Autocast: its device types, its kernels, its state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = [
    "any_autocast_enabled",
    "autocast_device_types",
    "autocast_key",
    "autocast_registrations",
    "disable_autocast",
    "dispatched_ops",
    "enter_autocast",
    "exit_autocast",
    "has_autocast_kernel",
    "register_autocast_kernel",
    "wrap_with_autocast",
]


def autocast_device_types() -> tuple[str, ...]:
    """Every device type autocast knows: no public call lists them."""
    return tuple(torch._C._autocast_supported_devices())


_OURS: set[tuple[str, str]] = set()
"""Names of ops and keys that `register_autocast_kernel` has registered kernels for."""

_library = torch.library.Library("aten", "IMPL")


def register_autocast_kernel(
    op: torch._ops.OpOverload, device_type: str, kernel: Callable[..., Any]
) -> None:
    """Give an op of ATen a kernel `kernel(keyset, *args, **kwargs)` for autocast, for good. Nobody
    else is told of it, here or by `torch.library`: others may register theirs in its place."""
    key = autocast_key(device_type)
    _library.impl(op, kernel, key, with_keyset=True)
    torch.library._impls.discard(_told_as(op.name(), key))
    _OURS.add((op.name(), key))


def autocast_registrations(device_type: str) -> list[str]:
    """The dispatcher's own list of ops with an autocast kernel, as `aten::name.overload`."""
    key = autocast_key(device_type)
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return [name for name in names if _is_of_others(name, key)]


def _is_of_others(name: str, key: str) -> bool:
    """Whether a kernel for autocast that the dispatcher has is not ours."""
    return (name, key) not in _OURS or _told_as(name, key) in torch.library._impls


def _told_as(name: str, key: str) -> str:
    """What `torch.library` writes down of a kernel: "aten/sin/AutocastCPU"."""
    return f"{name.replace('::', '/')}/{key}"


def dispatched_ops() -> frozenset[str]:
    """Every op the dispatcher knows, those of other libraries too, as `aten::name`: public calls
    see an op only once it is used."""
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.partition(".")[0] for name in names)


def disable_autocast() -> contextlib.AbstractContextManager[None]:
    """Switch autocast off for every device type at once: about a microsecond, against one
    `torch.autocast(device_type, enabled=False)` per device type."""
    return torch._C._DisableAutocast()


def any_autocast_enabled() -> bool:
    """Whether autocast is on for any device type: one call of 40 ns, against one for each."""
    return torch._C._is_any_autocast_enabled()


def has_autocast_kernel(op: torch._ops.OpOverload, device_types: Iterable[str]) -> bool:
    """Whether autocast does something of its own for `op`: PyTorch's rules, registered ones too."""
    name = op.name()
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key) and _is_of_others(name, key)
        for key in map(autocast_key, device_types)
    )


def autocast_key(device_type: str) -> str:
    """The dispatch key of autocast; "privateuseone" and the names given to it share one."""
    named = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "ipu", "hpu", "xla")
    return f"Autocast{device_type.upper() if device_type in named else 'PrivateUse1'}"
