"""What an entry of the option `policies` seems to name and does not, as where a module does not
name the calls that autocast leaves alone: without a word of it, such an entry changes nothing and
nobody knows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..policies.overrides import Override, Overrides
from ..policies.paths import Name
from ..policies.table import Policy, op_name
from ..regions import call_name
from . import recipes
from .planning import Candidate, touches_tensors


class PassedOver:
    """Of one graph.

    Attributes:
        weights: `id` of the value of an input -> the names of the modules whose weight it is.
    """

    def __init__(self, overrides: Overrides) -> None:
        self.weights: dict[int, tuple[Name, ...]] = {}
        self._overrides = overrides
        self._followed: set[Override] = set()
        self._untreated: dict[Override, fx.Node] = {}
        self._outside: dict[Override, dict[Name, fx.Node]] = {}
        self._cast_back: dict[Override, fx.Node] = {}

    def note(self, c: Candidate, override: Override | None, treated: Callable[[], bool]) -> None:
        """Note one call inside a region.

        Args:
            override: the one that is followed.
            treated: whether autocast treats the call.
        """
        if override is not None:
            self._followed.add(override)
        of_call = self._overrides.of(c.node)
        left_alone = override is None and touches_tensors(c.node)
        if left_alone and of_call is not None and of_call.key == "module":
            self._untreated.setdefault(of_call, c.node)
            if _casts_back(c, of_call):
                self._cast_back.setdefault(of_call, c.node)
        read = (id(n.meta.get("example_value")) for n in recipes.tensor_arguments(c.node))
        for owners in filter(None, map(self.weights.get, read)):
            asked = {o: n for n in owners if (o := self._overrides.of_module(n)) is not None}
            if not asked or of_call in asked or self._overrides.names_around(c.node) & set(owners):
                continue
            if override is not None or treated():
                for other, owner in asked.items():
                    self._outside.setdefault(other, {}).setdefault(owner, c.node)

    def told(self) -> list[str]:
        """What entries pass over, in words, once the whole graph has been noted."""
        told = []
        for override, node in self._untreated.items():
            if override not in self._followed and not override.names_all:
                told.append(
                    f"{override} changes nothing in this graph: autocast treats none of the calls "
                    f"in what it names, such as {call_name(node)}, and a module names no others. "
                    "Name their ops"
                )
        for override, calls in self._outside.items():
            (owner, node), *more = calls.items()
            told.append(
                f"{override} names {'.'.join(owner)!r}, and not {call_name(node)}, which reads its "
                "weights and stands outside of it"
                + (f" (the same of {len(more)} more)" if more else "")
                + ". A module names what its own call does: call module(x), not module.forward(x), "
                "or name the module that reads them"
            )
        for override, node in self._cast_back.items():
            dtype = str(node.meta["example_value"].dtype)[6:]
            told.append(
                f"{override}: {call_name(node)}, in what it names, casts to {dtype}. If the code "
                "asks a tensor for that dtype, as in w.to(x.dtype), Dynamo did so before, and the "
                "graph has the answer"
            )
        return told


def _casts_back(c: Candidate, override: Override) -> bool:
    """Whether a call is a cast to the lower precision of the region, in a module that is asked for
    in another dtype."""
    if op_name(c.node) not in ("to", "type", "bfloat16", "half") or not c.node.all_input_nodes:
        return False  # the latter: a user's function may have such a name
    given, result = (n.meta.get("example_value") for n in (c.node.all_input_nodes[0], c.node))
    if not isinstance(given, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    lower = {d.dtype for d in c.placement.state.enabled_devices}
    other = override.off or override.policy is Policy.FP32 or override.dtype not in (None, *lower)
    return other and result.dtype in lower and given.dtype is not result.dtype
