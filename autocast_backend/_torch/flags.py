"""What one thread asks for, of code that all threads run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Flag(threading.local):
    """Off, in each thread, but for the length of a `with` block."""

    on = False

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before
