"""`torch.ops.smart_autocast`, whose ops are loaded when one of them is first asked for: by a
program, by `torch.export.load`, by a graph that was saved.

`register` is an entry point of the group `torch.backends`, as that of `_logging.py` is: it runs in
every process that imports torch, so this module imports nothing else.
"""

from __future__ import annotations


def register() -> None:
    """Make `torch.ops.smart_autocast` a namespace that loads its ops. Idempotent."""
    import importlib

    import torch

    try:
        from torch._ops import OpOverloadPacket, _OpNamespace
    except ImportError:  # a torch that is yet to come must not fail to import for this
        return

    class SmartAutocastOps(_OpNamespace):
        __module__ = _OpNamespace.__module__  # the names of ops in graphs and files begin with it

        def __getattr__(self, op_name: str) -> OpOverloadPacket:
            try:
                return super().__getattr__(op_name)
            except AttributeError:
                if op_name.startswith("__"):  # TorchScript asks any module for such
                    raise
            importlib.import_module("autocast_backend.ops")
            return super().__getattr__(op_name)

    torch.ops.smart_autocast.__class__ = SmartAutocastOps
