"""What becomes of the values of a lowered graph, counted while it runs op by op."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch.dispatch import is_transformed
from .._torch.tensors import is_plain_tensor
from ..graphs import names_of, recompile
from ..ops.casts import cast_with_stats
from ..ops.smart_casts import SMART_CASTS

_NARROW = (torch.float16, torch.bfloat16)
_COUNTED = (torch.float64, torch.float32, *_NARROW)
_PROMOTE = torch.ops.smart_autocast.promote.default


@dataclass
class CastCounts:
    """What a smart cast did to elements, in all calls: the sums of `CastStats`.

    Attributes:
        elements: how many were cast.
        amax: the largest magnitude before the cast, NaNs apart.
        overflows: how many finite elements became infinite.
        underflows: how many elements other than 0 became 0.
        nans: how many were NaN.
    """

    elements: int = 0
    amax: float = 0.0
    overflows: int = 0
    underflows: int = 0
    nans: int = 0

    def add(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Count what the cast of a tensor does."""
        amax, *counts = torch.stack(cast_with_stats(tensor, dtype)[1]).tolist()
        overflows, underflows, nans = map(int, counts)
        self.elements += tensor.numel()
        self.amax = max(self.amax, amax)
        self.overflows += overflows
        self.underflows += underflows
        self.nans += nans

    def __str__(self) -> str:
        lost = {"overflow": self.overflows, "underflow": self.underflows, "NaN": self.nans}
        told = [f"largest {self.amax:.4g}", *_told(lost, self.elements)]
        return ", ".join(told)


@dataclass
class ResultCounts:
    """Which elements of a call's results are not finite, in all calls.

    Attributes:
        elements: how many there are.
        infinite, nans: how many of them are.
    """

    elements: int = 0
    infinite: int = 0
    nans: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the elements of a result."""
        self.elements += tensor.numel()
        self.infinite += int(tensor.isinf().sum())
        self.nans += int(tensor.isnan().sum())

    def __bool__(self) -> bool:
        return bool(self.infinite or self.nans)

    def __str__(self) -> str:
        return ", ".join(_told({"infinite": self.infinite, "NaN": self.nans}, self.elements))


def _told(counts: dict[str, int], elements: int) -> list[str]:
    return [f"{n:,} of {elements:,} {what}" for what, n in counts.items() if n]


@dataclass
class GraphStats:
    """What a graph's calls counted while it ran; those that did not run counted nothing.

    Attributes:
        casts: by the name of the cast's result in the graph, those to float16 and bfloat16 of what
            is in another dtype.
        results: by the name of the call.
    """

    casts: dict[str, CastCounts] = field(default_factory=dict)
    results: dict[str, ResultCounts] = field(default_factory=dict)

    def count_in(self, module: fx.GraphModule) -> None:
        """Write calls into a lowered graph, and into its bodies, that count what it computes."""
        for node, name in names_of(module).items():
            if not node.op.startswith("call_"):
                continue
            source = source_of(node)
            with node.graph.inserting_after(node):
                if source is not None:
                    _call(node.graph, self._count_cast(name), (source, node))
                else:
                    _call(node.graph, self._count_results(name), (node,))
        recompile(module)

    def _count_cast(self, name: str) -> Callable[..., None]:
        def count_cast(source: Any, result: torch.Tensor) -> None:
            if (
                result.dtype in _NARROW
                and source.dtype is not result.dtype
                and _can_be_counted(source)
            ):
                with torch.no_grad():
                    self.casts.setdefault(name, CastCounts()).add(source, result.dtype)

        return count_cast

    def _count_results(self, name: str) -> Callable[..., None]:
        def count_results(results: Any) -> None:
            with torch.no_grad():
                for result in filter(_can_be_counted, pytree.tree_leaves(results)):
                    self.results.setdefault(name, ResultCounts()).add(result)

        return count_results


def _call(graph: fx.Graph, count: Callable[..., None], args: tuple[fx.Node, ...]) -> None:
    """Dynamo looks at what a graph calls in its backward, and would compile that, too."""
    reason = "counts what the program computes"
    graph.call_function(torch.compiler.disable(count, reason=reason), args)


def source_of(node: fx.Node) -> fx.Node | None:
    """What was cast, if a node is the result of a smart cast."""
    arguments: Any = node.args
    if is_item_of_promote(node):
        cast, position = arguments
        return cast.args[0][position]
    if node.target in SMART_CASTS and isinstance(arguments[0], fx.Node):
        return arguments[0]
    return None


def is_item_of_promote(node: Any) -> bool:
    """Whether a node takes one tensor out of what `promote` gives, a list."""
    return node.target is operator.getitem and node.args[0].target is _PROMOTE


def _can_be_counted(value: Any) -> bool:
    """Whether a value is a tensor with elements to look at."""
    return (
        isinstance(value, torch.Tensor)
        and is_plain_tensor(value)
        and value.dtype in _COUNTED
        and not value.is_meta
        and not is_transformed()
    )
