"""FX graphs: copies, attributes, names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._torch.export import same_calling_convention


def check_graph_module(graph_module: object) -> None:
    """Refuse an argument that is no graph.

    Raises:
        TypeError: it is no `fx.GraphModule`.
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise TypeError(
            "graph_module: expected a torch.fx.GraphModule, such as Dynamo gives a backend; "
            f"got {type(graph_module).__name__}. A model is compiled by torch.compile(model, "
            'backend="smart_autocast"), an exported program lowered by '
            "autocast_backend.export.lower"
        )


def nodes_of(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of the bodies in it."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def made_in(graph_module: fx.GraphModule) -> list[torch.Tensor]:
    """All fake tensors of a graph of Dynamo's, its inputs too."""
    values = pytree.tree_leaves([n.meta.get("example_value") for n in nodes_of(graph_module)])
    return [value for value in values if isinstance(value, torch.Tensor)]


def names_of(graph_module: fx.GraphModule) -> dict[fx.Node, str]:
    """The names of the nodes of a graph and of the bodies in it. Two bodies may call nodes alike;
    a body's nodes are named after the body, too: `wrap_body_0.add`."""
    return {
        node: f"{path}.{node.name}" if path else node.name
        for path, module in graph_module.named_modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    }


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with nodes of its own, bodies of higher-order ops included, that shares parameters and
    metadata values.

    (`copy.deepcopy` would clone the fake mode, and with it every example value.)
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        # Weak references to the graph's real inputs; `torch.utils.swap_tensors` refuses those.
        values[node].meta.pop("grapharg", None)
    # `node_copy` would rename an input called `input`, as every name of a Python builtin, and with
    # it `max_1`: but a graph signature knows them by their names.
    for node, copied in values.items():
        copied.name = node.name
    same_inputs(graph, module.graph)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copy, name, copy_graph(child))
    return copy


def recompile(module: fx.GraphModule) -> None:
    """Write the code of a graph and of its bodies anew. `module.recompile()` alone may put off the
    bodies' code until its own runs, and whoever interprets the graph calls their old code."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            part.recompile()


def is_recorded(module: fx.GraphModule) -> bool:
    """Whether autograd records something of a Dynamo graph: in the grad mode of this moment, or
    where the graph switches it on."""
    if torch.is_grad_enabled():
        return True
    calls = (n for n in module.graph.nodes if n.op.startswith("call_"))
    made = pytree.tree_leaves([n.meta.get("example_value") for n in calls])
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in made)


def same_inputs(copy: fx.Graph, original: fx.Graph) -> None:
    """Have a graph with the placeholders of another be called as that one is."""
    pairs = (g.find_nodes(op="placeholder") for g in (copy, original))
    for new, old in zip(*pairs, strict=True):
        if hasattr(old, "_dynamo_source"):  # torch keeps it outside of meta
            new._dynamo_source = old._dynamo_source
    same_calling_convention(copy, original)


def get_attribute(module: torch.nn.Module, path: str) -> Any:
    """What a `get_attr` node of this target fetches."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def free_name(module: torch.nn.Module, wanted: str) -> str:
    """`wanted` with the first number that makes it a new attribute of `module`."""
    names = (f"{wanted}_{i}" for i in itertools.count())
    return next(name for name in names if not hasattr(module, name))


def drop_unused_bodies(module: fx.GraphModule) -> None:
    """Drop the graphs among the children that no node calls any more, and what fetched them.

    (`delete_all_unused_submodules` would drop the children of bodies as well.)
    """
    for node in module.graph.find_nodes(op="get_attr"):
        if not node.users and isinstance(get_attribute(module, str(node.target)), fx.GraphModule):
            module.graph.erase_node(node)
    used = {str(n.target).partition(".")[0] for n in module.graph.nodes}
    for name, child in list(module.named_children()):
        if isinstance(child, fx.GraphModule) and name not in used:
            delattr(module, name)
