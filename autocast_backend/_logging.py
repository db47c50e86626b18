"""The `smart_autocast` log: `TORCH_LOGS="+smart_autocast"` shows lowered graphs and brackets.

`register` is an entry point of the group `torch.backends`, which `import torch` calls just before
it reads `TORCH_LOGS`: the name is known although the user imports nothing of ours. It runs in every
process that imports torch, so this module imports nothing but `logging`.
"""

from __future__ import annotations

import logging

log = logging.getLogger("autocast_backend")


def register() -> None:
    """Make `smart_autocast` a name that `TORCH_LOGS` and `torch._logging` know. Idempotent."""
    try:
        from torch._logging._internal import log_registry, register_log
    except ImportError:  # a torch that is yet to come must not fail to import for this
        return
    if not log_registry.is_log("smart_autocast"):
        register_log("smart_autocast", log.name)
