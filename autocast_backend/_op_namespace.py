"""`torch.ops.smart_autocast`, whose ops are loaded when one of them is first asked for: by a
program, by `torch.export.load`, by a graph that was saved.

`register` is an entry point of the group `torch.backends`, as that of `_logging.py` is: it runs in
every process that imports torch, so this module imports nothing else.
"""

from __future__ import annotations


def register() -> None:
    """Make `torch.ops.smart_autocast` a namespace that loads its ops. Idempotent."""
    import importlib
    from typing import Any

    import torch

    try:
        from torch._ops import _OpNamespace
    except ImportError:  # a torch that is yet to come must not fail to import for this
        return
    no_ops = frozenset(vars(torch.ops.smart_autocast))

    class UnloadedOps(_OpNamespace):
        """Python adds gradients and more to what the native library has: until all of it is there,
        a thread that asks for an op waits for the one that loads them."""

        __module__ = _OpNamespace.__module__  # the names of ops in graphs and files begin with it

        def __getattribute__(self, name: str) -> Any:
            # TorchScript asks any module for names such as `__origin__`.
            if not (name.startswith("__") or name in no_ops):
                ops = importlib.import_module("autocast_backend.ops")
                if "__all__" in vars(ops):  # its last statement
                    self.__class__ = _OpNamespace  # type: ignore[assignment]
            return _OpNamespace.__getattribute__(self, name)

    torch.ops.smart_autocast.__class__ = UnloadedOps
