"""What an autocast state changes in a graph: whether it can, whether it does, and in words."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch.autocast import has_autocast_kernel
from .._torch.dynamo_graphs import is_higher_order_op
from .._torch.kernels import calls_others
from .._torch.modes import outside_of_modes
from .._torch.ops import OpOverload, is_dispatched
from .._torch.tensors import is_plain_tensor
from ..graphs import get_attribute


@dataclass(frozen=True)
class Call:
    """One op of a graph with the dtypes it reads and makes, and its arguments, where those that are
    results of other calls are numbers."""

    target: Any
    reads: tuple[torch.dtype, ...]
    makes: tuple[torch.dtype, ...]
    arguments: str

    def __str__(self) -> str:
        name = str(self.target).removesuffix(".default")
        return f"{name}({', '.join(str(d)[6:] for d in self.reads)})"


def calls_of(module: fx.GraphModule) -> list[Call]:
    """The calls of a graph in order: equal lists, equal computations."""
    numbers = {node: i for i, node in enumerate(module.graph.nodes)}

    def number(node: fx.Node) -> Any:
        return f"%{numbers[node]}"

    return [
        Call(
            node.target,
            tuple(d for n in node.all_input_nodes for d in _dtypes(n)),
            tuple(_dtypes(node)),
            str(fx.map_arg((node.args, node.kwargs), number)) + body_of(module, node),
        )
        for node in module.graph.nodes
        if node.op != "placeholder"
    ]


def body_of(module: fx.GraphModule, node: fx.Node) -> str:
    """The code of the graph that a `get_attr` node reads for a higher-order op, and of the graphs
    inside of it; or what is in the tensor that it reads, a constant; else nothing."""
    value = attribute(module, node) if node.op == "get_attr" else None
    if isinstance(value, torch.Tensor):
        return _contents(value) if is_plain_tensor(value) and value.layout is torch.strided else ""
    if not isinstance(value, fx.GraphModule):
        return ""
    return "".join(str(m.code) for m in value.modules() if isinstance(m, fx.GraphModule))


def _contents(constant: torch.Tensor) -> str:
    with outside_of_modes(), torch.no_grad():
        values = constant.detach().cpu().contiguous().flatten()
        digest = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{constant.dtype} {tuple(constant.shape)} {digest}"


def attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    """What a `get_attr` node reads."""
    return get_attribute(module, str(node.target))


def _dtypes(node: fx.Node) -> Iterator[torch.dtype]:
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            yield leaf.dtype


_CASTS = ("_to_copy", "convert_element_type")


def differing_ops(assumed: Sequence[Call], found: Sequence[Call]) -> list[str]:
    """What differs between two backwards of one region that do differ, for a message."""
    first, second = (
        [str(c) for c in calls if not any(cast in str(c.target) for cast in _CASTS)]
        for calls in (assumed, found)
    )
    changes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    told = [
        f"{', '.join(first[i:j]) or 'nothing'} would be {', '.join(second[k:m]) or 'left out'}"
        for change, i, j, k, m in changes
        if change != "equal"
    ]
    return told or ["the same ops would have other arguments or casts"]


def autocast_can_change(backward: fx.GraphModule, device_types: Sequence[str]) -> bool:
    """Whether some autocast state could change this backward, if all of it comes from PyTorch's own
    formulas (`is_plain`): those call no composite op that autocast has a kernel for, which would be
    gone from the graph."""
    return any(autocast_acts_on(node, device_types) for node in backward.graph.nodes)


def is_plain(forward: fx.GraphModule) -> bool:
    """Whether a Dynamo graph calls PyTorch's own ops alone: no `autograd.Function` or other
    higher-order op, no custom op; no code of others runs in its backward."""
    for module in forward.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            target = node.target
            if is_dispatched(target):
                plain = str(target).partition(".")[0] in ("aten", "prims", "smart_autocast")
            else:
                owner = (getattr(target, "__module__", None) or "torch").partition(".")[0]
                plain = owner in ("torch", "_operator", "operator", "builtins", "math")
            if node.op == "call_function" and (not plain or is_higher_order_op(target)):
                return False
    return True


def autocast_acts_on(node: fx.Node, device_types: Sequence[str]) -> bool:
    """Whether autocast has a kernel for the op that was called, before it was decomposed or after,
    or for one that its own kernel calls; or it is a higher-order op, whose body may call one."""
    for op in (node.meta.get("original_aten"), node.target):
        if isinstance(op, OpOverload):
            if has_autocast_kernel(op, device_types) or calls_others(op, device_types):
                return True
        elif is_higher_order_op(op):
            return True
    return False
