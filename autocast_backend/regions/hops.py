"""Enter and exit nodes into higher-order ops."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature

from .._torch.autocast import enter_autocast, exit_autocast, wrap_with_autocast
from ..graphs import check_graph_module, copy_graph, drop_unused_bodies, free_name, get_attribute
from ..state import AutocastState
from .placement import Placement, find_regions, is_region_node
from .signature import with_outputs_of


def regions_to_hops(
    graph_module: fx.GraphModule,
    signature: ExportGraphSignature | None = None,
    *,
    outside: AutocastState | None = None,
) -> tuple[fx.GraphModule, ExportGraphSignature | None]:
    """Make a `wrap_with_autocast` call of every region; regions inside it become such calls in its
    body. The bodies of other higher-order ops are treated alike.

        enter = _enter_autocast("cpu", torch.bfloat16, True, None)
        y = linear(x, w)                       region = wrap_with_autocast(
        _exit_autocast(enter)                      "cpu", torch.bfloat16, True, None, body, x, w)
        z = sin(y)                             y = region[0]
                                               z = sin(y)

    A region disappears if it is empty, or changes nothing: it sets what the regions around it, or
    `outside`, have set already.

    Args:
        graph_module: any FX graph; it is left as it is.
        signature: of an exported program's graph; it is left as it is.
        outside: the autocast state around the graph, where it is known.

    Returns:
        A new graph, and its signature, in which outputs that are now called otherwise are renamed.

    Raises:
        TypeError: `graph_module` is no graph, or `signature` no signature.
        RegionError: an exit without its enter, crossing pairs, or an enter without its exit.
    """
    check_graph_module(graph_module)
    copy = copy_graph(graph_module)
    _check(copy)
    _wrap(copy, _Known.of(outside))
    return copy, with_outputs_of(copy, signature)


Region = tuple[str, torch.dtype | None, bool, bool | None]
"""The arguments of `torch.autocast`: device type, dtype, enabled, cache_enabled."""


@dataclass(frozen=True)
class _Known:
    """What is known of the autocast state at some place: nothing, at the top of a graph whose
    surroundings nobody told."""

    devices: Mapping[str, tuple[bool, torch.dtype]] = field(default_factory=dict)
    cache: bool | None = None

    @classmethod
    def of(cls, state: AutocastState | None) -> _Known:
        if state is None:
            return cls()
        devices = {d.device_type: (d.enabled, d.dtype) for d in state.devices}
        return cls(devices, state.cache_enabled)

    def enter(
        self,
        device_type: str,
        dtype: torch.dtype | None,
        enabled: bool,
        cache_enabled: bool | None,
    ) -> _Known:
        """What is known inside a region of these arguments."""
        devices = dict(self.devices)
        if dtype is not None:
            devices[device_type] = (enabled, dtype)
        elif device_type in devices:  # the dtype in force
            devices[device_type] = (enabled, devices[device_type][1])
        return _Known(devices, self.cache if cache_enabled is None else cache_enabled)

    def is_changed_by(self, arguments: Region) -> bool:
        """Whether a region of these arguments may change the state here."""
        return arguments[0] not in self.devices or self.enter(*arguments) != self


def _check(module: fx.GraphModule) -> None:
    for graph in _graphs(module):
        find_regions(graph.graph, Placement(AutocastState.off(), None))


def _graphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (m for m in module.modules() if isinstance(m, fx.GraphModule))


def _wrap(module: fx.GraphModule, here: _Known) -> None:
    """Wrap the regions of one graph, which stands at `here`, and those of its bodies."""
    _drop_idle(module.graph, here)
    bodies = {str(n.target) for n in module.graph.find_nodes(op="get_attr")}
    for enter, exit_ in _outermost(module.graph):
        body = _outline(module, enter, exit_)
        _wrap(body, here.enter(*_spelled_out(enter)))
        module.graph.erase_node(exit_)
        module.graph.erase_node(enter)
    for name in bodies:
        child = get_attribute(module, name)
        if isinstance(child, fx.GraphModule):
            _wrap(child, _Known())  # it may run later, as a backward does
    drop_unused_bodies(module)
    module.recompile()


# Calls that autocast cannot change: a region around nothing else is empty.
_INERT = frozenset(
    (
        operator.getitem,
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_storage_offset.default,
        torch.ops.aten.sym_stride.int,
    )
)


def _drop_idle(graph: fx.Graph, here: _Known) -> None:
    """Erase the regions that are empty or change nothing."""
    opened: list[tuple[fx.Node, _Known, bool]] = []  # enter, what is known before, is it idle
    calls = [0]  # how many calls each open region holds
    for node in list(graph.nodes):
        if node.op in ("call_function", "call_method", "call_module"):
            calls[-1] += not is_region_node(node) and node.target not in _INERT
        if node.target is enter_autocast:
            opened.append((node, here, not here.is_changed_by(_spelled_out(node))))
            here = here.enter(*_spelled_out(node))
            calls.append(0)
        elif node.target is exit_autocast:
            enter, here, idle = opened.pop()
            inside = calls.pop()
            calls[-1] += inside
            if idle or not inside:
                graph.erase_node(node)
                graph.erase_node(enter)


def _outermost(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """The enter and exit nodes of the regions that stand in no other."""
    found = []
    opened: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is enter_autocast:
            opened.append(node)
        elif node.target is exit_autocast:
            enter = opened.pop()
            if not opened:
                found.append((enter, node))
    return found


def _outline(module: fx.GraphModule, enter: fx.Node, exit_: fx.Node) -> fx.GraphModule:
    """Move what stands between two nodes into a body, and call it before the second one."""
    graph = module.graph
    inner = _between(enter, exit_)
    # What takes apart the result of a call goes with the call: a body returns tensors, not lists.
    queue = list(inner)
    for node in queue:
        for user in list(node.users):
            if user not in inner and _takes_apart(user, node):
                inner[user] = None
                queue.append(user)
    body, operands, outputs = _body(module, inner)
    name = free_name(module, "autocast_body")
    module.add_module(name, body)
    with graph.inserting_before(exit_):
        attribute = graph.get_attr(name)
        call = graph.call_function(wrap_with_autocast, (*_spelled_out(enter), attribute, *operands))
    _describe(call, [enter, *inner], outputs)
    for i, output in enumerate(outputs):
        with graph.inserting_before(exit_):
            result = graph.call_function(operator.getitem, (call, i))
        result.meta = dict(output.meta)
        output.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inner)
        result.name, output.name = output.name, result.name
    for node in reversed(inner):
        graph.erase_node(node)
    return body


def _takes_apart(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node reads an element of the list or tuple that another gives. Dynamo writes `y[i]`
    of tensors in the same way, which may read what stands between the two, or what was written."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return (
        user.target is operator.getitem
        and user.all_input_nodes == [node]
        and isinstance(user.args[1], (int, slice))
        and not isinstance(value, torch.Tensor)
    )


def _between(enter: fx.Node, exit_: fx.Node) -> dict[fx.Node, None]:
    """The nodes between two, in order; not those that fetch an attribute, which autocast does not
    touch."""
    found: dict[fx.Node, None] = {}
    node = enter.next
    while node is not exit_:
        if node.op != "get_attr":
            found[node] = None
        node = node.next
    return found


def _body(
    module: fx.GraphModule, inner: Mapping[fx.Node, None]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A graph of the `inner` nodes, the nodes around them that it needs, and those of them that are
    needed outside of it."""
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    copies: dict[fx.Node, fx.Node] = {}
    operands, fetched = [], []
    moved = _symbols_of(module.graph, inner) | dict(inner)
    for node in dict.fromkeys(a for n in moved for a in n.all_input_nodes if a not in moved):
        value = get_attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, torch.nn.Module):  # a body: no operand, but an attribute here too
            attributes[str(node.target)] = value
            fetched.append(node)
        else:
            operands.append(node)
    for node in operands:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "example_value")}
    for node in (*fetched, *moved):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            attributes[str(node.target)] = module.get_submodule(str(node.target))
    outputs = [n for n in inner if any(user not in inner for user in n.users)]
    if not outputs:  # only side effects: `torch.export.load` refuses a call that gives nothing
        outputs = [n for n in inner if isinstance(n.meta.get("val"), torch.Tensor)][-1:]
    graph.output(tuple(copies[n] for n in outputs))
    return fx.GraphModule(attributes, graph), operands, outputs


