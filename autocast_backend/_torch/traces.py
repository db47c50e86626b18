"""What a joint graph was when AOTAutograd partitioned it: what a backward knows a value of the
forward by, should the graph be traced again.

A name would not do. Names are given in the order of tracing, to sizes as well, and of those there
may be more or less the second time: Inductor may have taken one of them for a number meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import fx

from .fake_tensors import is_size
from .patches import replaced

_TRACE = "_smart_autocast_trace"  # kept on disk, as `hooks._UNPACKING` is


@dataclass(frozen=True)
class Trace:
    """A joint graph as it was traced.

    Attributes:
        digest: the same for another trace if that makes the same calls, whatever its nodes are
            called, and but for calls that nobody reads; in a dynamic one, whatever numbers they
            are given, which may be sizes.
        dynamic: whether there are sizes that are no numbers.
        nodes: by name, the place of each node among those that are read and no sizes.
        sizes: by name, the expression of each node that is one.
        after_inductor: whether Inductor's passes over joint graphs have run.
    """

    digest: str
    dynamic: bool
    nodes: Mapping[str, int]
    sizes: Mapping[str, str]
    after_inductor: bool

    @classmethod
    def of(cls, joint: fx.GraphModule, after_inductor: bool, as_dynamic: bool = False) -> Trace:
        """
        Args:
            joint: the graph as it is about to be partitioned.
            after_inductor: see above.
            as_dynamic: it was dynamic when it was traced first.
        """
        values = {node.name: node.meta.get("val") for node in _read(joint.graph)}
        sizes = {name: str(value) for name, value in values.items() if is_size(value)}
        others = [name for name in values if name not in sizes]
        places = {name: place for place, name in enumerate(others)}
        dynamic = as_dynamic or any(isinstance(values[name], _SYMBOLS) for name in sizes)
        return cls(_digest(joint, dynamic), dynamic, places, sizes, after_inductor)

    def is_of(self, joint: fx.GraphModule, after_inductor: bool) -> bool:
        """Whether another joint graph computes the same, to the last number; False where that is
        not told, as of sizes that are no numbers, and of constants."""
        if self.dynamic or self.after_inductor != after_inductor:
            return False
        has_constants = any(
            not isinstance(operator.attrgetter(str(node.target))(body), fx.GraphModule)
            for body in joint.modules()
            if isinstance(body, fx.GraphModule)
            for node in body.graph.find_nodes(op="get_attr")
        )
        return not has_constants and self.digest == _digest(joint, dynamic=False)


def _read(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that matter: Inductor leaves some that nobody reads in one trace and not in another
    (a zero that `select` scatters its gradient into, where sizes are symbols)."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.is_impure() or any(user in found for user in node.users):
            found[node] = None
    return list(reversed(found))


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _digest(module: fx.GraphModule, dynamic: bool) -> str:
    told = hashlib.sha256()
    places: dict[fx.Node, str] = {}

    def read(argument: Any) -> Any:
        node = argument if isinstance(argument, fx.Node) else None
        if node in places:
            return places[node]
        value = argument if node is None else node.meta["val"]
        return "#" if dynamic and type(value) in (int, float, *_SYMBOLS) else value

    for node in _read(module.graph):
        if is_size(node.meta.get("val")):
            continue
        places[node] = f"%{len(places)}"
        value = node.meta.get("val")
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        call: Any = node.target if node.op in ("call_function", "call_method") else ""
        if node.op == "get_attr":
            body = operator.attrgetter(str(node.target))(module)
            call = _digest(body, dynamic) if isinstance(body, fx.GraphModule) else ""
        given = () if node.op == "get_attr" else (node.args, node.kwargs)
        line = f"{node.op} {call} {fx.node.map_aggregate(given, read)} {kind}\n"
        told.update(re.sub(" at 0x[0-9a-f]+", "", line).encode())  # other processes read it
    return told.hexdigest()


def trace_of(backward: fx.GraphModule) -> Trace | None:
    """What `traces_noted` has noted; None where a partitioner of the user's came in between."""
    noted = getattr(backward, _TRACE, None)
    return None if noted is None else Trace(*noted)


@contextlib.contextmanager
def traces_noted() -> Iterator[Callable[[fx.GraphModule], None]]:
    """Have every backward graph that is partitioned meanwhile keep what its joint graph was, also
    on disk. Yields what is to be called with each joint graph when it has been traced."""
    from torch._functorch._aot_autograd import graph_compile

    last: Trace | None = None

    def note(joint: fx.GraphModule) -> None:
        nonlocal last
        last = Trace.of(joint, after_inductor=False)

    after_partition = "maybe_inline_graph_saved_tensors_hooks"
    original = vars(graph_compile)[after_partition]

    def inline(forward: fx.GraphModule, backward: fx.GraphModule, *args: Any) -> None:
        if last is not None:
            # Of all names, those of its inputs are needed, which hooks may yet change.
            names = [p.name for p in backward.graph.find_nodes(op="placeholder")]
            nodes = {n: last.nodes[n] for n in names if n in last.nodes}
            sizes = {n: last.sizes[n] for n in names if n in last.sizes}
            vars(backward)[_TRACE] = astuple(replace(last, nodes=nodes, sizes=sizes))
        original(forward, backward, *args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(graph_compile, after_partition, inline))
        compile_fx = sys.modules.get("torch._inductor.compile_fx")
        if compile_fx is not None:
            partition: Any = vars(compile_fx)["min_cut_rematerialization_partition"]

            def min_cut(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
                nonlocal last
                last = Trace.of(joint, after_inductor=True)
                return partition(joint, *args, **kwargs)

            stack.enter_context(
                replaced(compile_fx, "min_cut_rematerialization_partition", min_cut)
            )
        yield note
