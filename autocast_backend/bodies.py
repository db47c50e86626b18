"""Higher-order ops whose body runs once, where its node stands: they are lowered like inlined
code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class InPlace:
    """How a higher-order op calls its body, which is its first argument.

    Attributes:
        first_operand: which argument of the op is the body's first input.
        records_grad: whether autograd records inside.
        result: the op's value, from what the body returns.
        shares: whether the body may be given another operand.
    """

    first_operand: int
    records_grad: bool
    result: Callable[[Any], Any]
    shares: bool = False


IN_PLACE = {
    "tag_activation_checkpoint": InPlace(1, True, lambda returned: returned, shares=True),
    # (forward body, backward body, *operands). The forward body returns (outputs, saved tensors)
    # and runs as `torch.autograd.Function.forward` does. The backward body is left alone: it runs
    # later, under the state of the backward pass.
    "autograd_function_apply": InPlace(2, False, lambda returned: returned[0]),
}


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
        node reads, maybe under another state."""
        call = IN_PLACE.get(str(node.target)) if node.op == "call_function" else None
        if call is None:
            return None
        attribute = node.args[0]
        if not isinstance(attribute, fx.Node) or attribute.op != "get_attr":
            return None
        if self._readers[attribute.target] > 1 or len(attribute.users) > 1:
            return None
        body = getattr(self._module, str(attribute.target))
        return Body(body, call) if isinstance(body, fx.GraphModule) else None
