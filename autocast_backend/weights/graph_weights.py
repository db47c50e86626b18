"""The casts that one compiled graph takes in: found among those of all graphs, or made."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.cuda_graphs import Place, recorded_outputs
from .._torch.fake_tensors import makes_fake_tensors
from .._torch.fsdp import managed_by_fsdp
from .._torch.tensors import is_captured, is_fake
from ..ops import multi_cast
from .cache import (
    Shared,
    being_received,
    forget_dead,
    forget_seen,
    fsdp_error,
    stores,
    watch_writes,
)
from .cast import Cast, Key, Known, Seen, identities_of
from .recorded import Node, cast_each, traced, traced_alone, untraced
from .scope import Contents, Scope, current_scope

KEPT_BYTES = 512 * 2**10
"""Bytes of a cast from which on new memory costs more, on the CPU, than looking after the old. A
smaller one gets memory that its process has freed before, without new pages to be cleared."""

MOST_SEEN = 1000
"""Calls that are remembered, of one graph where casts last and in one scope elsewhere, each with
other weights: those of one block after another. What is forgotten is found again, more slowly."""


Runs = Sequence[tuple[torch.dtype, slice]]
"""The dtypes that weights are cast to, each with the place of those that are one list."""


class GraphWeights:
    """The casts that one compiled graph takes in, found or made for each of its calls.

    Args:
        dtypes: what each weight is cast to.
        grads: for which of them autograd records the cast.
        lasting: keep casts until their weight changes, not until the scope ends.
        scoped: whether the graph runs inside an autocast context of its caller, whose scope it
            shares with other graphs. If not, its regions are its own, and so are their casts.
        keep_memory: give a weight's cast the same address in every scope, as CUDA graphs want it.
            Its memory then lives as long as the weight.
        dynamic: whether calls may come with weights of other sizes or strides.

    On the CPU the memory of large casts without gradients is kept, too, until the next training
    call: the system's new pages cost several times what the cast costs (`benchmarks casts`).
    """

    def __init__(
        self,
        dtypes: Sequence[torch.dtype],
        grads: Sequence[bool],
        *,
        lasting: bool,
        scoped: bool,
        keep_memory: bool = False,
        dynamic: bool = False,
    ) -> None:
        self._dtypes = tuple(dtypes)
        self._grads = tuple(grads)
        self._records = any(grads)
        self._lasting = lasting
        self._scoped = scoped
        self.seen: dict[Any, Seen] = {}  # where casts last, by the first weight
        self._keep_memory = keep_memory
        self._dynamic = dynamic
        # The weights of earlier scopes, by the first of a call: none has to be looked at by itself.
        self._known: dict[int, tuple[Known, Runs]] = {}
        self._knows_weights = all(grads) and scoped and not (lasting or keep_memory or dynamic)
        watch_writes()
        with Shared.lock:
            Shared.graphs.add(self)

    def scope(self) -> Scope | None:
        """The scope that a call of this moment is in."""
        return current_scope() if self._scoped else None

    def casts(self, weights: list[Tensor], scope: Scope | None) -> list[Tensor]:
        """The casts of `weights`, in order, for a call in `scope`. What is not there, or no longer
        right, is made now, by one `multi_cast` for each dtype and device, or one by one where
        autograd records it."""
        # A graph may switch autograd on itself. In inference mode that has no effect, and casts
        # recorded there would have no gradient in later calls of the scope either.
        recording = self._records and not torch.is_inference_mode_enabled()
        if recording and not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.casts(weights, scope)
        if makes_fake_tensors() or is_fake(weights[0]):  # somebody is asking for shapes
            return [w.to(d) for w, d in zip(weights, self._dtypes, strict=True)]
        contents = None if scope is None else scope.contents
        with Shared.lock:
            # What is made while a CUDA graph is captured is computed when that is replayed, each
            # time, and nobody else may take it for computed; what was made before would be frozen.
            captured = is_captured(weights[0])
            if captured:
                contents = None
            nodes: dict[Key, Node] = {} if contents is None else contents.nodes
            calls: dict[Any, Seen] = {}  # outside of every scope, nobody remembers this one
            first: Any = id(weights[0])
            if self._lasting and not captured:
                calls = self.seen
            elif contents is not None:
                calls, first = contents.seen, (self, first)
            seen = calls.get(first)
            if seen is not None and seen.holds(weights):
                Shared.hits += len(weights)
            else:
                # A graph that was compiled before FSDP took its weights over serves after it, too.
                managed = managed_by_fsdp(weights)
                if managed and self._lasting:
                    raise fsdp_error(f"a parameter of shape {list(managed[0].shape)}")
                if managed:  # a shared node would hand gradients over after FSDP has reduced
                    contents, nodes, calls = None, {}, {}
                seen = None  # it may hold casts that are wrong
                if recording and contents is not None:
                    seen = self._cast_at_once(weights, contents)
                if seen is None:
                    seen = self._look_at_each(weights, recording, contents, nodes, captured)
                if not self._dynamic:
                    _remember(calls, first, seen)
            if recording and seen.at_once is not None:
                return list(seen.at_once)
            holders = seen.recorded if recording else seen.unrecorded
            if holders is None and recording:
                # The regions of a graph that is in no scope are scopes of their own: a node each.
                take = traced if self._scoped else traced_alone
                holders = [
                    take(w, cast, d, nodes) if grad else untraced(cast.memory)
                    for w, d, grad, cast in zip(
                        weights, self._dtypes, self._grads, seen.casts, strict=True
                    )
                ]
                if not self._lasting:  # what lasts has other nodes in each scope
                    seen.recorded = holders
            elif holders is None:
                holders = seen.unrecorded = [untraced(cast.memory) for cast in seen.casts]
            return [holder.cast for holder in holders]

    def forget_dead(self) -> int:
        """Drop what is remembered of weights that have been freed, and what would keep a model that
        an attribute leads to. Says how many weights are left."""
        for first in [key for key, (known, _) in self._known.items() if not known.is_alive()]:
            del self._known[first]
        for first in [key for key, seen in self.seen.items() if not seen.is_alive()]:
            del self.seen[first]
        return sum(len(known.keys) for known, _ in self._known.values())

    def _cast_at_once(self, weights: list[Tensor], contents: Contents) -> Seen | None:
        """The casts of weights that an earlier scope had all casts of, where this one has none, as
        in most training steps: made with the least that has to be asked and kept. None where each
        of them has to be looked at."""
        known, runs = self._known.get(id(weights[0]), (None, ()))
        if known is None or not contents.has_none_of(known.keys):
            return None
        identities = identities_of(weights)
        versions = known.versions(weights, identities)
        if (
            versions is None
            or not known.have_their_storages(weights)
            or not Shared.kept.keys().isdisjoint(known.keys)
            or being_received()
        ):
            return None
        Shared.kept_on_cpu.clear()
        forget_dead()
        casts: list[Tensor] = []
        for dtype, run in runs:
            casts += cast_each(weights[run], dtype)
        seen = Seen(known, versions, identities, at_once=casts)
        contents.add(seen)
        Shared.casts += len(casts)
        Shared.misses += len(casts)
        return seen

    def _look_at_each(
        self,
        weights: list[Tensor],
        recording: bool,
        contents: Contents | None,
        nodes: dict[Key, Node],
        captured: bool,
    ) -> Seen:
        """The casts of weights, one by one: found where they are right, or made."""
        casts: dict[Key, Cast] = {}  # outside of every scope, they last for this call
        if self._lasting and not captured:
            casts = Shared.lasting
        elif contents is not None:
            casts = contents.casts
        found = self._make(weights, recording, casts, nodes)
        known = Known(weights, self._dtypes, found)
        if (
            self._knows_weights
            and contents is not None
            and len(set(known.keys)) == len(weights)
            and known.keeps_no_cast()
        ):
            runs = _runs(zip(self._dtypes, (w.device for w in weights), strict=True))
            _remember(self._known, id(weights[0]), (known, runs))
        versions, identities = zip(
            *((cast._version, cast._identity) for cast in found), strict=True
        )
        return Seen(known, list(versions), identities, found)

    @staticmethod
    def passed_over(count: int) -> None:
        """Count a call that ran with so many casts inside of the graph."""
        Shared.misses += count

    def _make(
        self,
        weights: list[Tensor],
        recording: bool,
        casts: dict[Key, Cast],
        nodes: dict[Key, Node],
    ) -> list[Cast]:
        """The casts of `weights`. What is not in `casts`, or no longer right, is made."""
        if self._records:
            Shared.kept_on_cpu.clear()
        forget_dead()
        grads = self._grads if recording else (False,) * len(weights)
        recorded = recorded_outputs() if Shared.kept else {}
        others = [store for store in stores() if store is not casts]
        received = being_received()
        # What graphs of a scope share is kept as autograd records it, which keeps its weight, too.
        with_gradients = self._scoped and not self._lasting and not self._keep_memory
        found: list[Cast] = []
        made: dict[Key, Cast] = {}
        forgotten = False
        former: dict[Key, Cast] = {}
        apart: dict[tuple[torch.dtype, torch.device], list[tuple[Key, Tensor, Tensor | None]]] = {}
        with_nodes: list[tuple[tuple[torch.dtype, torch.device], Key, Tensor]] = []
        for weight, dtype, grad in zip(weights, self._dtypes, grads, strict=True):
            key = id(weight), dtype
            cast = made.get(key)
            if cast is not None:
                found.append(cast)
                continue
            cast = casts.get(key)
            if cast is not None and cast.is_right(weight):
                found.append(cast)
                if self._keep_memory and cast not in Shared.kept.get(key, ()):
                    _leaves_kept_on_cpu(key, cast)
                    Shared.kept.setdefault(key, []).append(cast)
                continue
            if cast is not None:
                # Other graphs must not find the new cast when the weight is what it was before:
                # averaged weights are put in its place and taken out again, say.
                if not forgotten and cast.is_alive():
                    forget_seen()
                    forgotten = True
                if key in nodes:  # it holds the memory of the wrong cast
                    del nodes.pop(key).cast
            made[key] = new = Cast(weight, watched=not (grad and with_gradients))
            found.append(new)
            if received and new.is_in(received):
                new.spoil()  # for this call alone
            memory = None
            small = grad and weight.numel() * dtype.itemsize < KEPT_BYTES
            if small and not self._keep_memory and key not in Shared.kept:
                # In new memory it is recorded as it is made; that of the old cast is free by then.
                casts.pop(key, None)
                cast = None
            elif cast is not None or key in Shared.kept or key in Shared.kept_on_cpu:
                replaced = _replaceable(key, weight, casts, others, recorded)
                if replaced is not None:
                    replaced.spoil()  # even if an exception should keep it in its place
                    former[key] = replaced
                    memory = replaced.memory.cast
                    memory = memory.detach() if memory.requires_grad else memory
            if grad and memory is None:
                with_nodes.append(((dtype, weight.device), key, weight))
            else:
                apart.setdefault((dtype, weight.device), []).append((key, weight, memory))
        results: dict[Key, Tensor] = {}
        for (dtype, _), group in apart.items():
            keys, sources, memories = zip(*group, strict=True)
            results.update(zip(keys, _cast_all(sources, dtype, memories), strict=True))
        # In the order of the weights, for the gradients get ready in it.
        for (dtype, _), run in itertools.groupby(with_nodes, key=operator.itemgetter(0)):
            _, keys, sources = zip(*run, strict=True)
            for key, node in zip(keys, cast_each(sources, dtype), strict=True):
                results[key] = node if with_gradients else node.detach()
                if not with_gradients:
                    nodes[key] = Node(made[key], node)
        # A training graph without CUDA graphs keeps no memory of its own.
        keeping = bool(former) or self._keep_memory or not self._records
        for key, cast in made.items():
            cast.memory.cast = results[key]
            if keeping:
                self._keep(key, cast, former.get(key))
        casts.update(made)
        Shared.casts += len(made)
        Shared.misses += len(made)
        Shared.hits += len(weights) - len(made)
        return found

    def _keep(self, key: Key, cast: Cast, former: Cast | None) -> None:
        """Have later scopes find the memory of a new cast, in the place of that of `former`."""
        kept = Shared.kept.get(key, [])
        memory = cast.memory.cast
        _leaves_kept_on_cpu(key, former)
        if former in kept:  # also where this graph would not keep it: another one does
            kept[kept.index(former)] = cast
        elif self._keep_memory and not is_captured(memory):
            Shared.kept.setdefault(key, []).append(cast)
        elif (
            memory.is_cpu
            and memory.nbytes >= KEPT_BYTES
            and not self._lasting
            and not self._records
        ):
            Shared.kept_on_cpu[key] = cast


def _leaves_kept_on_cpu(key: Key, cast: Cast | None) -> None:
    """Two casts in one memory, or one in two places, would hold it against each other."""
    if Shared.kept_on_cpu.get(key) is cast:
        Shared.kept_on_cpu.pop(key, None)


def _runs(lists: Iterable[tuple[torch.dtype, torch.device]]) -> Runs:
    """The lists that are cast one by one, where the weights of each stand side by side."""
    runs, start = [], 0
    for (dtype, _), run in itertools.groupby(lists):
        end = start + len(list(run))
        runs.append((dtype, slice(start, end)))
        start = end
    return runs


def _remember(calls: dict[Any, Any], first: Any, call: Any) -> None:
    if len(calls) >= MOST_SEEN:
        calls.clear()
    calls[first] = call


class Parts:
    """The casts that one compiled graph takes in, of which some last and others do not.

    Args:
        parts: each with the places of its casts among all, one after the other.
    """

    def __init__(self, parts: Sequence[tuple[slice, GraphWeights]]) -> None:
        self._parts = parts

    def scope(self) -> Scope | None:
        """As that of `GraphWeights`."""
        return self._parts[0][1].scope()

    def casts(self, weights: list[Tensor], scope: Scope | None) -> list[Tensor]:
        """As that of `GraphWeights`."""
        found: list[Tensor] = []
        for places, part in self._parts:
            found += part.casts(weights[places], scope)
        return found


def _replaceable(
    key: Key,
    weight: Tensor,
    casts: dict[Key, Cast],
    others: Sequence[dict[Key, Cast]],
    recorded: Mapping[int, list[Place]],
) -> Cast | None:
    """A cast whose memory a new one can have: the one it replaces, or one of an earlier scope, but
    none that calls find in `others`. They are tried in the same order in every step, so that CUDA
    graphs meet the same memory."""
    if is_captured(weight):
        return None
    used = [store[key] for store in others if key in store]
    known = [casts.get(key), *Shared.kept.get(key, ()), Shared.kept_on_cpu.get(key)]
    for cast in known:
        if cast is not None and cast not in used and cast.can_be_replaced(weight, recorded):
            return cast
    return None


def _cast_all(
    weights: Sequence[Tensor], dtype: torch.dtype, memory: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """The weights in `dtype`, in the memory that is given for some of them, without gradients."""
    # Casts that are made in inference mode must also serve a training graph of the same scope.
    with torch.inference_mode(False), torch.no_grad():
        if not any(m is not None for m in memory):
            return multi_cast(weights, dtype)
        out = [
            torch.empty_like(w, dtype=dtype) if m is None else m
            for w, m in zip(weights, memory, strict=True)
        ]
        # It counts a write: an autograd graph that had saved one of them would notice.
        multi_cast(weights, dtype, out=out)
        return out
