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
_storage = torch.Tensor.untyped_storage


_LAYOUTS_ARE_GUARDED = torch.__version__ >= "2.12"
"""Before, Dynamo asks nothing of the parameters of a module to which none was assigned."""


_NAME = "_smart_autocast_name"
"""Of the attribute."""


def _layout(weight: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return weight.shape, weight.stride()


def identities_of(weights: Sequence[Tensor]) -> list[dict[str, Any] | str]:
    """What no other tensor has for as long as it is kept, of each."""
    attributes = list(map(_attributes, weights))
    if not any(attributes):  # as most have none, this is all there is to do
        return attributes
    return [_identity(id(w), own) for w, own in zip(weights, attributes, strict=True)]


def _identity(weight: int, attributes: dict[str, Any]) -> dict[str, Any] | str:
    """What no other tensor has for as long as it is kept, by the id and the `__dict__` of one;
    `torch.utils.swap_tensors` swaps the latter.

    A name that was copied, with all attributes of another tensor, is replaced by one of its own.
    """
    if not _may_lead_on(attributes):
        return attributes
    own = f"{weight:x}-{id(attributes):x}-"
    name: str = attributes.get(_NAME, "")
    if not name.startswith(own):
        name = attributes[_NAME] = own + uuid.uuid4().hex
    return name


def _may_lead_on(attributes: dict[str, Any]) -> bool:
    """Whether attributes of a tensor may lead to others, such as its model."""
    for key, value in attributes.items():
        if key != _NAME and not isinstance(value, (str, int, float, type(None))):
            return True
    return False


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
        self._layout = None if weight.is_contiguous() else _layout(weight)

    @classmethod
    def known(
        cls, weights: Known, at: int, version: int, identity: dict[str, Any] | str, cast: Tensor
    ) -> Cast:
        """That of the weight at one place among those that are known. It keeps its weight."""
        new = cls.__new__(cls)
        new.memory = _Memory()
        new.memory.cast = cast
        new._version = version
        new._address = weights._addresses[at]
        new._identity = identity
        new._storage = weights._storages[at]
        new._layout = weights._layouts[at]
        return new

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
            return self._layout == _layout(weight)
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


class Known:
    """The weights of one call of a graph: what they are, whatever is written to them. It serves
    later calls, in later scopes too, and keeps no weight, no cast and no attributes.

    The layout of a weight is not asked for again where Dynamo does, unless sizes or strides are
    dynamic.

    Attributes:
        keys: what their casts are looked up by.
    """

    __slots__ = ("_addresses", "_ids", "_layouts", "_shapes", "_storages", "keys")

    def __init__(
        self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], casts: Sequence[Cast]
    ) -> None:
        self._ids = list(map(id, weights))
        self.keys: Sequence[Key] = list(zip(self._ids, dtypes, strict=True))
        self._addresses = [cast._address for cast in casts]
        self._storages = [cast._storage for cast in casts]
        self._layouts = [cast._layout for cast in casts]
        self._shapes = None if _LAYOUTS_ARE_GUARDED else list(map(_layout, weights))

    def versions(
        self, weights: list[Tensor], identities: Sequence[dict[str, Any] | str]
    ) -> list[int] | None:
        """How often each of `weights` was written to; None if they are not the known ones, at the
        known places in memory.

        Args:
            weights: as many as are known.
            identities: what no other tensor has, of each.
        """
        versions = []
        for weight, one, address, storage, identity in zip(
            weights, self._ids, self._addresses, self._storages, identities, strict=True
        ):
            if (
                id(weight) != one
                or storage() is None
                or _address(weight) != address
                or not (weight.__dict__ is identity or _is_of(identity, weight))
            ):
                return None
            versions.append(_version(weight))
        if self._shapes is not None and self._shapes != list(map(_layout, weights)):
            return None
        return versions

    def have_their_storages(self, weights: list[Tensor]) -> bool:
        """Whether the storages are the known ones. Their places in memory do not tell: two storages
        may be over the same."""
        return [ref() for ref in self._storages] == list(map(_storage, weights))

    def is_alive(self) -> bool:
        """Whether no weight has been freed."""
        return all(storage() is not None for storage in self._storages)

    def keeps_no_cast(self) -> bool:
        """Whether none of the casts is to be freed with its weight: what does that holds it."""
        return all(getattr(ref, "__callback__", None) is None for ref in self._storages)


class Seen:
    """The casts of one call of a graph, and what its weights must still be for those to be right.
    Nobody keeps it beyond what makes casts wrong without a trace in the weights.

    Args:
        known: the weights.
        versions: how often they had been written to.
        identities: what no other tensor has, of each.
        casts: theirs, one by one.
        at_once: their casts as autograd records them, instead, where nobody has asked for one yet.

    Attributes:
        recorded: what holds the casts that a call with gradients gets; None until there was one.
        unrecorded: the same of a call without.
    """

    __slots__ = (
        "_casts",
        "_identities",
        "_versions",
        "at_once",
        "known",
        "recorded",
        "unrecorded",
    )

    def __init__(
        self,
        known: Known,
        versions: Sequence[int | None],
        identities: Sequence[dict[str, Any] | str],
        casts: Sequence[Cast] = (),
        at_once: list[Tensor] | None = None,
    ) -> None:
        self.known = known
        self._versions = versions
        self._identities = identities
        self._casts = casts
        self.at_once = at_once
        self.recorded: Sequence[Any] | None = None
        self.unrecorded: Sequence[Any] | None = None

    def holds(self, weights: list[Tensor]) -> bool:
        """The same questions as `Cast.is_right`, without that for the layout."""
        return self.known.versions(weights, self._identities) == self._versions

    def is_alive(self) -> bool:
        """Whether no weight has been freed, and their attributes, which are kept, lead nowhere."""
        return self.known.is_alive() and not any(
            isinstance(identity, dict) and _may_lead_on(identity) for identity in self._identities
        )

    @property
    def casts(self) -> Sequence[Cast]:
        """The casts, one by one."""
        if self.at_once is not None:
            versions: Any = self._versions  # of casts made at once, all are counted
            self._casts = [
                Cast.known(self.known, i, *of_one)
                for i, of_one in enumerate(
                    zip(versions, self._identities, self.at_once, strict=True)
                )
            ]
            self.at_once = None
        return self._casts
