"""Translation validation: does a lowered call do what autocast does?

Both forms of a call are run on fake tensors - the original one under real autocast, the lowered one
with autocast off - and what happens below autograd is compared. Nothing is trusted: not the policy
table, not the spelling of an op, not that a composite hides no policy op.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._torch.autocast import disable_autocast
from .._torch.fake_tensors import failures_unlogged, observing
from .._torch.formulas import has_own_formula, next_sequence_number
from .._torch.ops import op_name_of
from ..state import AutocastState, weight_cache_on

# What a cast becomes below autograd. Casts are counted; where they stand is seen through the dtypes
# of the other ops. Two casts of one tensor are not one: their gradients add up in another dtype.
_CASTS = (torch.ops.aten._to_copy.default,)
# Ops that only rename or copy elements give the same bits before and after a cast, in both
# directions of autograd, so their dtypes tell nothing. Not so `expand`: its backward is a sum.
_RENAMING = frozenset(
    f"aten::{op}"
    for op in (
        *("_unsafe_view", "alias", "clone", "detach", "permute", "squeeze"),
        *("t", "transpose", "unsqueeze", "view"),
    )
)
# Autocast kernels and Python wrappers ask a tensor for its device; that is no computation, nor is
# what has to do with no tensor at all.
_IGNORED_NAMESPACES = ("prim",)

Event = tuple[str, tuple[torch.dtype, ...], tuple[torch.dtype, ...], tuple[Any, ...]]
"""One op below autograd: its name, the dtypes it got and gave, and its other arguments."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """What one call did.

    Attributes:
        dtypes, shapes: of the result's tensors.
        events: the ops below autograd, in order.
        casts: how many casts it made.
        cast_to: `id` of every tensor that a cast was given, and the dtype it was cast to.
        read_first: `id` of every tensor among them that another op had got before.
        kept: `id` of every weight whose cast eager's cache keeps.
        own_backward: whether some of its backward is a formula of its own, of tensors that nothing
            here tells about.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    events: tuple[Event, ...] = ()
    casts: int = 0
    cast_to: Mapping[int, torch.dtype] = dataclasses.field(default_factory=dict, compare=False)
    read_first: Collection[int] = dataclasses.field(default_factory=frozenset, compare=False)
    kept: Collection[int] = dataclasses.field(default_factory=frozenset, compare=False)
    own_backward: bool = False

    @property
    def is_composite(self) -> bool:
        """Whether it ran several ops, beside those that only rename elements."""
        return sum(bool(inputs or outputs) for _, inputs, outputs, _ in self.events) > 1


@dataclasses.dataclass(frozen=True)
class Failed:
    """A call that raised: its message, for the report."""

    message: str


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _plain_arguments(value: Any) -> tuple[Any, ...]:
    """The arguments that are plain values; symbols are renamed from one run to the next, and no NaN
    is equal to another."""
    plain = (v for v in pytree.tree_leaves(value) if isinstance(v, _PLAIN))
    return tuple(v if v == v else str(v) for v in plain)


