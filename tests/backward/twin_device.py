"""A second device type for machines that have only a CPU: `make_device_type` registers it, for the
whole process, with PyTorch's experimental support for backends written in Python.

A tensor of that type has no memory of its own. Its twin, a contiguous CPU tensor with the same
elements, is kept beside it, and every op is run on twins. Views share nothing with their base, but
functional graphs do not notice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "twin"
LOWER_PRECISION = ("mm", "addmm", "linear")
"""The ops autocast runs in its lower precision, as on other device types."""

_KEY, _AUTOCAST = "PrivateUse1", "AutocastPrivateUse1"
_twins: dict[int, torch.Tensor] = {}  # by storage, which the copies that autograd makes share
_libraries: list[torch.library.Library] = []


class _Module:
    """What PyTorch asks of `torch.twin`."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, _: int) -> None:
        pass


def twin_of(value: Any) -> Any:
    """The CPU tensor with the elements of `value`; any other value as it is."""
    if isinstance(value, torch.Tensor) and value.device.type == NAME:
        return _twins[value.untyped_storage()._cdata].view(value.shape)
    return torch.device("cpu") if value == torch.device(NAME, 0) else value


def _with_twin(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    _twins[made.untyped_storage()._cdata] = value.contiguous()
    return made


def _on_twins(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    result = op(*pytree.tree_map(twin_of, args), **pytree.tree_map(twin_of, kwargs))
    return args[0] if op._schema.is_mutable else pytree.tree_map(_with_twin, result)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    twin_of(target).copy_(twin_of(source))
    return target


def _to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    copy = twin_of(source).to(dtype=dtype, copy=True)
    return copy if (device or source.device).type == "cpu" else _with_twin(copy)


def _autocast_rule(op: torch._ops.OpOverload) -> Any:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST))

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == NAME:
            return value.to(torch.get_autocast_dtype(NAME))
        return value

    def rule(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args))

    return rule


def make_device_type() -> None:
    """Register the device type; once for each process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    everything, aten = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    everything.fallback(_on_twins, _KEY)
    everything.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
    aten.impl("_copy_from", _copy_from, _KEY)
    aten.impl("_to_copy", _to_copy, _KEY)
    for name in LOWER_PRECISION:
        aten.impl(name, _autocast_rule(getattr(torch.ops.aten, name).default), _AUTOCAST)
    _libraries.extend((everything, aten))
