"""What an override of the option `policies` makes of one call.

    "aten::softmax": "fp32"                     y = softmax(x)  ->  y = softmax(to_fp32(x))
    "lm_head": "off"                            y = linear(x, w), with no cast
    "blocks.*": {"dtype": torch.float16}        under torch.autocast(dtype=torch.float16)

Eager autocast is no judge of a call that is told to do something else. Of a call with another
*policy* the casts are known; what is checked is that it runs with them, and that a result is not
cut off from the tensor it was a view of. A call that is "off" or has another *dtype* is one that
real autocast would make in another state, and that is still the judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..policies.overrides import Override, Overrides, PolicyError
from ..regions import Placement, source_line
from ..validation.compare import Failed, observe
from . import recipes
from .planning import Candidate, Overridden, touches_tensors
from .proving import follow, looks_mutating, treats
from .recipes import Recipe


@dataclass
class Overrider:
    """Decides what the overrides make of the calls of one graph, asked in the order of the graph:
    whether autocast treats a call at all hangs on what the calls before it give.

    Attributes:
        calls: filled with the calls that are overridden.
        first: the first override that was followed.
    """

    overrides: Overrides
    validate: str
    calls: dict[fx.Node, Overridden]
    first: Override | None = None
    _treated: dict[str, bool] = field(default_factory=dict)

    def forces(self, node: fx.Node) -> bool:
        """Whether a call gets another policy whatever autocast does to it."""
        override = self.overrides.of(node)
        return override is not None and override.key == "op" and override.policy is not None

    def decide(
        self, node: fx.Node, placement: Placement, grad: bool, fake_mode: Any, refused: str | None
    ) -> Overridden | None:
        """What becomes of a call; None where no override names it.

        An op that is named is overridden at each call. A module names the calls inside that
        autocast treats: the others follow the dtypes they get, as they do in eager. Neither names
        what stands outside of all regions, and calls that write to their arguments.

        Args:
            refused: why the call cannot be lowered; None where it can.

        Raises:
            PolicyError: the call cannot be made as the override asks.
        """
        override = self.overrides.of(node) if placement.state.enabled_devices else None
        if override is None or looks_mutating(node):
            return None
        candidate = Candidate(node, 0, placement, grad, refused=refused)
        if not self.forces(node) and not treats(candidate, fake_mode, self.validate, self._treated):
            return None
        state = override.state(placement.state)
        recipe = None
        if override.policy is not None:
            if refused is not None and not touches_tensors(node):
                return None
            if refused is not None:
                raise PolicyError(f"{override}: {call_name(node)} cannot be changed: {refused}")
            recipe = recipes.build(node, state, override.policy) or Recipe()
            _check(override, candidate, recipe, fake_mode)
        elif override.off and refused is None:
            _check_off(override, candidate)
        self.calls[node] = Overridden(state, recipe)
        self.first = self.first or override
        return self.calls[node]


def _check_off(override: Override, c: Candidate) -> None:
    """Fake tensors do not tell that a matrix product refuses to mix dtypes."""
    wanted = recipes.build(c.node, c.placement.state)
    lower = [i for i, cast in wanted.casts if cast.op is not recipes.FULL] if wanted else []
    arguments = [n.meta["example_value"] for n in recipes.tensor_arguments(c.node)]
    if len(dtypes := {arguments[i].dtype for i in lower}) > 1:
        got = " and ".join(sorted(str(dtype)[6:] for dtype in dtypes))
        raise PolicyError(
            f"{override}: {call_name(c.node)} gets {got}, which it does not take without casts; "
            'name a policy that casts, such as "fp32"'
        )


def _check(override: Override, c: Candidate, recipe: Recipe, fake_mode: Any) -> None:
    seen = observe(lambda: follow(c.node, recipe), None, fake_mode, c.grad)
    if isinstance(seen, Failed):
        raise PolicyError(
            f"{override}: with its casts and without autocast, {call_name(c.node)} raises "
            f"{seen.message}; leave this call out, or name a policy that it takes"
        )
    if not recipe:
        return
    given: list[torch.Tensor] = []

    def result() -> Any:
        value = follow(c.node, Recipe())
        arguments = [n.meta.get("example_value") for n in recipes.tensor_arguments(c.node)]
        results = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        given.extend(t for t in results if any(_is_alias(t, a) for a in arguments))
        return value

    observe(result, c.placement.state, fake_mode, c.grad)
    if given:
        raise PolicyError(
            f"{override}: {call_name(c.node)} returns a view of its argument, which a cast would "
            "cut off from it; name the ops that compute something instead"
        )


def _is_alias(result: torch.Tensor, argument: Any) -> bool:
    if not isinstance(argument, torch.Tensor):
        return False
    bases = [argument] + ([argument._base] if argument._base is not None else [])
    return result is argument or any(result._base is base for base in bases)


def call_name(node: fx.Node) -> str:
    """What a node calls, and where, for messages."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    line = source_line(node)
    return f"the call of {name}" + (f" ({line})" if line else "")
