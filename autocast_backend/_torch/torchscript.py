"""Functions that `torch.jit.script` made: eager mode has TorchScript run them, with rules of its
own for autocast, and Dynamo traces their Python code."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch.jit import _state


def scripted_functions() -> list[FunctionType]:
    """The Python functions that `torch.jit.script` was given, of those that are alive."""
    kept: Any = getattr(_state, "_jit_caching_layer", ())
    return [function for function in list(kept) if isinstance(function, FunctionType)]


def casts_in_torchscript() -> bool:
    """Whether TorchScript's rules for autocast are on, as they are by default."""
    on: bool = torch._C._jit_set_autocast_mode(True)  # nothing else tells
    torch._C._jit_set_autocast_mode(on)
    return on
