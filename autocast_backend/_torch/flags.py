"""What one thread asks for, of code that all threads run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Flag(threading.local):
    """Off, in each thread, but for the length of a `with` block."""

    on = False

    def raised(self) -> contextlib.AbstractContextManager[None]:
        return self._set(True)

    def lowered(self) -> contextlib.AbstractContextManager[None]:
        return self._set(False)

    @contextlib.contextmanager
    def _set(self, on: bool) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before


predicting = Flag()
"""Fake tensors get the strides and dtypes that kernels give (`predictions.py`)."""

inductor_right = Flag()
"""Inductor's graphs and kernels are put right (`inductor.py`)."""


def rounds() -> bool:
    """Whether Inductor rounds as eager mode does, in what this thread compiles."""
    from torch._inductor import config

    return inductor_right.on and config.emulate_precision_casts


def compiling_as_now(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler that takes what it is called with later as it would in this block: Inductor
    compiles a backward when it first runs."""
    raised = [flag for flag in (predicting, inductor_right) if flag.on]
    if not raised:
        return compiler
    config: Any = torch.compiler.config
    tag = config.cache_key_tag  # the caches on disk have others' entries for equal graphs

    @functools.wraps(compiler)
    def compile_later(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(config.patch(cache_key_tag=tag))
            for flag in raised:
                stack.enter_context(flag.raised())
            return compiler(*args, **kwargs)

    return compile_later
