"""The modes that code may run in, and how to leave them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Switch off the modes that a compiler may find: of dispatch, compiled autograd's tracing or a
    user's, and of `__torch_function__`, whose effects Dynamo has put into the graph. Subclasses of
    tensors still have their `__torch_function__`."""
    from torch._dynamo.utils import get_torch_function_mode_stack, set_torch_function_mode_stack
    from torch.utils._python_dispatch import _disable_current_modes

    before = get_torch_function_mode_stack()
    set_torch_function_mode_stack([])
    try:
        with _disable_current_modes():
            yield
    finally:
        set_torch_function_mode_stack(before)


def in_dispatch_mode() -> bool:
    """Whether any dispatch mode is on; asking is 100 times cheaper than `outside_of_modes`."""
    return torch._C._len_torch_dispatch_stack() > 0


def _is_of_selective_checkpoint(mode: Any) -> bool:
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))


def in_selective_checkpoint() -> bool:
    """Whether the dispatch mode of one of its two runs is on. It pairs their calls by the order."""
    if not in_dispatch_mode():
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(map(_is_of_selective_checkpoint, _get_current_dispatch_mode_stack()))


@contextlib.contextmanager
def outside_of_selective_checkpoints() -> Iterator[None]:
    """Switch off their modes; others still see what is done."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    def popped() -> list[Any]:
        return [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]

    def push(modes: Iterable[Any]) -> None:
        for mode in modes:
            _push_mode(mode)

    modes = popped()[::-1]
    push(mode for mode in modes if not _is_of_selective_checkpoint(mode))
    try:
        yield
    finally:
        popped()
        push(modes)


def outside_of_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Switch off the modes of `__torch_function__`, a user's or that of a default device."""
    return torch._C.DisableTorchFunction()


def in_function_mode() -> bool:
    """Whether a call of PyTorch's would be given to such a mode."""
    return torch._C._is_torch_function_mode_enabled()


@contextlib.contextmanager
def outside_of_inference_mode() -> Iterator[None]:
    """As Dynamo compiles: in inference mode, composite ops come whole to those who look below
    autograd, who then see none of the casts inside of them. Autograd stays off."""
    from torch._dynamo.utils import (
        maybe_disable_inference_mode,
        maybe_disable_inference_mode_for_fake_prop,
    )

    with maybe_disable_inference_mode(), maybe_disable_inference_mode_for_fake_prop():
        yield
