"""Saved-tensor hooks that AOTAutograd writes into the graphs it has partitioned.

It does so with hooks that are graph modules. A backward then reads `x_hook_0`, ... where it read
`x`, and `x` is what unpacking makes of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .patches import replaced

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

# Neither in `meta`, which is emptied before AOTAutograd's cache writes a graph to disk, nor a child
# module, of which reading it keeps those that the graph calls.
_UNPACKING = "_smart_autocast_unpacking"


def saved_tensor_hooks_are_on() -> bool:
    """Whether a saved tensor would be given to a hook; asking is far cheaper than switching off."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def saved_tensor_hooks_off() -> Iterator[None]:
    """Have no saved-tensor hook called, as while AOTAutograd traces. There is one around everything
    that a non-reentrant checkpoint runs, which counts the tensors that are saved."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def inlined_hooks() -> Hooks | None:
    """The saved-tensor hooks (pack, unpack) now in force, if AOTAutograd will inline them."""
    from torch._functorch._aot_autograd.utils import (
        saved_tensors_hooks_are_inlineable,
        top_saved_tensors_hooks,
    )

    hooks = top_saved_tensors_hooks()
    return tuple(hooks) if saved_tensors_hooks_are_inlineable(hooks) else None


@dataclass(frozen=True)
class Unpacking:
    """How a partitioned backward unpacks what inlined hooks have packed.

    Attributes:
        module: its placeholders are some of the backward's, by name.
        results: its values, by the names of what was packed; None for one that is not read.
    """

    module: fx.GraphModule
    results: Mapping[str, fx.Node | None]


def unpacking_of(backward: fx.GraphModule) -> Unpacking | None:
    """What `unpacking_noted` has noted; None where nothing was packed."""
    module = getattr(backward, _UNPACKING, None)
    if module is None:
        return None
    return Unpacking(module, module.graph.output_node().args[0])


@contextlib.contextmanager
def unpacking_noted() -> Iterator[None]:
    """Have every backward graph that is partitioned meanwhile keep how it unpacks, also on disk."""
    from torch._functorch._aot_autograd import graph_compile

    original = graph_compile.maybe_inline_graph_saved_tensors_hooks

    def inline(forward: fx.GraphModule, backward: fx.GraphModule, *args: Any) -> None:
        before = {p: _first_use(p) for p in backward.graph.find_nodes(op="placeholder")}
        names = {p: p.name for p in before}
        original(forward, backward, *args)
        inputs = set(backward.graph.find_nodes(op="placeholder"))
        unpacked: dict[str, fx.Node | None] = {}
        for placeholder, use in before.items():
            if use is not None:
                user, place = use
                now = _arguments(user)[place]
                if now is not placeholder:
                    unpacked[names[placeholder]] = now
            elif placeholder not in inputs or placeholder.users:
                unpacked[names[placeholder]] = None
        if unpacked:
            vars(backward)[_UNPACKING] = _graph_of(backward, unpacked)

    with replaced(graph_compile, "maybe_inline_graph_saved_tensors_hooks", inline):
        yield


def _arguments(node: fx.Node) -> list[Any]:
    return pytree.arg_tree_leaves(*node.args, **node.kwargs)


def _first_use(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The first node that reads `node`, and at which place of its arguments."""
    user = next(iter(node.users), None)
    if user is None:
        return None
    return user, next(i for i, a in enumerate(_arguments(user)) if a is node)


def _graph_of(module: fx.GraphModule, results: dict[str, fx.Node | None]) -> fx.GraphModule:
    """The part of `module` that computes `results`."""
    needed: set[fx.Node] = set()
    pending = [node for node in results.values() if node is not None]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
    graph.output({name: node and copies[node] for name, node in results.items()})
    return fx.GraphModule(module, graph)
