"""What the backend does not see: which functions eager mode has TorchScript run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .._torch.torchscript import casts_in_torchscript, scripted_functions
from ..state import AMBIENT_DTYPES
from . import recipes
from .planning import Candidate

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


def told_of_scripted(candidates: Sequence[Candidate]) -> list[str]:
    """A sentence for each function of TorchScript that computes in a lower precision here, as far
    as the line of a call tells."""
    functions = scripted_functions()
    if not functions:
        return []
    lines = {}
    for code in (function.__code__ for function in functions):
        last = max(line for *_, line in code.co_lines() if line is not None)
        lines[code.co_filename, code.co_name] = range(code.co_firstlineno, last + 1)
    found: dict[tuple[str, str], None] = {}
    for c in candidates:
        if any(dtype in AMBIENT_DTYPES for dtype in _dtypes(c.node)):
            for file, line, name in _FRAME.findall(c.node.meta.get("stack_trace") or ""):
                if int(line) in lines.get((file, name), ()):
                    found[file, name] = None
    if not found or not casts_in_torchscript():
        return []
    return [
        f"{name} ({file}:{lines[file, name].start}) is a function of torch.jit.script, which eager "
        "mode runs with TorchScript's own rules for autocast. Compiled, by any backend, its Python "
        "code is traced, with the rules of torch.autocast: dtypes and numbers may be others. For "
        "those of eager mode, call it in a function that torch.compiler.disable is given"
        for file, name in found
    ]


def _dtypes(node: fx.Node) -> Iterator[torch.dtype]:
    """Those of the tensors that go into a call and come out of it."""
    for n in (node, *recipes.tensor_arguments(node)):
        for value in tree_leaves(recipes.example_value(n)):
            if isinstance(value, torch.Tensor):
                yield value.dtype