def dtypes_of(value: Any) -> tuple[torch.dtype, ...]:
    """The dtypes of all tensors in a nest of lists, tuples and dicts, in order."""
    return tuple(t.dtype for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


WeightCache = bool | Callable[[torch.Tensor], bool]
"""Whether casts of one weight count as one, as eager's cache makes them; or what tells so of the
cast of a weight that is made now."""


class _Recorder(TorchDispatchMode):
    def __init__(self, weight_cache: WeightCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.casts: set[tuple[int, ...]] = set()
        self.cast_to: dict[int, torch.dtype] = {}
        self.read: set[int] = set()
        self.read_first: set[int] = set()
        self._caches = weight_cache if callable(weight_cache) else lambda _: bool(weight_cache)

    @property
    def kept(self) -> frozenset[int]:
        return frozenset(key[0] for key in self.casts if len(key) == 1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        inputs = dtypes_of((args, kwargs))  # before the call: it may change them in place
        out = func(*args, **kwargs)
        if func in _CASTS:
            if out.dtype is not args[0].dtype:
                cached = is_weight(args[0]) and self._caches(args[0])
                self.casts.add((id(args[0]),) if cached else (id(args[0]), len(self.casts)))
                if id(args[0]) in self.read - self.cast_to.keys():
                    self.read_first.add(id(args[0]))
                self.cast_to[id(args[0])] = out.dtype
        elif op_name_of(func)[0] in _RENAMING:
            self.events.append((str(func), (), (), ()))
        elif func.namespace not in _IGNORED_NAMESPACES and (inputs or dtypes_of(out)):
            plain = _plain_arguments((args, kwargs))
            self.events.append((str(func), inputs, dtypes_of(out), plain))
            self.read.update(map(id, pytree.tree_leaves((args, kwargs))))
        return out


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether eager autocast caches the lower-precision cast of a tensor: a float32 leaf that
    requires grad and is no view (`at::autocast::cached_cast`)."""
    return (
        tensor.dtype is torch.float32
        and tensor.requires_grad
        and not tensor._is_view()
        and tensor.is_leaf
    )


def observe(
    call: Callable[[], Any],
    state: AutocastState | None,
    fake_mode: Any,
    grad: bool,
    weight_cache: WeightCache = True,
) -> Observation | Failed:
    """Run `call` on fake tensors under `state` (None: autocast off) and record what it does.

    A call that raises is an answer too - some ops refuse mixed dtypes, which autocast spares them -
    so every exception is turned into `Failed`.
    """
    recorder = _Recorder(weight_cache)
    first = next_sequence_number()
    with _conditions(state, fake_mode, grad):
        try:
            with recorder:
                value = call()
        except Exception as error:
            return Failed(f"{type(error).__name__}: {error}".splitlines()[0])
    results = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    return Observation(
        dtypes_of(value),
        _shapes(value),
        tuple(recorder.events),
        len(recorder.casts),
        recorder.cast_to,
        recorder.read_first,
        recorder.kept,
        has_own_formula(results, first),
    )


def casts_again(
    call: Callable[[], Any],
    state: AutocastState,
    fake_mode: Any,
    grad: bool,
    key: Callable[[torch.Tensor], Any] = id,
) -> set[Any]:
    """The keys of the weights that a second call casts again, though the first one cast them with
    eager's weight cache on: so do rules of `torch.library.register_autocast`, a `Tensor.to` inside
    the call, and what reads wrappers of weights. (Leaves that the call itself makes count, too.)

    Args:
        key: called with a weight when it is cast.
    """
    found = set()

    def note(weight: torch.Tensor) -> bool:
        found.add(key(weight))
        return True

    def twice() -> None:
        with weight_cache_on():
            call()
            with _Recorder(note):
                call()

    observe(twice, state, fake_mode, grad)
    return found


def observed(value: Any) -> Observation:
    """The cheap observation of a call that already ran: the dtypes and shapes of its result."""
    return Observation(dtypes_of(value), _shapes(value))


def _shapes(value: Any) -> tuple[tuple[int | str, ...], ...]:
    tensors = (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))
    return tuple(tuple(n if isinstance(n, int) else "symbol" for n in t.shape) for t in tensors)


@contextlib.contextmanager
def _conditions(state: AutocastState | None, fake_mode: Any, grad: bool) -> Iterator[None]:
    autocast = disable_autocast() if state is None else state.applied()
    with observing(fake_mode), failures_unlogged(), torch.set_grad_enabled(grad), autocast:
        yield


def difference(
    eager: Observation | Failed, ours: Observation | Failed, level: Literal["dtypes", "ops"]
) -> str | None:
    """Why `ours` is not proved equal to `eager`, in words; None where it is.

    Args:
        level: "dtypes" compares the dtypes of the results; "ops" compares their shapes, the
            sequence of (op, input dtypes, output dtypes) below autograd and the number of casts as
            well.
    """
    if isinstance(eager, Failed):
        return f"under autocast it cannot run on fake tensors ({eager.message})"
    if isinstance(ours, Failed):
        return f"with autocast off it raises {ours.message}"
    if eager.dtypes != ours.dtypes:
        return f"autocast gives {_short(eager.dtypes)}, without it {_short(ours.dtypes)}"
    if level == "dtypes":
        return None
    if eager.shapes != ours.shapes:
        return f"autocast gives shapes {eager.shapes}, without it {ours.shapes}"
    for theirs, mine in zip(eager.events, ours.events, strict=False):
        if theirs != mine:
            return f"autocast runs {_event(theirs)}, without it {_event(mine)}"
    if len(eager.events) != len(ours.events):
        return f"autocast runs {len(eager.events)} ops, without it {len(ours.events)}"
    if eager.casts != ours.casts:
        return f"autocast makes {eager.casts} casts, without it {ours.casts}"
    return None


def _event(event: Event) -> str:
    op, inputs, outputs, plain = event
    return f"{op}({_short(inputs)}; {', '.join(map(str, plain))}) -> {_short(outputs)}"


def _short(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d)[6:] for d in dtypes) or "no tensor"
