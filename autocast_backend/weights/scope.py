"""The scope of eager autocast's weight cache: until the outermost autocast context exits.

PyTorch tells nobody when that is. So a cast of our own is put into its cache: when the cache is
cleared, that cast dies, and with it everything tied to the scope - at that moment, by the thread
that clears the cache, as eager's own casts die.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.hooks import saved_tensor_hooks_are_on, saved_tensor_hooks_off
from .._torch.modes import (
    in_dispatch_mode,
    in_function_mode,
    outside_of_function_modes,
    outside_of_modes,
)
from .cast import Cast, Key, Seen


class Contents:
    """What dies with a scope.

    Attributes:
        one_by_one: the casts that somebody has looked for; `casts` has them all.
        nodes: those with what autograd traces back to their weight, where `casts` has them without:
            one for all graphs, so that the gradients of all uses add up in the lower precision, as
            those of eager's cached cast do.
        seen: what graphs know of their last calls, by graph and first weight.
    """

    __slots__ = ("_at_once", "_keys_at_once", "nodes", "one_by_one", "seen")

    def __init__(self) -> None:
        self.one_by_one: dict[Key, Cast] = {}
        self.nodes: dict[Any, Any] = {}
        self.seen: dict[Any, Any] = {}
        # Made for all weights of a graph at once, and not in `one_by_one` yet.
        self._at_once: list[Seen] = []
        self._keys_at_once: set[Key] = set()

    @property
    def casts(self) -> dict[Key, Cast]:
        """The casts made in it, by weight and dtype."""
        if self._at_once:
            self._take_apart()
        return self.one_by_one

    def _take_apart(self) -> None:
        for seen in self._at_once:
            self.one_by_one.update(zip(seen.known.keys, seen.casts, strict=True))
        self._at_once.clear()
        self._keys_at_once.clear()

    def has_none_of(self, keys: Sequence[Key]) -> bool:
        """Whether it has no cast of these."""
        return self.one_by_one.keys().isdisjoint(keys) and self._keys_at_once.isdisjoint(keys)

    def add(self, seen: Seen) -> None:
        """Add casts that were made at once, none of which it has."""
        self._at_once.append(seen)
        self._keys_at_once.update(seen.known.keys)

    def forget_seen(self) -> None:
        """Have every graph look at each cast anew."""
        self._take_apart()
        self.seen.clear()

    def clear(self) -> None:
        """Forget all of it."""
        everything = (self.one_by_one, self._at_once, self._keys_at_once, self.nodes, self.seen)
        for kept in everything:
            kept.clear()


class Scope:
    """One life of eager autocast's weight cache. It is process-wide: whichever thread exits its
    outermost context first ends it."""

    __slots__ = ("_contents", "_sentinel")

    def __init__(self) -> None:
        self._contents: Any = Contents()
        # The callback must be C code, and what it frees must be freed by C code: it runs while the
        # thread that clears the cache holds ATen's lock of it. Python code could lose the GIL there
        # to a thread that waits for that lock and does not let go of the GIL: a deadlock.
        end = functools.partial(setattr, self, "_contents")
        self._sentinel = weakref.ref(_cast_into_cache(), end)

    @property
    def contents(self) -> Contents | None:
        """None once the scope has ended."""
        contents = self._contents
        return contents if type(contents) is Contents else None


_current: Scope | None = None


def current_scope() -> Scope | None:
    """The scope in force; None where the weight cache is off.

    A scope starts when it is first asked for. Outside of every autocast context it would last until
    the next one exits: ask only where autocast is on.
    """
    global _current
    if not torch.is_autocast_cache_enabled():
        return None
    scope = _current
    if scope is None or scope.contents is None:
        scope = _current = Scope()
    return scope


def last_scope() -> Scope | None:
    """The scope that was in force last; it may have ended."""
    return _current


@functools.cache
def _leaf() -> Tensor:
    """Something the cache takes: a float32 leaf that requires grad. Called outside of modes."""
    return torch.ones(0, 0, dtype=torch.float32, device="cpu", requires_grad=True)


def _cast_into_cache() -> Tensor:
    """A cast that ATen's autocast cache owns. On the CPU, whatever device autocast is on for: the
    cache is one for all of them, and a flag of the CPU's is all that has to be set for it.

    Each scope has one, so that what already is as it must be is not set.
    """
    if torch.is_inference_mode_enabled() or in_dispatch_mode():
        with outside_of_modes(), torch.inference_mode(False):
            return _cast_into_cache()
    if in_function_mode():
        with outside_of_function_modes():
            return _cast_into_cache()
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return _cast_into_cache()
    if saved_tensor_hooks_are_on():  # one would be given another tensor than that in the cache
        with saved_tensor_hooks_off():
            return _cast_into_cache()
    on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    if on and dtype is torch.bfloat16:
        return _first_operand(torch.mm(_leaf(), _leaf()))
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    try:
        return _first_operand(torch.mm(_leaf(), _leaf()))
    finally:
        torch.set_autocast_enabled("cpu", on)
        torch.set_autocast_dtype("cpu", dtype)


def _first_operand(product: Tensor) -> Tensor:
    assert product.grad_fn is not None
    return product.grad_fn._saved_self  # type: ignore[attr-defined]
