"""Joint graphs: the forward and the backward of one region in one graph, traced under a given
autocast state of the backward pass, and the backward that can be taken out of it.

    joint, traced off                        joint, traced under cpu: bfloat16
    ------------------------------------     ------------------------------------------------
    t = t(weight)                            t = t(weight)
    y = addmm(bias, x, t)                    y = addmm(bias, x, t)
    -- backward ------------------------     -- backward ------------------------------------
    gx = mm(tangent, t(t))                   gx = mm(to_bf16(tangent), to_bf16(t(t)))
                                             gx = to_fp32(gx)      the engine casts it back

The forwards are the same, name by name, so the backward of any state can start from the values that
the forward which really ran has saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._torch.autocast import disable_autocast, enter_autocast, exit_autocast, has_autocast_kernel
from ._torch.dynamo import is_higher_order_op

Key = tuple[tuple[str, torch.dtype], ...]
"""A state of the backward pass, as far as one region can tell: (device type, dtype) of the device
types that are on, among those its tensors live on. Empty for "off"."""


def current_key(device_types: Sequence[str]) -> Key:
    """The state of the calling thread. Of the thread: the autograd engine's CUDA threads know which
    device types are on, but have dtypes of their own (PyTorch #132715), and eager's ops use those.
    """
    return tuple(
        (device_type, torch.get_autocast_dtype(device_type))
        for device_type in device_types
        if torch.is_autocast_enabled(device_type)
    )


def key_name(key: Key) -> str:
    """A state, for messages."""
    return ", ".join(f"{device}: {str(dtype)[6:]}" for device, dtype in key) or "off"


class BackwardError(RuntimeError):
    """A backward that eager autocast would compute in another way than the compiled one, and that
    cannot be compiled that way."""


class AutocastActsAboveOnly(TorchDispatchMode):
    """Switch autocast off below the ops it has acted on.

    Autocast's kernels come first in the dispatcher; then come modes like this one, then tracing
    with its decompositions. Eager runs a kernel there, on which autocast cannot act. Without this
    mode it would act on the ops of decompositions and of Python meta functions.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with disable_autocast():
            return func(*args, **(kwargs or {}))


def extract_backward(joint: fx.GraphModule, partitioned: fx.GraphModule) -> fx.GraphModule:
    """The backward of `joint` with the inputs of another backward of the same forward.

    What that one's forward saved is taken by name; other forward values are computed again from it.

    Args:
        joint: a joint graph, as AOTAutograd traces it: forward outputs, then gradients.
        partitioned: a backward graph of the same region, with whose forward this one must work.

    Raises:
        BackwardError: the backward needs a forward value that was not saved and cannot be computed
            again, or the two graphs do not belong together.
    """
    nodes = {node.name: node for node in joint.graph.nodes}
    gradients = _outputs(joint)[-len(_outputs(partitioned)) :]
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for placeholder in partitioned.graph.find_nodes(op="placeholder"):
        copy = graph.placeholder(placeholder.name)
        source = nodes.get(placeholder.name)
        if source is not None:
            values[source] = copy
        copy.meta = dict(placeholder.meta if source is None else source.meta)
    needed: set[fx.Node] = set()
    pending = [g for g in gradients if isinstance(g, fx.Node)]
    pending += [n for n in joint.graph.nodes if _in_backward(n) and _has_effect(n)]
    while pending:
        node = pending.pop()
        if node in values or node in needed:
            continue
        if node.op == "placeholder" or (_is_random(node) and not _in_backward(node)):
            raise BackwardError(f"the forward did not save {node.name}, which the backward reads")
        needed.add(node)
        pending += node.all_input_nodes
    for node in joint.graph.nodes:
        if node in needed:
            values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[g] if isinstance(g, fx.Node) else g for g in gradients))
    return fx.GraphModule(joint, graph)


def _outputs(module: fx.GraphModule) -> list[Any]:
    return pytree.arg_tree_leaves(module.graph.output_node().args[0])


def _in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and node.is_impure()


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


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
            str(fx.map_arg((node.args, node.kwargs), number)),
        )
        for node in module.graph.nodes
        if node.op not in ("placeholder",)
    ]


def _dtypes(node: fx.Node) -> Iterator[torch.dtype]:
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            yield leaf.dtype


_CASTS = ("_to_copy", "convert_element_type")


def differing_ops(assumed: Sequence[Call], found: Sequence[Call]) -> list[str]:
    """What differs between two backwards of one region, casts aside, for a message."""
    first, second = (
        [c for c in calls if not any(cast in str(c.target) for cast in _CASTS)]
        for calls in (assumed, found)
    )
    if [c.target for c in first] == [c.target for c in second]:
        pairs = zip(first, second, strict=True)
        return [f"{a} would be {b}" for a, b in pairs if a.reads != b.reads]
    return [f"{len(first)} ops would be {len(second)} others"]


@has_side_effect
def autocast_must_be(line: str, device_types: Sequence[str], key: Key) -> None:
    """Stands first in a backward that compiled autograd has copied: it keeps the copy for later
    calls, whatever the state is then, and runs this again where the state differs."""
    found = current_key(device_types)
    if found != key:
        raise BackwardError(
            f"compiled autograd captured the backward of {line} under autocast {key_name(key)} and "
            f"runs it under {key_name(found)}. Call backward() under one state, or without "
            "compiled autograd"
        )


def for_compiled_autograd(
    backward: fx.GraphModule, line: str, device_types: Sequence[str], key: Key
) -> fx.GraphModule:
    """A copy of the backward under `key` for compiled autograd, which runs its ops where autocast
    may be on: it checks that it is still the right one, then switches autocast off.

        autocast_must_be(line, device_types, key)
        enter = _enter_autocast("cpu", None, False, None)
        ...
        _exit_autocast(enter)
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(backward.graph, values)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        last = graph.call_function(autocast_must_be, (line, tuple(device_types), key))
    entered = []
    for device_type, _ in key:
        with graph.inserting_after(last):
            last = graph.call_function(enter_autocast, (device_type, None, False, None))
            entered.append(last)
    for enter in reversed(entered):
        graph.call_function(exit_autocast, (enter,))
    graph.output(result)
    return fx.GraphModule(backward, graph)


def autocast_can_change(backward: fx.GraphModule, device_types: Sequence[str]) -> bool:
    """Whether some autocast state could change this backward: whether it calls an op that autocast
    has a kernel for, before or after decomposition, or a higher-order op."""
    for node in backward.graph.nodes:
        for op in (node.target, node.meta.get("original_aten")):
            if is_higher_order_op(op):
                return True
            if isinstance(op, torch._ops.OpOverload) and has_autocast_kernel(op, device_types):
                return True
    return False
