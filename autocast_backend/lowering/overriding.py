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

from torch import fx

from .._torch.dynamo_graphs import is_higher_order_op
from .._torch.writes import hidden_writes
from ..policies.overrides import Override, Overrides, PolicyError
from ..regions import Placement, call_name, find_regions, is_region_node
from ..validation.compare import Failed, observe
from . import recipes
from .other_dtypes import treats_other_dtypes
from .passed_over import PassedOver
from .planning import Candidate, Overridden, touches_tensors
from .proving import follow, looks_mutating, treats, written_and_returned
from .recipes import Recipe


@dataclass
class Overrider:
    """Decides what the overrides make of the calls of one graph, asked in the order of the graph:
    whether autocast treats a call at all hangs on what the calls before it give.

    Attributes:
        other_dtypes: whether the graph is to run for other dtypes than it has values of, too.
        calls: filled with the calls that are overridden.
        passed_over: told of all calls.
        first: the first override that was followed.
    """

    overrides: Overrides
    validate: str
    other_dtypes: bool
    calls: dict[fx.Node, Overridden]
    passed_over: PassedOver
    first: Override | None = None
    _treated: dict[str, bool] = field(default_factory=dict)
    _treated_otherwise: dict[str, bool] = field(default_factory=dict)

    def forces(self, node: fx.Node, placement: Placement, refused: str | None) -> bool:
        """Whether an override decides about a call without a look at what autocast makes of it.
        (What a `torch.func` transform consists of may run once alone.)

        Args:
            refused: why the call cannot be lowered; None where it can.
        """
        override = self.overrides.of(node) if placement.state.enabled_devices else None
        return override is not None and (override.key == "op" or refused is not None)

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
        candidate = Candidate(node, 0, placement, grad, refused=refused)
        override = self._named(candidate, fake_mode)
        if placement.state.enabled_devices:
            self.passed_over.note(
                candidate, override, lambda: self._is_treated(candidate, fake_mode)
            )
        if override is None:
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
        self.calls[node] = Overridden(state, recipe, str(override))
        self.first = self.first or override
        return self.calls[node]

    def check_bodies(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        placement: Placement,
        grad: bool,
        fake_mode: Any,
    ) -> None:
        """Refuse overrides of calls in bodies that are not looked into, of a higher-order op in
        `module`, unless the op itself has the same.

        Raises:
            PolicyError: an override names a call in a body.
        """
        whole = self.overrides.of(node)
        for argument in node.all_input_nodes:
            name = str(argument.target) if argument.op == "get_attr" else ""
            if not isinstance(body := getattr(module, name, None), fx.GraphModule):
                continue
            placements = find_regions(body.graph, placement)
            for call in body.graph.nodes:
                if not call.op.startswith("call_") or is_region_node(call):
                    continue
                if is_higher_order_op(call.target):
                    self.check_bodies(body, call, placements[call], grad, fake_mode)
                    continue
                candidate = Candidate(call, 0, placements[call], grad)
                named = self._named(candidate, fake_mode)
                if named not in (None, whole):
                    raise PolicyError(
                        f"{named}: {call_name(call)} cannot be changed: it stands in a body of "
                        f"the higher-order op {node.target}, which is not looked into"
                    )

    def _named(self, c: Candidate, fake_mode: Any) -> Override | None:
        override = self.overrides.of(c.node) if c.placement.state.enabled_devices else None
        if override is None or _writes(c, fake_mode):
            return None
        named = self.forces(c.node, c.placement, c.refused) or self._is_treated(c, fake_mode)
        return override if named else None

    def _is_treated(self, c: Candidate, fake_mode: Any) -> bool:
        return treats(c, fake_mode, self.validate, self._treated) or (
            self.other_dtypes and treats_other_dtypes(c, fake_mode, self._treated_otherwise)
        )


def _writes(c: Candidate, fake_mode: Any) -> bool:
    """Whether a call writes to its arguments, as batch norm does to its running statistics: a cast
    of these would be written to in their place."""
    if looks_mutating(c.node) or hidden_writes(c.node):
        return True
    if c.refused is not None:  # a run would change more than arguments: a transform's level
        return False
    written, _ = written_and_returned(c.node, c.placement.state, fake_mode)
    return bool(written)


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
    _, returned = written_and_returned(c.node, c.placement.state, fake_mode)
    if returned:
        raise PolicyError(
            f"{override}: {call_name(c.node)} returns a view of its argument, which a cast would "
            "cut off from it; name the ops that compute something instead"
        )
