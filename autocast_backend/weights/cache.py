"""The casts of weights that all compiled graphs share, and what makes them wrong from outside."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._torch.dynamo import pass_through_error
from .._torch.tensors import has_storage, storages_of
from .._torch.writes import watch_collectives, watch_hidden_writes
from .cast import Cast, Key, ref_to_storage
from .scope import last_scope

SWEEP_AFTER = 4
"""How many casts are made, for each that there is, until those of freed weights are looked for."""

MOST_WORKS = 64
"""Works of `torch.distributed` that are remembered before it is asked which of them are done."""


class WeightCacheError(pass_through_error(), RuntimeError):  # type: ignore[misc]
    """A weight whose cast cannot be kept as asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)  # type: ignore[call-arg]


def fsdp_error(name: str) -> WeightCacheError:
    """What to raise where casts are to last and FSDP manages a weight."""
    return WeightCacheError(
        f"{name}: FSDP manages this weight, and fills it anew without counting that, so "
        'weight_cache="version" cannot see when its cast is wrong; use weight_cache="scope" '
        'or "off"'
    )


class WeightCacheInfo(NamedTuple):
    """What `weight_cache_info` returns.

    Attributes:
        entries: casts that are kept at this moment.
        bytes: the memory they occupy, and that which is kept for later ones: on the CPU, of casts
            made without gradients, and where CUDA graphs read them.
        hits: how often a call of a compiled graph found the cast of a weight it needs.
        misses: how often it did not.
        casts: casts made outside of graphs. The misses beyond them are calls that ran a graph with
            its casts inside, because one use was expected.
    """

    entries: int
    bytes: int
    hits: int
    misses: int
    casts: int


class Shared:
    """What all graphs share."""

    lock = threading.RLock()
    lasting: ClassVar[dict[Key, Cast]] = {}  # of weight_cache="version"
    # The last casts of graphs that keep their memory. A weight has several where autograd graphs of
    # earlier scopes held the others meanwhile.
    kept: ClassVar[dict[Key, list[Cast]]] = {}
    kept_on_cpu: ClassVar[dict[Key, Cast]] = {}  # those of other graphs without gradients
    # All graphs that take casts in. Those whose casts last remember what they have seen themselves,
    # the others in the scope.
    graphs: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    # What `torch.distributed` may not have done yet, and the storages that it writes to.
    works: ClassVar[list[tuple[Any, list[weakref.ref[Any]]]]] = []
    hits = misses = casts = 0
    sweep_at = 0  # of `casts`: when to look for those of freed weights


@functools.cache
def watch_writes() -> None:
    """Learn of writes that need not count from now on: of every optimizer step, whatever the
    optimizer writes with, and of those that PyTorch hides or does not know of."""
    # Where `optimizer.step` is compiled, Dynamo would trace the hook as well.
    hook = torch.compiler.disable(_at_step, reason="it knows all casts of weights")
    register_optimizer_step_pre_hook(hook)  # a step may raise when it has written half of them
    register_optimizer_step_post_hook(hook)  # and its closure may call the model before
    watch_hidden_writes(_written)
    watch_collectives(_received)


def _at_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _written(p for group in optimizer.param_groups for p in group["params"])


def _written(tensors: Iterable[torch.Tensor]) -> None:
    """Have the casts of these tensors made again."""
    with Shared.lock:
        casts = [cast for _, cast in all_casts()]
        if not casts:  # as between contexts, where most steps are
            return
        # By their memory: an optimizer may have a parameter of its own in the place of all weights.
        written = storages_of(tensors)
        spoilt = [cast for cast in casts if cast.is_in(written)]
        for cast in spoilt:
            cast.spoil()
        if spoilt:
            forget_seen()


def _received(tensors: Sequence[torch.Tensor], works: Sequence[Any]) -> None:
    """Have the casts of these tensors made again, those that are made while `works` last, too."""
    with Shared.lock:
        if len(Shared.works) >= MOST_WORKS:
            being_received()
        storages = [ref_to_storage(t) for t in tensors if has_storage(t)]
        Shared.works += [(work, storages) for work in works]
        _written(tensors)


