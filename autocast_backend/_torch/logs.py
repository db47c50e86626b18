"""The names that `TORCH_LOGS` knows."""

from __future__ import annotations


def register_log_name(name: str, logger: str) -> None:
    """Make `name` stand for a logger in `TORCH_LOGS`, if it does not yet. Nothing public does."""
    from torch._logging._internal import log_registry, register_log

    if not log_registry.is_log(name):
        register_log(name, logger)
