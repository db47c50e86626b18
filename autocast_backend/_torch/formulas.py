"""The autograd graph that a call has made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction


def next_sequence_number() -> int:
    """The number that autograd gives the next node of this thread."""
    return torch._C._autograd._get_sequence_nr()


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """`tensor.grad_fn`; None for a view that was made without autograd and whose base was written
    to with it: PyTorch raises for that, and for `is_leaf`, but reads it where autograd is off."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def has_own_formula(results: Iterable[torch.Tensor], first: int) -> bool:
    """Whether an `autograd.Function`, of Python or C++, is among the nodes behind some tensors.

    Args:
        first: the number from which on nodes count.
    """
    nodes = [grad_fn_of(t) for t in results]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        if isinstance(node, BackwardCFunction) or "CppNode" in node.name():
            return True
        seen.add(node)
        nodes += [function for function, _ in node.next_functions]
    return False
