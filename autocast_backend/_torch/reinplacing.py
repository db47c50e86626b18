"""Inductor's pass that has ops write to what they are given, where nobody would see it.

A graph as AOTAutograd traces it writes to its inputs at its end alone. Before the pass, Inductor
takes away what only copies. The pass then asks who reads later what an op would write to. It asks
neither what the op itself reads beside it, nor whether what the op returns is read after something
else has been copied to the input:

    x[1:] = x[:-1].clone()          slice_scatter(x, x[:-1]) writes to x what it reads there
    x[1] = 5; y = x.clone()         y is select_scatter(x, 5), in the memory of x,
    x.mul_(2); return y             to which x * 2 is copied

    x.index_add_(0, i, y)           writes to x, and of what is divided, each element may be written
    x.div_(x.sum(0))                before the others have been added up

    _foreach_copy_([x, y],          writes to x and y in one kernel, which reads them there
                   [y.clone(), x.clone()])

PyTorch #197829, #198094, #198270 and #198033.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .flags import inductor_right

_COPY_BACK = torch.ops.aten.copy_.default
_KEPT_CLONE = torch.ops.prims.clone.default
"""Inductor takes none of these away."""


@functools.cache
def register() -> None:
    """Have Inductor's ops write to what they are given only where that changes no number."""
    from torch._inductor.fx_passes import post_grad, reinplace

    reinplace_all, remove_noops = (
        reinplace.reinplace_inplaceable_ops_core,
        post_grad.remove_noop_ops,
    )

    def reinplace_inplaceable_ops_core(graph: fx.Graph) -> None:
        if inductor_right.on:
            _read_before_written(graph)
            _give_copies(graph)
            _give_copies_to_lists(graph)
        reinplace_all(graph)

    def remove_noop_ops(graph: fx.Graph) -> None:
        clones = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        for clone in clones if inductor_right.on else ():
            if _is_apart(clone):
                clone.target = _KEPT_CLONE
        remove_noops(graph)

    reinplace.reinplace_inplaceable_ops_core = reinplace_inplaceable_ops_core
    post_grad.remove_noop_ops = remove_noop_ops


def _is_apart(clone: fx.Node) -> bool:
    """Whether a clone is returned, and made of what an op has written to, or given to a custom op
    that is given that, too."""
    source: Any = clone.args[0]
    for user in clone.users:
        if user.op == "output" and _is_written(_base(source)):
            return True
        beside = user.all_input_nodes if _is_wrapped(user) else []
        if any(_memory(other) == _memory(source) for other in beside if other is not clone):
            return True
    return False


def _is_written(node: fx.Node) -> bool:
    """Whether a value may come to be in the memory of what an op was given."""
    from torch._inductor.fx_passes import reinplace

    ops = (*reinplace.inplaceable_ops, *reinplace._SCATTER_OP_TO_VIEW)
    of_several: Any = node.args[0] if node.target is operator.getitem else None
    return node.target in ops or (of_several is not None and _is_wrapped(of_several))


def _read_before_written(graph: fx.Graph) -> None:
    """Copy what is written to an input while it is still there.

    dst[:] = src; src.add_(1)       copy_(src, src + 1) may stand before copy_(dst, src)
    """
    overwritten = set()
    for copy_back in graph.find_nodes(op="call_function", target=_COPY_BACK):
        target, source = copy_back.args[:2]
        if isinstance(source, fx.Node) and _memory(source) in overwritten:
            with graph.inserting_after(source):
                copy_back.update_arg(1, _copy(source))
        overwritten.add(_memory(target))


