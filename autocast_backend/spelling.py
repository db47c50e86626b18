"""Near names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[object]) -> str:
    """The valid names most like `name`, or all of them where they are few."""
    names = sorted(map(str, valid))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return " or ".join(map(repr, close))
    more = f" (and {len(names) - 20} more)" if len(names) > 20 else ""
    return one_of(names[:20]) + more


def one_of(valid: Iterable[object]) -> str:
    """All of them."""
    return "one of " + ", ".join(repr(str(name)) for name in valid)
