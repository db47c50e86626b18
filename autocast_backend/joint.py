"""Joint graphs: the forward and the backward of one region in one graph, traced under a given
autocast state of the backward pass, and the backward that can be taken out of it.

    joint, traced off                        joint, traced under cpu: bfloat16
    ------------------------------------     ------------------------------------------------
    t = t(weight)                            t = t(weight)
    y = addmm(bias, x, t)                    y = addmm(bias, x, t)
    -- backward ------------------------     -- backward ------------------------------------
    gx = mm(tangent, t(t))                   gx = mm(to_bf16(tangent), to_bf16(t(t)))
                                             gx = to_fp32(gx)      the engine casts it back

The forwards are the same, so the backward of any state can start from the values that the forward
which really ran has saved.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from ._torch.aot import JointGraph
from ._torch.autocast import enter_autocast, exit_autocast, has_autocast_kernel
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


class Numbering:
    """Numbers for the values of several joint graphs of one region: two nodes have one number if
    they compute the same from the same inputs. Names do not tell: what a partitioner saves may come
    from the backward half of the graph, where another state shifts the names."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def of(self, module: fx.GraphModule) -> dict[fx.Node, int]:
        """The number of every node of `module`."""
        numbers: dict[fx.Node, int] = {}
        for node in module.graph.nodes:
            identity: Any = node.name if node.op == "placeholder" or _is_unlike_others(node) else ""
            if node.op == "get_attr":
                value = getattr(module, str(node.target), None)
                identity = value.code if isinstance(value, fx.GraphModule) else node.target
            arguments = str(
                fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
                if node.op != "output"
                else ""
            )
            target = "" if node.op in ("placeholder", "get_attr") else node.target
            key = (node.op, target, identity, arguments)
            numbers[node] = self._numbers.setdefault(key, len(self._numbers))
        return numbers


def extract_backward(
    joint: JointGraph, partitioned: fx.GraphModule, reference: JointGraph
) -> fx.GraphModule:
    """The backward of `joint` with the inputs of another backward of the same forward.

    What that one's forward has saved is used; other forward values are computed again from it.

    Args:
        joint: traced under the state of the backward that is wanted.
        partitioned: a backward graph of the same region, with whose forward this one must work.
        reference: the joint graph it was partitioned from, which tells what its inputs are.

    Raises:
        BackwardError: the backward needs a forward value that was not saved and cannot be computed
            again.
    """
    numbering = Numbering()
    names = {node.name: node for node in reference.graph_module.graph.nodes}
    known = numbering.of(reference.graph_module)
    graph = fx.Graph()
    saved: dict[int, fx.Node] = {}
    for placeholder in partitioned.graph.find_nodes(op="placeholder"):
        copy = graph.placeholder(placeholder.name)
        source = names.get(placeholder.name)
        if source is not None:
            _check_same(placeholder, source)
            saved[known[source]] = copy
        copy.meta = dict(placeholder.meta if source is None else source.meta)
    module = joint.graph_module
    values = {n: saved[i] for n, i in numbering.of(module).items() if i in saved}
    outputs = pytree.arg_tree_leaves(*module.graph.output_node().args)
    gradients = outputs[joint.num_forward_outputs :]
    for node in _needed(module, gradients, values):
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[g] if isinstance(g, fx.Node) else g for g in gradients))
    return fx.GraphModule(module, graph)


def _check_same(placeholder: fx.Node, source: fx.Node) -> None:
    """Names are given in the order of tracing, which is the same every time. Should it not be, the
    value is likely to be another kind of value."""
    was, now = placeholder.meta.get("val"), source.meta.get("val")
    if isinstance(was, torch.Tensor) and (
        not isinstance(now, torch.Tensor) or (was.dtype, was.ndim) != (now.dtype, now.ndim)
    ):
        raise BackwardError(f"what the forward saved as {placeholder.name} is not there any more")


def _needed(
    module: fx.GraphModule, gradients: Sequence[Any], values: Mapping[fx.Node, fx.Node]
) -> list[fx.Node]:
    """What must be computed for `gradients` besides `values`, in order."""
    pending = [g for g in gradients if isinstance(g, fx.Node)]
    pending += [n for n in module.graph.nodes if _in_backward(n) and _has_effect(n)]
    needed: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in values or node in needed:
            continue
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "placeholder" or (random and not _in_backward(node)):
            raise BackwardError(f"the forward did not save {node.name}, which the backward reads")
        needed.add(node)
        pending += node.all_input_nodes
    return [node for node in module.graph.nodes if node in needed]


def _is_unlike_others(node: fx.Node) -> bool:
    """Whether two such nodes with the same arguments do not compute the same."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return random or _has_effect(node)


def _in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and node.is_impure()


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
        if node.op != "placeholder"
    ]


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
    """Whether some autocast state could change this backward, if all of it comes from PyTorch's own
    formulas (`is_plain`): those call no composite op that autocast has a kernel for, which would be
    gone from the graph."""
    return any(_autocast_acts_on(node, device_types) for node in backward.graph.nodes)


def is_plain(forward: fx.GraphModule) -> bool:
    """Whether a Dynamo graph calls PyTorch's own ops alone: no `autograd.Function` or other
    higher-order op, no custom op; no code of others runs in its backward."""
    for module in forward.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            target = node.target
            if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                plain = str(target).partition(".")[0] in ("aten", "prims", "smart_autocast")
            else:
                owner = (getattr(target, "__module__", None) or "torch").partition(".")[0]
                plain = owner in ("torch", "_operator", "operator", "builtins", "math")
            if node.op == "call_function" and (not plain or is_higher_order_op(target)):
                return False
    return True


def _autocast_acts_on(node: fx.Node, device_types: Sequence[str]) -> bool:
    """Whether autocast has a kernel for the op that was called, before it was decomposed, or it is
    a higher-order op, whose body may call one."""
    op = node.meta.get("original_aten") or node.target
    if isinstance(op, torch._ops.OpOverload):
        return has_autocast_kernel(op, device_types)
    return is_higher_order_op(op)


def keep_in_backward(joint: fx.GraphModule, device_types: Sequence[str]) -> None:
    """Have the partitioner compute in the backward what another state would change in it.

    p = primals_1 * 2
    -- backward --
    m = mm(p, p)                  needs no tangent: a partitioner may compute it in the forward
    gx = mm(tangents_1, m)        and save m - float32, where a variant needs m in bfloat16
    """
    for node in joint.graph.nodes:
        if node.meta.get("partitioner_tag") == "is_backward" and _autocast_acts_on(
            node, device_types
        ):
            node.meta["partitioner_tag"] = "must_be_in_backward"