def _give_copies(graph: fx.Graph) -> None:
    """Give copies to the ops that must not write to what they were given."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    copied_back: dict[Any, fx.Node] = {}
    for copy_back in graph.find_nodes(op="call_function", target=_COPY_BACK):
        if isinstance(copy_back.args[1], fx.Node):
            copied_back.setdefault(_memory(copy_back.args[0]), copy_back)
    # By memory: the first copy to the input that what is in it may live in.
    in_inputs = dict(copied_back)
    for node in list(graph.nodes):
        for written, result in _writes(node):
            copy_back = in_inputs.get(_memory(written))
            if _reads_beside(node, written) or _overlaps_itself(written):
                _give_copy(node, written)
            elif copy_back is None or result is None:
                continue
            elif result in _copied_in_the_end(copy_back) and not _is_read_late(
                result, copy_back, order
            ):
                in_inputs[_memory(result)] = copy_back
            else:
                _give_copy(node, written)


def _give_copies_to_lists(graph: fx.Graph) -> None:
    """Give a copy to each op of lists that reads, beside what it would write to, something that is
    computed of that: it writes to nothing then."""
    from torch._inductor.fx_passes import reinplace

    for node in list(graph.nodes):
        if node.target in reinplace.inplaceable_foreach_ops:
            written: Any = node.args[0]
            read = [a for a in pytree.tree_leaves(node.args[1:]) if isinstance(a, fx.Node)]
            in_memory = set(map(_memory, written))
            if any(_memory(a) in in_memory for a in _computed_of(read)):
                with graph.inserting_before(node):
                    node.update_arg(0, [_copy(a) for a in written])


def _computed_of(nodes: list[fx.Node]) -> Iterable[fx.Node]:
    """Values, and all that they are computed of."""
    seen = set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes.extend(node.all_input_nodes)
            yield node


def _writes(node: fx.Node) -> list[tuple[fx.Node, fx.Node | None]]:
    """What a call may come to write to, and who stands for that afterwards. Collectives return what
    is not there before it has been waited for; they are left alone."""
    from torch._inductor.fx_passes import reinplace

    if getattr(node.target, "namespace", "") == "_c10d_functional":
        return []
    if node.target in reinplace.inplaceable_ops:
        given = [node.args[i] for i in reinplace.inplaceable_ops[node.target].mutated_args]
        return [(a, node) for a in given if isinstance(a, fx.Node)]
    if not _is_wrapped(node):
        return []
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    pairs = zip(*_given_to_write(node), strict=True)
    return [(a, results.get(key)) for a, key in pairs if isinstance(a, fx.Node)]


def _is_wrapped(node: fx.Node) -> bool:
    """Whether a call is that of a custom op, or of a Triton kernel, that writes."""
    ops = torch.ops.higher_order
    return node.target in (
        ops.auto_functionalized,
        ops.auto_functionalized_v2,
        ops.triton_kernel_wrapper_functional,
    )


def _given_to_write(node: fx.Node) -> tuple[list[Any], list[Any]]:
    """What such a call is given to write to, and by what each is taken out of what it returns."""
    if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional:
        names: Any = node.kwargs["tensors_to_clone"]
        arguments: Any = node.kwargs["kwargs"]
        return [arguments[name] for name in names], list(names)
    op: Any = node.args[0]
    given: Any = node.kwargs.get("_all_bases")
    if given is None:
        from torch._higher_order_ops.auto_functionalize import get_mutable_args

        given = [node.kwargs[name] for name in get_mutable_args(op)[0]]
    first = max(1, len(op._schema.returns))
    return list(given), list(range(first, first + len(given)))


def _reads_beside(node: fx.Node, written: fx.Node) -> bool:
    """Whether an op of ATen's reads beside it what shares memory with what it would write to. (A
    custom op may do so in eager mode.)"""
    if _is_wrapped(node):
        return False
    others = pytree.tree_leaves((node.args[1:], node.kwargs))
    return any(isinstance(a, fx.Node) and _memory(a) == _memory(written) for a in others)


def _overlaps_itself(node: fx.Node) -> bool:
    """Whether elements share memory, as those of `x.expand(4, -1)` (PyTorch #183986)."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and torch._debug_has_internal_overlap(value) == 1


def _copied_in_the_end(copy_back: fx.Node) -> list[fx.Node]:
    """What is copied to an input, and what that is written over. Only so does Inductor write to the
    input in the order of the graph: of something else, computed of what an op wrote to the input,
    it may write one element before another one is read (PyTorch #198270)."""
    from torch._inductor.fx_passes import reinplace

    values: list[fx.Node] = []
    value: Any = copy_back.args[1]
    while value is not None:
        values.append(_base(value))
        call: Any = values[-1]
        if call.target is operator.getitem:
            call = call.args[0]
        over = {result: written for written, result in _writes(call)}
        is_sure = call.target is not reinplace._generalized_scatter
        value = over.get(values[-1]) if is_sure else None
    return values


def _is_read_late(result: fx.Node, copy_back: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a value is read after another one has been copied to the input that it may be in."""
    if result is _base(copy_back.args[1]):  # type: ignore[arg-type]
        return False
    return any(order[reader] > order[copy_back] for reader in readers(result))


def readers(node: fx.Node) -> Iterable[fx.Node]:
    """Who reads a value, or a view of it."""
    for user in node.users:
        yield from readers(user) if _is_view(user) else (user,)


def _base(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: fx.Node) -> bool:
    from torch.fx.passes.reinplace import _is_view_op

    return bool(_is_view_op(node.target)) and isinstance(node.args[0], fx.Node)


def _memory(node: Any) -> Any:
    """What is equal for values that share memory."""
    from torch._inductor.fx_utils import get_node_storage

    memory = get_node_storage(node) if isinstance(node, fx.Node) else None
    return node if memory is None else memory


def _give_copy(node: fx.Node, written: fx.Node) -> None:
    with node.graph.inserting_before(node):
        copy = _copy(written)
    if _is_wrapped(node):
        node.replace_input_with(written, copy)
    else:
        node.update_arg(0, copy)


def _copy(node: fx.Node) -> fx.Node:
    copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    value = node.meta["val"]
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    return copy
