"""Higher-order ops whose bodies are lowered: those that run their body once, where their node
stands, like inlined code; and those that run bodies some number of times, where there are no
gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from .._torch.dynamo_graphs import GradMode, inference_mode_as_no_grad


@dataclass(frozen=True)
class InPlace:
    """How a higher-order op calls its body.

    Attributes:
        first_operand: which argument of the op is the body's first input.
        records_grad: whether autograd records inside, if it does around; None: whatever is around,
            the op's first argument decides.
        takes_more: whether the body may be given another operand.
        body: which argument of the op is the body.
        again: whether several nodes may call one body.
        retraced: whether PyTorch traces its backward from the body, run anew on leaves of its own.
        result: the op's value, from what the body returns.
    """

    first_operand: int
    records_grad: bool | None
    takes_more: bool = False
    body: int = 0
    again: bool = False
    retraced: bool = False
    result: Callable[[Any], Any] = lambda returned: returned

    def grad_mode(self, node: fx.Node, around: bool) -> bool:
        """Whether autograd records in the body that `node` calls."""
        return bool(node.args[0]) if self.records_grad is None else around and self.records_grad

    def shares(self, node: fx.Node) -> bool:
        """Whether the body that `node` calls may read the weight casts of its surroundings. That of
        a reentrant checkpoint may not: it casts again, in a backward of its own."""
        return self.takes_more and not node.kwargs.get("use_reentrant", False)


IN_PLACE = {
    "tag_activation_checkpoint": InPlace(1, True, takes_more=True),
    # (forward body, backward body, *operands). The forward body returns (outputs, saved tensors)
    # and runs as `torch.autograd.Function.forward` does. The backward body is left alone: it runs
    # later, under the state of the backward pass.
    "autograd_function_apply": InPlace(2, False, result=lambda returned: returned[0]),
    # (body, name, *operands): `torch.compiler.nested_compile_region`, called as often as the code
    # calls it.
    "invoke_subgraph": InPlace(2, True, takes_more=True, again=True),
    # (grad mode, body, *operands): how `torch.export` writes `torch.no_grad()`.
    "wrap_with_set_grad_enabled": InPlace(2, None, body=1),
    # (body, *operands). The gradients of the first two are those of the body, traced once more:
    # without autocast, had it no casts of its own.
    "foreach_map": InPlace(1, True, takes_more=True, retraced=True),
    "invoke_quant_packed": InPlace(1, True, takes_more=True, retraced=True),
    "wrap": InPlace(1, True, takes_more=True),
}


APART = {
    "cond": (1, 2),
    "map_impl": (0,),
    "scan": (0,),
    "while_loop": (0, 1),
}
"""Ops that compute the gradients of their bodies by themselves, under the autocast of the forward:
which arguments are bodies. Without gradients they only call them."""

STALE = "smart_autocast_stale"
"""In the `meta` of such an op whose bodies' example values are not those it runs with."""


@dataclass(frozen=True)
class Body:
    """One body, and how its node calls it."""

    module: fx.GraphModule
    call: InPlace


class Bodies:
    """Finds the bodies of one graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._readers = Counter(n.target for n in module.graph.nodes if n.op == "get_attr")

    def of(self, node: fx.Node) -> Body | None:
        """The body that `node` runs in place; None for other nodes, and for a body that a second
        node reads, maybe under another state, unless the op is made for that."""
        call = IN_PLACE.get(str(node.target)) if node.op == "call_function" else None
        if call is None:
            return None
        body = self._graph_at(node.args[call.body], call.again)
        return None if body is None else Body(body, call)

    def operands(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """What the inputs of the body that `node` runs in place are around it."""
        body = self.of(node)
        if body is None:
            return {}
        inputs = body.module.graph.find_nodes(op="placeholder")
        operands = node.args[body.call.first_operand :]
        return {i: o for i, o in zip(inputs, operands, strict=False) if isinstance(o, fx.Node)}

    def apart(self, node: fx.Node, grad: bool) -> list[fx.GraphModule]:
        """The bodies that `node` only calls, in the state where it stands; none where `grad` is on
        and it may have gradients to compute, or where nothing is known of their values."""
        places = APART.get(str(node.target), ()) if node.op == "call_function" else ()
        values = (n.meta.get("example_value") for n in node.all_input_nodes)
        if (grad and any(getattr(v, "requires_grad", False) for v in values)) or STALE in node.meta:
            return []
        found = [self._graph_at(node.args[place]) for place in places]
        return [body for body in found if body is not None] if all(found) else []

    def _graph_at(self, attribute: Any, again: bool = False) -> fx.GraphModule | None:
        """The body that an argument fetches, if no other node does."""
        if not isinstance(attribute, fx.Node) or attribute.op != "get_attr":
            return None
        if not again and (self._readers[attribute.target] > 1 or len(attribute.users) > 1):
            return None
        body = getattr(self._module, str(attribute.target))
        return body if isinstance(body, fx.GraphModule) else None


def inference_modes_as_no_grad(module: fx.GraphModule, grad: bool) -> None:
    """`inference_mode_as_no_grad` of a graph, and of the bodies that it runs in place."""
    bodies, mode = Bodies(module), GradMode(grad)
    for node in module.graph.nodes:
        mode.follow(node)
        if (body := bodies.of(node)) is not None:
            inference_modes_as_no_grad(body.module, body.call.grad_mode(node, mode.grad))
    inference_mode_as_no_grad(module, grad)
