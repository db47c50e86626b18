"""The casts of weights, made once and kept for as long as they are right.

A cast is right while its weight is the tensor that was cast and nothing has written to it: the same
object, version counter, address and storage, and no optimizer step on it since (optimizers with
`fused=True` write without counting the version up). The object is known by its id alone, because
`torch.utils.swap_tensors` refuses tensors with weak references; another tensor with the id of one
that was freed has another storage, or shares its version counter.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch.dynamo import never_traced
from .._torch.tensors import has_other_holders, is_captured, is_fake
from ..ops import multi_cast
from .scope import Scope, current_scope, last_scope

Key = tuple[int, torch.dtype]
"""A weight, by its id, and the dtype it is cast to."""


class WeightCacheInfo(NamedTuple):
    """What `weight_cache_info` returns.

    Attributes:
        entries: casts that are kept at this moment.
        bytes: the memory they occupy, and that which is kept for later ones because of CUDA graphs.
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


_version = operator.attrgetter("_version")
_address = torch.Tensor.data_ptr


def _storage(weight: Tensor, when_freed: Any = None) -> weakref.ref[Any]:
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
    """

    __slots__ = ("_address", "_layout", "_storage", "_version", "memory")

    def __init__(self, weight: Tensor) -> None:
        self.memory = _Memory()
        self._version: int | None = _version(weight)
        self._address = _address(weight)
        self._storage = _storage(weight, functools.partial(setattr, self.memory, "cast"))
        self._layout = (weight.shape, weight.stride())

    def is_right(self, weight: Tensor) -> bool:
        return (
            self._version == _version(weight)  # `torch.utils.swap_tensors` may lower it
            and self._address == _address(weight)
            and self._storage() is not None
            and self._layout == (weight.shape, weight.stride())
        )

    def is_alive(self) -> bool:
        """Whether its weight has not been freed."""
        return isinstance(getattr(self.memory, "cast", None), Tensor)

    def spoil(self) -> None:
        """Its weight may have been written to without a trace."""
        self._version = None

    def recycled(self) -> Tensor | None:
        """The memory of a cast that is wrong now, if nobody else holds it: neither an autograd
        graph nor a view of it that a compiled graph returned."""
        if not self.is_alive() or has_other_holders(self.memory, "cast"):
            return None
        return self.memory.cast


class _Shared:
    """What all graphs share."""

    lock = threading.RLock()
    lasting: ClassVar[dict[Key, Cast]] = {}  # of weight_cache="version"
    kept: ClassVar[dict[Key, Cast]] = {}  # the last casts of graphs that keep their memory
    kept_on_cpu: ClassVar[dict[Key, Cast]] = {}  # those of other graphs without gradients
    changes = 0  # counts what makes casts wrong without a trace in their weights
    hits = misses = casts = 0


class _Seen(NamedTuple):
    """The weights of a graph's last call: what they must still be for their casts to be right.

    The same questions as `Cast.is_right`, asked of all weights at once: 0.3 us a weight.
    """

    scope: Scope | None
    changes: int
    ids: list[int]
    versions: list[int]
    addresses: list[int]
    storages: list[weakref.ref[Any]]

    @classmethod
    def of(cls, weights: list[Tensor], scope: Scope | None) -> _Seen:
        storages = list(map(_storage, weights))
        versions, addresses = list(map(_version, weights)), list(map(_address, weights))
        return cls(scope, _Shared.changes, list(map(id, weights)), versions, addresses, storages)

    def holds(self, weights: list[Tensor], scope: Scope | None) -> bool:
        return (
            self.scope is scope
            and self.changes == _Shared.changes
            and self.ids == list(map(id, weights))
            and self.versions == list(map(_version, weights))
            and self.addresses == list(map(_address, weights))
            and all([storage() is not None for storage in self.storages])  # noqa: C419  (faster)
        )


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

    On the CPU the memory of casts without gradients is kept, too, until the next training call: the
    system's new pages cost several times what the cast costs (`benchmarks casts`).
    """

    def __init__(
        self,
        dtypes: Sequence[torch.dtype],
        grads: Sequence[bool],
        *,
        lasting: bool,
        scoped: bool,
        keep_memory: bool = False,
    ) -> None:
        self._dtypes = tuple(dtypes)
        self._grads = tuple(grads)
        self._records = any(grads)
        self._lasting = lasting
        self._scoped = scoped
        self._seen: _Seen | None = None
        self._keep_memory = keep_memory
        _watch_optimizers()

    def scope(self) -> Scope | None:
        """The scope that a call of this moment is in."""
        return current_scope() if self._scoped else None

    def casts(self, weights: list[Tensor], scope: Scope | None) -> list[Tensor]:
        """The casts of `weights`, in order, for a call in `scope`. What is not there, or no longer
        right, is made now, by one `multi_cast` for each dtype and device."""
        if self._records and not torch.is_grad_enabled():  # the graph switches autograd on itself
            with torch.enable_grad():
                return self.casts(weights, scope)
        contents = None if scope is None else scope.contents
        with _Shared.lock:
            # What is made while a CUDA graph is captured is computed when that is replayed, each
            # time, and nobody else may take it for computed; what was made before would be frozen.
            captured = is_captured(weights[0])
            if captured:
                contents = None
            nodes: dict[Key, tuple[Cast, Tensor]] = {} if contents is None else contents.nodes
            if self._lasting and not captured:
                casts, tie = _Shared.lasting, None
            else:  # outside of every scope, they last for this call
                casts, tie = ({} if contents is None else contents.casts), scope
            seen = self._seen
            if casts and seen is not None and seen.holds(weights, tie):
                _Shared.hits += len(weights)
            elif is_fake(weights[0]):  # a graph splitter is asking for shapes
                return [w.to(d) for w, d in zip(weights, self._dtypes, strict=True)]
            else:
                # Before they are read.
                self._seen = None if captured else _Seen.of(weights, tie)
                self._make(weights, casts, nodes)
            return [
                _traced(w, casts[id(w), d], d, nodes) if grad else casts[id(w), d].memory.cast
                for w, d, grad in zip(weights, self._dtypes, self._grads, strict=True)
            ]

    def passed_over(self) -> None:
        """Count a call that ran with its casts inside of the graph."""
        _Shared.misses += len(self._dtypes)

    def _make(
        self, weights: list[Tensor], casts: dict[Key, Cast], nodes: dict[Key, tuple[Cast, Tensor]]
    ) -> None:
        if self._records:
            _Shared.kept_on_cpu.clear()
        for known in (casts, _Shared.kept, _Shared.kept_on_cpu):
            for key in [key for key, cast in known.items() if not cast.is_alive()]:
                del known[key]
        made: dict[Key, Cast] = {}
        apart: dict[tuple[torch.dtype, torch.device], list[tuple[Key, Tensor, Tensor | None]]] = {}
        with_nodes: list[tuple[Key, Tensor]] = []
        for weight, dtype, grad in zip(weights, self._dtypes, self._grads, strict=True):
            key = id(weight), dtype
            cast = casts.get(key)
            if key in made or (cast is not None and cast.is_right(weight)):
                continue
            memory = self._recycled(key, weight, casts)
            made[key] = Cast(weight)
            if grad and memory is None:
                with_nodes.append((key, weight))
            else:
                apart.setdefault((dtype, weight.device), []).append((key, weight, memory))
        results: dict[Key, Tensor] = {}
        for (dtype, _), group in apart.items():
            keys, sources, memories = zip(*group, strict=True)
            results.update(zip(keys, _cast_all(sources, dtype, memories), strict=True))
        # In the order of the weights, for the gradients get ready in it.
        for dtype, run in itertools.groupby(with_nodes, key=lambda one: one[0][1]):
            keys, sources = zip(*run, strict=True)
            for key, node in zip(keys, multi_cast(sources, dtype), strict=True):
                results[key] = node.detach()
                nodes[key] = (made[key], node)
        for key, cast in made.items():
            cast.memory.cast = results[key]
            casts[key] = cast
            if self._keep_memory and not is_captured(results[key]):
                _Shared.kept[key] = cast
            elif results[key].is_cpu and not self._lasting and not self._records:
                _Shared.kept_on_cpu[key] = cast
        _Shared.casts += len(made)
        _Shared.misses += len(made)
        _Shared.hits += len(weights) - len(made)

    def _recycled(self, key: Key, weight: Tensor, casts: dict[Key, Cast]) -> Tensor | None:
        """Memory for a new cast: that of the one it replaces, or of an earlier scope."""
        if is_captured(weight):
            return None
        for former in (casts, _Shared.kept, _Shared.kept_on_cpu):
            memory = former[key].recycled() if key in former else None
            if (
                memory is not None
                and memory.device == weight.device
                and memory.shape == weight.shape
                and memory.stride() == weight.stride()
            ):
                del former[key]
                return memory
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
        multi_cast(weights, dtype, out=out)
        # So that autograd notices if, against expectation, a graph had saved one.
        torch.autograd.graph.increment_version(out)
        return out


