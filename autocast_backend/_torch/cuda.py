"""CUDA: a look at the GPUs, without initialising anything for it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def when_initialized(function: Callable[[], None]) -> None:
    """Call `function` when CUDA is initialised, or now if it is. An exception of it ends the
    initialisation, as a `torch.cuda.DeferredCudaCallError`; the next attempt calls it again."""
    torch.cuda._lazy_call(function)
