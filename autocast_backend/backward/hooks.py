"""Saved-tensor hooks that AOTAutograd writes into its graphs: does autocast act inside of them?"""

from __future__ import annotations

import torch

from .._torch.fake_tensors import fake_mode_of, observing
from .._torch.hooks import Hooks
from ..state import AutocastState
from ..validation.compare import difference, observe


def unpacks_differently(hooks: Hooks, value: torch.Tensor, state: AutocastState) -> str | None:
    """What the hook that unpacks does otherwise under `state` than with autocast off, in words.

    Args:
        hooks: (pack, unpack).
        value: the fake tensor that is packed.
    """
    pack, unpack = hooks
    mode = fake_mode_of([value])
    with observing(mode), torch.no_grad():
        packed = pack(value)
    inside, outside = (observe(lambda: unpack(packed), s, mode, grad=False) for s in (state, None))
    return difference(inside, outside, "ops")
