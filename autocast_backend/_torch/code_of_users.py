"""What the keys of caches on disk do not know of a graph: mostly, code of users."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .inside import calls_custom_op
from .kernels import has_kernels_of_users


def is_traced_anew(nodes: Iterable[fx.Node]) -> bool:
    """Whether the key of AOTAutograd's cache does not know all that the trace of a graph hangs on:

    - Python numbers that Dynamo takes for changing. Calls that cannot read them from a tensor have
      them as constants; neither does the key say which ones (PyTorch #194976, #197889), nor the
      entry, for Dynamo to guard on them.
    - Code that is traced and does not come with PyTorch: of custom ops, such as what computes their
      gradients; of kernels that somebody gives to ops of PyTorch's; of tensor subclasses.
    """
    return has_kernels_of_users() or any(
        calls_custom_op(node)
        or any(map(_is_changing, pytree.tree_leaves(node.meta.get("example_value"))))
        for node in nodes
    )


def results_of_custom_ops(nodes: Iterable[fx.Node]) -> list[str]:
    """What the custom ops of a graph return: Inductor's code hangs on it, and its key has nothing
    but the names of the ops."""
    results = (
        result
        for node in nodes
        if calls_custom_op(node)
        for result in pytree.tree_leaves(node.meta.get("example_value", node.meta.get("val")))
        if isinstance(result, torch.Tensor) and result.layout is torch.strided
    )
    return [f"{t.dtype} {t.device} {tuple(t.shape)} {t.stride()}" for t in results]


def _is_changing(value: Any) -> bool:
    if isinstance(value, torch.SymFloat):
        return bool(value.node.has_hint())  # others are of tensors
    return isinstance(value, torch.Tensor) and _is_written_elsewhere(value)


def _is_written_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that does not come with PyTorch, or holds one that is."""
    if not is_traceable_wrapper_subclass(tensor):
        return False
    if type(tensor).__module__.partition(".")[0] != "torch":
        return True
    names, _ = tensor.__tensor_flatten__()
    return any(_is_written_elsewhere(getattr(tensor, name)) for name in names)
