"""Functions of torch that are replaced for the length of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .dynamo import compile_lock


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the length of a `with` block, under Dynamo's compile lock."""
    with compile_lock():
        before = vars(owner)[name]
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)
