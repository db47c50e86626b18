"""Tensors: their memory, and who holds it."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import FakeTensor

from .cuda_graphs import Place


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of tensors, by their `_cdata`."""
    return {t.untyped_storage()._cdata for t in tensors if has_storage(t)}


def has_storage(tensor: torch.Tensor) -> bool:
    """Sparse tensors, those of oneDNN's layout and of some devices have none: `untyped_storage()`
    raises."""
    return torch._C._has_storage(tensor)


def are_alone(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether each of some tensors is the only one on its storage."""
    uses, alone = torch._C._storage_Use_Count, _alone()[2]
    return all(uses(t.untyped_storage()._cdata) == alone for t in tensors)


def has_other_holders(owner: Any, name: str, recorded: Mapping[int, list[Place]]) -> bool:
    """Whether anything but the attribute `name` of `owner` keeps that tensor, or a view of it.

    Python references, references from C++ (an autograd graph that saved it) and other tensors on
    its storage are counted; how much a tensor without other holders counts differs between
    versions of Python and PyTorch, so one is counted here to compare.

    Args:
        recorded: as `recorded_outputs` found them: what these places hold does not count, unless
            something else holds it, too.
    """
    alone = _alone()
    storage = getattr(owner, name).untyped_storage()._cdata
    if (sys.getrefcount(getattr(owner, name)), getattr(owner, name)._use_count()) != alone[:2]:
        return True
    places = recorded.get(storage)
    if places is None:
        return torch._C._storage_Use_Count(storage) != alone[2]
    times = Counter([id(held[i]) for held, i in places])
    return torch._C._storage_Use_Count(storage) != alone[2] + len(times) or any(
        (sys.getrefcount(held[i]) - times[id(held[i])] + 1, held[i]._use_count()) != alone[:2]  # type: ignore[union-attr]
        for held, i in places
    )


@functools.cache
def _alone() -> tuple[int, int, int]:
    """Counts of a tensor with one holder: Python references, those from C++, tensors on its
    storage."""
    owner = SimpleNamespace(tensor=torch.empty(1))
    storage = owner.tensor.untyped_storage()._cdata
    return (
        sys.getrefcount(owner.tensor),
        owner.tensor._use_count(),
        torch._C._storage_Use_Count(storage),
    )


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory: compilers run graphs on such tensors to learn shapes."""
    return isinstance(tensor, FakeTensor)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether ops do with a tensor what they do with PyTorch's own: also with a parameter of a
    class of the user's that says nothing of them."""
    kind, parameter = type(tensor), torch.nn.Parameter
    return kind is torch.Tensor or (
        issubclass(kind, parameter)
        and kind.__torch_function__ == parameter.__torch_function__
        and kind.__torch_dispatch__ == parameter.__torch_dispatch__
    )


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
