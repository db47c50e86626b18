"""The autocast state a backward pass runs in, as a key to what is compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Key = tuple[tuple[str, torch.dtype], ...]
"""A state of the backward pass, as far as one region can tell: (device type, dtype) of the device
types that are on, among those its tensors live on. Empty for "off"."""


def current_key(device_types: Sequence[str]) -> Key:
    """The state of the calling thread. Of the thread: what the autograd engine's CUDA threads do
    not know of it (once the dtypes, PyTorch #132715), eager's ops do not use there either."""
    return tuple(
        (device_type, torch.get_autocast_dtype(device_type))
        for device_type in device_types
        if torch.is_autocast_enabled(device_type)
    )


def key_name(key: Key) -> str:
    """A state, for messages."""
    return ", ".join(f"{device}: {str(dtype)[6:]}" for device, dtype in key) or "off"


def regions(key: Key) -> list[dict[str, Any]]:
    """A state, as arguments of `torch.autocast`."""
    return [{"device_type": device, "dtype": dtype} for device, dtype in key]


class BackwardError(RuntimeError):
    """A backward that eager autocast would compute in another way than the compiled one, and that
    cannot be compiled that way."""


class BackwardAutocastWarning(UserWarning):
    """A backward ran under another autocast state than `backward_pass_autocast` assumes, and would
    have been another computation there."""


class BackwardAutocastError(BackwardError):
    """What `BackwardAutocastWarning` warns of, where `on_backward_autocast_mismatch="error"`."""