def being_received() -> set[int]:
    """The storages, by their `_cdata`, that others may be writing to at this moment: a cast of one
    may have what was there before. Forgets works that are done."""
    Shared.works = [(work, refs) for work, refs in Shared.works if not work.is_completed()]
    storages = [ref() for _, refs in Shared.works for ref in refs]
    return {storage._cdata for storage in storages if storage is not None}


def stores() -> list[dict[Key, Cast]]:
    """Where calls find casts at this moment."""
    scope = last_scope()
    contents = None if scope is None else scope.contents
    return [Shared.lasting] if contents is None else [Shared.lasting, contents.casts]


def all_casts() -> Iterator[tuple[Key, Cast]]:
    """Every cast that a call may find."""
    for casts in stores():
        yield from casts.items()


def forget_seen() -> None:
    """Have every graph look at each cast anew: some are wrong, or would be once a weight is again
    what it was, and the weights do not tell. Nor may a graph keep the memory of such casts."""
    scope = last_scope()
    contents = None if scope is None else scope.contents
    if contents is not None:
        contents.forget_seen()
    for graph in Shared.graphs:
        graph.seen.clear()


def forget_dead() -> None:
    """Drop what is left of the casts of weights that have been freed, and what would keep a model
    that an attribute leads to. That takes a look at all of them, so only each time that some
    times as many have been made as there were."""
    if Shared.casts < Shared.sweep_at:
        return
    scope = last_scope()
    contents = None if scope is None else scope.contents
    stores = [Shared.lasting, Shared.kept_on_cpu]
    if contents is not None:
        stores.append(contents.one_by_one)  # casts that were made at once keep their weights
    for known in stores:
        for (weight, _), cast in known.items():
            cast.let_go_of_attributes(weight)
        for key in [key for key, cast in known.items() if not cast.is_alive()]:
            del known[key]
    for key in list(Shared.kept):
        Shared.kept[key] = [cast for cast in Shared.kept[key] if cast.is_alive()]
        for cast in Shared.kept[key]:
            cast.let_go_of_attributes(key[0])
        if not Shared.kept[key]:
            del Shared.kept[key]
    left = sum(map(len, stores)) + len(Shared.kept)
    left += sum(graph.forget_dead() for graph in Shared.graphs)
    Shared.sweep_at = Shared.casts + SWEEP_AFTER * left


def clear_weight_cache() -> None:
    """Forgets every cast of a weight; the next call of a compiled graph makes its casts again.

    The remedy where a weight was written to in a way that PyTorch does not count, through
    `weight.data`, a NumPy view or shared memory, and a cast of it may be kept.
    """
    with Shared.lock:
        scope = last_scope()
        contents = None if scope is None else scope.contents
        if contents is not None:
            contents.clear()
        Shared.lasting.clear()
        Shared.kept.clear()
        Shared.kept_on_cpu.clear()
        forget_seen()


def weight_cache_info() -> WeightCacheInfo:
    """Says what the weight cache holds and how it was used since the process began.

    Returns:
        `entries`, `bytes`, `hits`, `misses` and `casts`, all ints, by name: see `WeightCacheInfo`
        in `autocast_backend.weights`. Where several threads call compiled graphs at once, `misses`
        is approximate.
    """
    with Shared.lock:
        found = [cast for _, cast in all_casts() if cast.is_alive()]
        kept = [*itertools.chain(*Shared.kept.values()), *Shared.kept_on_cpu.values()]
        holding = found + [cast for cast in kept if cast.is_alive()]
        memories = {id(cast): cast.memory.cast for cast in holding}
        size = sum(memory.nbytes for memory in memories.values())
        return WeightCacheInfo(len(found), size, Shared.hits, Shared.misses, Shared.casts)
