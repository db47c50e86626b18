"""The cast of one weight, and when it is right.

A cast is right while its weight is the tensor that was cast and nothing has written to it: the same
object, version counter, address and storage, and no optimizer step on its memory since (optimizers
with `fused=True` write without counting the version up). The object is known by its id, because
`torch.utils.swap_tensors` refuses tensors with weak references, and by its `__dict__`, which is
kept here: another tensor may get the id of one that was freed, over the same memory, with a version
counter of its own. Where attributes may lead to the model, which would never be freed then, they
get one more, a string; Dynamo's own are strings.
"""

from __future__ import annotations

import functools
import operator
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.cuda_graphs import Place
from .._torch.tensors import has_other_holders

Key = tuple[int, torch.dtype]
"""A weight, by its id, and the dtype it is cast to."""


_version = operator.attrgetter("_version")
_address = torch.Tensor.data_ptr
_attributes = operator.attrgetter("__dict__")


_NAME = "_smart_autocast_name"
"""Of the attribute."""


def _identity(weight: int, attributes: dict[str, Any]) -> dict[str, Any] | str:
    """What no other tensor has for as long as it is kept, by the id and the `__dict__` of one;
    `torch.utils.swap_tensors` swaps the latter.

    A name that was copied, with all attributes of another tensor, is replaced by one of its own.
    """
    for key, value in attributes.items():
        if key != _NAME and not isinstance(value, (str, int, float, type(None))):
            own = f"{weight:x}-{id(attributes):x}-"
            name: str = attributes.get(_NAME, "")
            if not name.startswith(own):
                name = attributes[_NAME] = own + uuid.uuid4().hex
            return name
    return attributes


def _is_of(identity: dict[str, Any] | str, weight: Tensor) -> bool:
    attributes = _attributes(weight)
    return identity is attributes or identity == attributes.get(_NAME)


def ref_to_storage(weight: Tensor, when_freed: Any = None) -> weakref.ref[Any]:
    """The storage: `p.data = ...` may put another one at the same address. PyTorch keeps the Python
    object of a storage for as long as the storage lives."""
    return weakref.ref(weight.untyped_storage(), when_freed)


class _Memory:
    """Holds the cast of one weight; when the weight is freed, a dead reference takes its place."""

    __slots__ = ("cast",)
    cast: Tensor


class Cast:
    """The cast of one weight, and what shows that it is still right.

    It is freed by C code alone, because a scope may end inside of ATen's lock (see `scope.Scope`).

    Args:
        watched: free the cast with its weight; not needed where the cast keeps the weight, as its
            way back for autograd does.
    """

    __slots__ = ("_address", "_identity", "_layout", "_storage", "_version", "memory")

    def __init__(self, weight: Tensor, watched: bool = True) -> None:
        self.memory = _Memory()
        self._version: int | None = _version(weight)
        self._address = _address(weight)
        self._identity = _identity(id(weight), _attributes(weight))
        freed = functools.partial(setattr, self.memory, "cast") if watched else None
        self._storage = ref_to_storage(weight, freed)
        # No tuples where none are needed: Python's garbage collector runs by how many there are.
        self._layout = None if weight.is_contiguous() else (weight.shape, weight.stride())

    def is_right(self, weight: Tensor) -> bool:
        """Whether it is the cast of `weight` as that is now."""
        return (
            self._version == _version(weight)  # `torch.utils.swap_tensors` may lower it
            and self._address == _address(weight)
            and _is_of(self._identity, weight)
            and self.is_alive()  # its storage is there still: no other one is at its address
            and self._has_layout_of(weight)
        )

    def _has_layout_of(self, weight: Tensor) -> bool:
        if self._layout is not None:
            return self._layout == (weight.shape, weight.stride())
        return weight.is_contiguous() and weight.shape == self.memory.cast.shape

    def is_alive(self) -> bool:
        """Whether its weight has not been freed."""
        return self._storage() is not None

    def is_in(self, storages: set[int]) -> bool:
        """Whether the memory of its weight is one of `storages`, given by their `_cdata`."""
        storage = self._storage()
        return storage is not None and storage._cdata in storages

    def spoil(self) -> None:
        """Its weight may have been written to without a trace."""
        self._version = None

    def let_go_of_attributes(self, weight: int) -> None:
        """Keep no attributes of its weight, known by its id, that may have come to lead to the
        model since."""
        if not isinstance(self._identity, str):
            self._identity = _identity(weight, self._identity)

    def can_be_replaced(self, weight: Tensor, recorded: Mapping[int, list[Place]]) -> bool:
        """Whether its memory may be written over by a later cast of `weight`: it fits, and nobody
        else holds it, neither an autograd graph nor a view of it that a compiled graph returned.

        Args:
            recorded: as `recorded_outputs` found them.
        """
        if not self.is_alive() or has_other_holders(self.memory, "cast", recorded):
            return False
        memory = self.memory.cast
        return (
            memory.device == weight.device
            and memory.shape == weight.shape
            and memory.stride() == weight.stride()
        )


class Seen:
    """The weights of one call of a graph, and where their casts are: what these must still be for
    those to be right. Nobody keeps it beyond what makes casts wrong without a trace in the weights.

    The same questions as `Cast.is_right`, without that for the layout, which Dynamo asks, unless
    sizes are dynamic.

    Attributes:
        memories: what holds the casts.
        recorded: what holds those that a call with gradients gets; None until there was one.
        unrecorded: the same of a call without.
    """

    __slots__ = (
        "_addresses",
        "_identities",
        "_ids",
        "_storages",
        "_versions",
        "memories",
        "recorded",
        "unrecorded",
    )

    def __init__(self, weights: Sequence[Tensor], casts: Sequence[Cast]) -> None:
        self._ids = list(map(id, weights))
        self._versions = [cast._version for cast in casts]
        self._addresses = [cast._address for cast in casts]
        self._storages = [cast._storage for cast in casts]
        self._identities = [cast._identity for cast in casts]
        self.memories: Sequence[Any] = [cast.memory for cast in casts]
        self.recorded: Sequence[Any] | None = None
        self.unrecorded: Sequence[Any] | None = None

    def holds(self, weights: list[Tensor]) -> bool:
        if len(weights) != len(self._ids):
            return False
        for weight, one, version, address, storage, identity in zip(
            weights,
            self._ids,
            self._versions,
            self._addresses,
            self._storages,
            self._identities,
            strict=True,
        ):
            if (
                id(weight) != one
                or _version(weight) != version
                or storage() is None
                or _address(weight) != address
                or not (weight.__dict__ is identity or _is_of(identity, weight))
            ):
                return False
        return True
