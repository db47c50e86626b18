"""Tensors: who holds their memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch


def has_other_holders(owner: Any, name: str) -> bool:
    """Whether anything but the attribute `name` of `owner` keeps that tensor, or a view of it.

    Python references, references from C++ (an autograd graph that saved it) and other tensors on
    its storage are counted; how much a tensor without other holders counts differs between
    versions of Python and PyTorch, so one is counted here to compare.
    """
    return _holders(owner, name) != _alone()


def _holders(owner: Any, name: str) -> tuple[int, int, int]:
    return (
        sys.getrefcount(getattr(owner, name)),
        getattr(owner, name)._use_count(),
        torch._C._storage_Use_Count(getattr(owner, name).untyped_storage()._cdata),
    )


@functools.cache
def _alone() -> tuple[int, int, int]:
    return _holders(SimpleNamespace(tensor=torch.empty(1)), "tensor")


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory: compilers run graphs on such tensors to learn shapes."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `torch.func` transform's wrapper, which has no storage."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether what is done to a tensor now is captured in a CUDA graph, not computed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def write_numbers(tensor: torch.Tensor, numbers: Sequence[int]) -> None:
    """Writes one number to each element, as arguments of kernels: about 100 for each of them.

    No copy from the host's memory can be captured in a CUDA graph as the numbers that it holds now;
    arguments are. Only `torch._foreach_add_` takes a list of them.
    """
    tensor.zero_()
    torch._foreach_add_(tensor.unbind(), list(numbers))
