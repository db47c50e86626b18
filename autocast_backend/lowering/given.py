"""Casts that a call finds inside, where it reads a weight both as it is and as autocast casts it.

    y = hidden(x, w)      y = hidden([w], [w_cast], x, w)

The call stays in a bracket. Eager autocast keeps one cast of the weight, for this call and all
others; AOTAutograd's stand-ins for weights are no leaves, so its cache keeps none of theirs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..policies.table import COMPOSITES, Policy, find_policy, name_of

_NAME = "_smart_autocast_finding_casts"
"""Of the attribute of a function that holds what `finding_casts` made of it, and dies with it."""


def finding_casts(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with two more arguments in front: weights, and their casts; the same one each
    time.

    An autocast op that the function calls with one of the weights gets the cast. Composites, of
    Python or C++, are not looked into: whether this was enough must be proved.
    """
    if not isinstance(function, types.FunctionType):  # not all others take attributes
        return _finding_casts_of_others(function)
    made: Any = getattr(function, _NAME, None)
    if made is None or made.__wrapped__ is not function:  # `functools.wraps` copies attributes
        made = _finding_casts(function)
        setattr(function, _NAME, made)
    return made


def _finding_casts(function: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(function)
    def call(
        weights: Sequence[torch.Tensor], casts: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        with _Finding(weights, casts):
            return function(*args, **kwargs)

    return call


_finding_casts_of_others = functools.cache(_finding_casts)


class _Finding(TorchFunctionMode):
    def __init__(self, weights: Sequence[torch.Tensor], casts: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._weights = weights  # kept alive: their casts are found by `id`
        self._casts = dict(zip(map(id, weights), casts, strict=True))
        self._cache_is_off = not torch.is_autocast_cache_enabled()  # so while the call is proved

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def found(value: Any) -> Any:
            cast = self._casts.get(id(value))
            return value if cast is None or not self._is_kept(function, cast) else cast

        return function(*pytree.tree_map(found, args), **pytree.tree_map(found, kwargs or {}))

    def _is_kept(self, function: Any, cast: torch.Tensor) -> bool:
        """Whether autocast, as it is now, makes such a cast for a call, and keeps it."""
        device_type, name = cast.device.type, name_of(function)
        return (
            torch.is_autocast_enabled(device_type)
            and (self._cache_is_off or torch.is_autocast_cache_enabled())
            and torch.get_autocast_dtype(device_type) is cast.dtype
            and find_policy(name, device_type) is Policy.LOWER_PRECISION_FP
            and name not in COMPOSITES.get(device_type, {})  # they may cast a view of the weight
        )
