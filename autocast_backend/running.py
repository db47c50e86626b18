"""What stands around a compiled graph whenever it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ._torch.autocast import disable_autocast
from ._torch.kernels import are_closed, put_back_kernels
from .regions import RegionError
from .state import AutocastState, contexts_entered, put_right


def with_autocast_off(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Switch autocast off around the call: inner compilers other than AOTAutograd do not."""

    def run(*args: Any) -> Any:
        with disable_autocast():
            return compiled(*args)

    return run


def for_dtypes(
    compiled: Callable[..., Any], dtypes: Sequence[tuple[str, torch.dtype]]
) -> Callable[..., Any]:
    """Refuse calls that find other dtypes: Dynamo guards on the dtype of a device type only while
    autocast is on for it."""

    def run(*args: Any) -> Any:
        for device_type, dtype in dtypes:
            found = torch.get_autocast_dtype(device_type)
            if found is not dtype:
                raise RegionError(
                    f"an autocast region without a dtype was compiled for {dtype}, which autocast "
                    f"had for {device_type!r} then; now it has {found}. Give a dtype to every "
                    "torch.autocast in compiled code and to the option 'autocast', or call "
                    "torch.compiler.reset()"
                )
        return compiled(*args)

    return run


def changing_state(compiled: Callable[..., Any], changes: Callable[[], None]) -> Callable[..., Any]:
    """Leave the state as the graph would have: it calls `torch.set_autocast_enabled` or the like,
    and there may be a graph break before it sets back what it set."""

    def run(*args: Any) -> Any:
        results = compiled(*args)
        changes()
        return results

    return run


def with_views_without_gradients(
    compiled: Callable[..., Any], numbers: Mapping[int, bool]
) -> Callable[..., Any]:
    """Return views that were made with autograd off as such ones: AOTAutograd makes them anew of
    what it returns, with autograd on, and a loss that reads both has another gradient.

    Args:
        numbers: which outputs these are, and whether they claim to require grad.
    """

    def run(*args: Any) -> Any:
        results = list(compiled(*args))
        with torch.no_grad():
            for i, requires_grad in numbers.items():
                if (view := results[i]).grad_fn is not None:
                    results[i] = (
                        torch.ops.aten.alias.default(view) if requires_grad else view.detach()
                    )
        return results

    return run


def putting_right_after_errors(
    compiled: Callable[..., Any], now: AutocastState
) -> Callable[..., Any]:
    """AOTAutograd traces brackets away; an inner compiler like "eager" executes them. Dynamo
    guards on the state, so it is not asked for again at each call, but for dtypes: it guards on
    none of a device type that autocast is off for."""

    def run(*args: Any) -> Any:
        entered, closed = contexts_entered(), are_closed()
        dtypes = [torch.get_autocast_dtype(d.device_type) for d in now.devices]
        try:
            return compiled(*args)
        except BaseException:
            devices = zip(now.devices, dtypes, strict=True)
            before = replace(now, devices=tuple(replace(d, dtype=dtype) for d, dtype in devices))
            put_right(before, entered)
            put_back_kernels(closed)
            raise

    return run