def _symbols_of(graph: fx.Graph, inner: Mapping[fx.Node, None]) -> dict[fx.Node, None]:
    """What hangs on dynamic sizes alone and is no whole number, such as `n > 4`: a program with a
    body that is given it cannot be saved, so a body computes it itself."""
    found = set()
    queue = [a for n in inner for a in n.all_input_nodes if a not in inner]
    for node in queue:
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        if isinstance(values[0], (torch.SymBool, torch.SymFloat)) and all(
            isinstance(v, (torch.SymBool, torch.SymFloat, torch.SymInt)) for v in values
        ):
            found.add(node)
            queue += node.all_input_nodes
    return {node: None for node in graph.nodes if node in found}


def _spelled_out(enter: fx.Node) -> Region:
    """The arguments of an enter node, defaults included."""

    def spell(
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> Region:
        return device_type, dtype, enabled, cache_enabled

    arguments: tuple[Any, ...] = enter.args
    keywords: dict[str, Any] = dict(enter.kwargs)
    return spell(*arguments, **keywords)


def _describe(call: fx.Node, region: Iterable[fx.Node], outputs: Sequence[fx.Node]) -> None:
    """The metadata that export's graphs have at such a call: where it stands is told by the first
    node of the region that knows."""
    for key in ("val", "example_value"):
        if all(key in n.meta for n in outputs):
            call.meta[key] = tuple(n.meta[key] for n in outputs)
    attribute = call.all_input_nodes[0]
    for key in ("nn_module_stack", "stack_trace"):
        first = next((n.meta[key] for n in region if n.meta.get(key)), None)
        if first is not None:
            call.meta[key] = attribute.meta[key] = first
    call.meta["torch_fn"] = ("wrap_with_autocast", "WrapWithAutocast.wrap_with_autocast")
