"""Passes over the joint graph, of forward and backward, before the compiler partitions it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from .._torch.comparisons import is_pointwise
from .._torch.fake_tensors import is_known
from .._torch.joint_graphs import written_in_forward
from .._torch.partitioning import draws_itself, in_backward, is_recomputed, must_save
from .differences import autocast_acts_on


def give_zeros_memory(joint: fx.GraphModule) -> None:
    """Write zeros where forward-mode AD has left ATen's zero tensors, of which all that could be
    spared by them is spared by now. They have no memory: Inductor's kernels would read from address
    0, and products that write to an `out` raise."""
    aten = torch.ops.aten
    zeros = aten._efficientzerotensor.default
    for node in joint.graph.find_nodes(op="call_function", target=zeros):
        node.target, node.args = aten.full.default, (*node.args, 0)


def save_what_is_overwritten(joint: fx.GraphModule) -> None:
    """Have the partitioner save what the forward has read from an input that it writes later, or
    what is computed from that: computed again in the backward, it would come from what was written
    (PyTorch #197039).

        c = primals_2.to(bfloat16)       a partitioner may save primals_2 and cast it again
        y = h * c
        -- backward --
        gh = tangents_1 * c
        copy_(primals_2, primals_2 / 2)  belongs to the forward, or is done after it

    What a checkpoint computes again reads the written input in eager mode, too.
    """
    for written in written_in_forward(joint.graph):
        pending = [(written, user) for user in written.users]
        read_by: dict[fx.Node, list[fx.Node]] = {}
        while pending:
            read, node = pending.pop()
            if node.op == "output" or in_backward(node) or is_recomputed(node):
                continue
            if _is_view(node):
                pending += [(node, user) for user in node.users]
            else:
                read_by.setdefault(node, []).append(read)
        for node, reads in read_by.items():
            must_save(_copied(node) if _may_be_taken_away(node, reads) else node)


def _is_view(node: fx.Node) -> bool:
    """Whether what a node returns, or takes out of what another one returns, shares its memory."""
    if node.target is operator.getitem:
        return True
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _may_be_taken_away(node: fx.Node, reads: Sequence[fx.Node]) -> bool:
    """Whether Inductor might see that a call returns what it reads (`x.clone()`, `x ** 1`,
    `torch.cat(x.split(2))`, or a cast there and back), and have the backward read that."""
    made = node.meta.get("val")
    return (
        isinstance(made, torch.Tensor)
        and is_known(made.numel() == sum(read.meta["val"].numel() for read in reads))
        and _reaches_backward(node)
    )


def _reaches_backward(node: fx.Node) -> bool:
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if in_backward(user):
                return True
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return False


def _copied(node: fx.Node) -> fx.Node:
    """A copy of what a call returns, read in its place; Inductor takes away ATen's op for it."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.prims.clone.default, (node,))
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = dict(node.meta)
    return copy


def save_random_numbers(joint: fx.Graph) -> None:
    """Have the partitioner save what the forward draws, however little memory it may use: a
    backward that drew again would get other numbers (PyTorch #190758). Of Inductor, which computes
    them from a seed, that is the seed. A checkpoint that draws again does so from the same state.
    """
    for node in joint.nodes:
        if not in_backward(node) and not is_recomputed(node) and _draws(node):
            must_save(node)


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers: itself, by the op that it wraps, or in a body."""
    if draws_itself(node):
        return True
    read = [n for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [getattr(node.graph.owning_module, str(n.target), None) for n in read]
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    return any(_draws(inner) for graph in graphs for inner in graph.nodes)


def save_what_is_compared(joint: fx.Graph) -> None:
    """Have the partitioner save what the backward compares for equality, as eager mode does. It
    finds so which elements the largest are: computed again in another kernel, none may be equal to
    the largest one of the forward, and the gradient is zero or NaN (PyTorch #186799)."""
    seen: set[fx.Node] = set()
    for node in joint.find_nodes(op="call_function", target=torch.ops.aten.eq.Tensor):
        pending = node.all_input_nodes if in_backward(node) else []
        while pending:
            read = pending.pop()
            if read in seen:
                continue
            seen.add(read)
            if _is_view(read) or (in_backward(read) and is_pointwise(read)):
                pending += read.all_input_nodes
            elif read.op == "call_function" and not (in_backward(read) or is_recomputed(read)):
                must_save(read)


def keep_in_backward(joint: fx.GraphModule, device_types: Sequence[str]) -> bool:
    """Have the partitioner compute in the backward what another state would change in it. Says
    whether there is anything.

        p = primals_1 * 2
        -- backward --
        m = mm(p, p)               needs no tangent: a partitioner may compute it in the forward
        gx = mm(tangents_1, m)     and save m - float32, where a variant needs m in bfloat16

    What depends on a tangent is there anyway. What the backward makes of forward values for such an
    op is computed there as well: were a view of `primals_1` saved, there would be none of it in
    another dtype.
    """
    kept: set[fx.Node] = set()
    for node in reversed(joint.graph.nodes):
        if node.meta.get("partitioner_tag") == "is_backward" and (
            not kept.isdisjoint(node.users) or autocast_acts_on(node, device_types)
        ):
            node.meta["partitioner_tag"] = "must_be_in_backward"
            kept.add(node)
    return bool(kept)
