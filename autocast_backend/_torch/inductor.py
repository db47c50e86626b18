"""Inductor's graphs and kernels, put right where their numbers are wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import lowerings, reinplacing
from .flags import inductor_right


@contextlib.contextmanager
def inductor_put_right() -> Iterator[None]:
    """Have Inductor compute what ATen does, in what this thread compiles meanwhile."""
    reinplacing.register()
    lowerings.register()
    with inductor_right.raised():
        yield