class _Traced(torch.autograd.Function):
    """A cast that was made already - without gradients, in an earlier context, or in the memory of
    another - as autograd would have recorded it. One node for each weight, as `multi_cast` makes
    them: one for all would hold every gradient back until the end of the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = weight.dtype
        return cast.detach()

    @staticmethod
    @never_traced
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return (None if grad is None else grad.to(ctx.dtype)), None


def _traced(
    weight: Tensor, cast: Cast, dtype: torch.dtype, nodes: dict[Key, tuple[Cast, Tensor]]
) -> Tensor:
    """The cast with its way back to the weight: the one all graphs of the scope share."""
    known = nodes.get((id(weight), dtype))
    if known is not None and known[0] is cast:
        return known[1]
    node: Tensor = _Traced.apply(weight, cast.memory.cast)  # type: ignore[no-untyped-call]
    nodes[id(weight), dtype] = (cast, node)
    return node


@functools.cache
def _watch_optimizers() -> None:
    """Learn of every optimizer step from now on, whatever the optimizer writes with."""
    # Where `optimizer.step` is compiled, Dynamo would trace the hook as well.
    hook = torch.compiler.disable(_after_step, reason="it knows all casts of weights")
    register_optimizer_step_post_hook(hook)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with _Shared.lock:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        spoilt = [cast for (i, _), cast in _all_casts() if i in stepped]
        for cast in spoilt:
            cast.spoil()
        _Shared.changes += bool(spoilt)


def _all_casts() -> Iterator[tuple[Key, Cast]]:
    """Every cast that a call may find."""
    scope = last_scope()
    contents = None if scope is None else scope.contents
    for casts in (_Shared.lasting, {} if contents is None else contents.casts):
        yield from casts.items()


def clear_weight_cache() -> None:
    """Forgets every cast of a weight; the next call of a compiled graph makes its casts again.

    The remedy where a weight was written to in a way that PyTorch does not count, through
    `weight.data`, a NumPy view or shared memory, and a cast of it may be kept.
    """
    with _Shared.lock:
        scope = last_scope()
        contents = None if scope is None else scope.contents
        if contents is not None:
            contents.casts.clear()
            contents.nodes.clear()
        _Shared.lasting.clear()
        _Shared.kept.clear()
        _Shared.kept_on_cpu.clear()
        _Shared.changes += 1


def weight_cache_info() -> WeightCacheInfo:
    """Says what the weight cache holds and how it was used since the process began.

    Where several threads call compiled graphs at once, `misses` is approximate.
    """
    with _Shared.lock:
        found = [cast for _, cast in _all_casts() if cast.is_alive()]
        kept = [*_Shared.kept.values(), *_Shared.kept_on_cpu.values()]
        holding = found + [cast for cast in kept if cast.is_alive()]
        memories = {id(cast): cast.memory.cast for cast in holding}
        size = sum(memory.nbytes for memory in memories.values())
        return WeightCacheInfo(len(found), size, _Shared.hits, _Shared.misses, _Shared.casts)
