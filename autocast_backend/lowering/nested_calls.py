"""The calls of nested compile regions under the options `policies` and `autocast`.

Dynamo traces such a region once and has each of its calls name that one body, with the modules that
the first call stood in. For the options, two calls are alike if their operands have the dtypes of
each other, which hangs on what was overridden before, and if the same entries name what they call.
Others get a copy of the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from .._torch.dynamo_graphs import input_path, is_nested_region
from ..graphs import nodes_of
from ..policies.overrides import Overrides, PolicyError, Stack, module_stack
from ..policies.paths import parse_name
from ..regions import Placement, source_line
from .separate import copy_body, separate_bodies


class NestedCalls:
    """Gives each call a body that it shares with calls alike.

    Args:
        graph_module: the outermost graph.
    """

    def __init__(self, overrides: Overrides, graph_module: fx.GraphModule) -> None:
        self._overrides = overrides
        self._names = {str(n.args[1]) for n in nodes_of(graph_module) if is_nested_region(n)}
        self._alike: dict[fx.GraphModule, dict[Any, tuple[Any, Any, fx.GraphModule]]] = {}
        self._owners: dict[fx.GraphModule, list[Any]] = {}
        # What the call stands in that a body was traced for: all that is in the body begins so.
        self._traced: dict[fx.GraphModule, Stack] = {}
        for node in filter(is_nested_region, nodes_of(graph_module)):
            body, called = _body(node), module_stack(node)
            if _all_begin_with(called, map(module_stack, _calls(body).values())):
                self._traced[body] = max(self._traced.get(body, []), called, key=len)

    def body_of(
        self,
        node: fx.Node,
        body: fx.GraphModule,
        operands: Sequence[Any],
        placement: Placement,
        grad: bool,
    ) -> fx.GraphModule:
        """The body for a call that has `body` now, and have it call that.

        Args:
            operands: their values.
            placement, grad: where the body runs.

        Raises:
            PolicyError: nobody can tell which entries name the calls in it.
        """
        stacks: dict[str, Stack] = {}
        if self._overrides.modules:
            stacks = self._stacks(node, module_stack(node), body)
        dtypes = tuple(getattr(value, "dtype", None) for value in operands)
        key = (dtypes, self._asked(body, stacks))
        alike = self._alike.setdefault(body, {})
        if key in alike:
            attribute, name, found = alike[key]
            node.args = (attribute, name, *node.args[2:])
            return found
        found = copy_body(node, body, self._names) if alike else body
        calls = _calls(found)
        for name, stack in stacks.items():
            _stand_in(calls[name], stack)
        if found is not body:
            self._traced[found] = module_stack(node)
            separate_bodies(found, placement, grad, self._names)
        alike[key] = (node.args[0], node.args[1], found)
        self._alike.setdefault(found, {key: alike[key]})
        return found

    def _asked(self, body: fx.GraphModule, stacks: dict[str, Stack]) -> tuple[Any, ...]:
        """The entries that name the calls in a body, and in the regions that it calls."""
        calls = _calls(body)
        asked: list[Any] = [self._overrides.of(calls[name], stacks[name]) for name in stacks]
        for name, stack in stacks.items():
            if is_nested_region(call := calls[name]):
                inner = _body(call)
                asked.append(self._asked(inner, self._stacks(call, stack, inner)))
        return tuple(asked)

    def _stacks(self, node: fx.Node, called: Stack, body: fx.GraphModule) -> dict[str, Stack]:
        """The modules that each of the calls in a body stands in, called by `node`, which stands in
        `called`."""
        own = {name: module_stack(call) for name, call in _calls(body).items()}
        traced = self._traced.get(body, _common(list(own.values())) if own else called)
        if traced == called:
            owners = [self._owner(operand) for operand in node.args[2:]]
            if self._owners.setdefault(body, owners) == owners:
                return own
        elif traced and called and _all_begin_with(traced, own.values()):
            end = len(traced)
            return {
                name: called + [self._moved(entry, traced, called) for entry in stack[end:]]
                for name, stack in own.items()
            }
        raise PolicyError(
            f"option 'policies': a nested compile region [{source_line(node)}] is called for "
            "several modules, and traced for one, so no pattern can tell its calls apart. Mark "
            "the modules' own forward as the region, or leave torch.compiler.nested_compile_region "
            "out"
        )

    def _owner(self, operand: Any) -> Any:
        """The entry for the module that an operand is a weight of."""
        path = input_path(operand) if isinstance(operand, fx.Node) else None
        name = () if path is None else parse_name(path)  # of a variable: none
        return self._overrides.of_module(name[:-1]) if name else None

    def _moved(self, entry: tuple[str, str], traced: Stack, called: Stack) -> tuple[str, str]:
        """A module inside of the last of `traced`: the one that `called` has in its place."""
        _, path = entry
        inside = path.removeprefix(traced[-1][1])
        if inside == path or inside[:1] not in (".", "["):
            return entry
        path = called[-1][1] + inside
        name = parse_name(path)
        known = (i for i, names in self._overrides.names.items() if name in names)
        return next(known, path), path


def _calls(body: fx.GraphModule, path: str = "") -> dict[str, fx.Node]:
    """The calls that were traced with a body: not those in the regions that it calls."""
    calls: dict[str, fx.Node] = {}
    for node in body.graph.nodes:
        if node.op.startswith("call_"):
            calls[path + node.name] = node
        elif node.op == "get_attr" and not any(map(is_nested_region, node.users)):
            inner = getattr(body, str(node.target), None)
            if isinstance(inner, fx.GraphModule):
                calls.update(_calls(inner, f"{path}{node.target}."))
    return calls


def _body(call: fx.Node) -> Any:
    attribute: Any = call.args[0]
    return getattr(call.graph.owning_module, str(attribute.target))


def _all_begin_with(stack: Stack, stacks: Iterable[Stack]) -> bool:
    return all(other[: len(stack)] == stack for other in stacks)


def _common(stacks: list[Stack]) -> Stack:
    """What all of them begin with."""
    shortest = min(stacks, key=len)
    for depth, entry in enumerate(shortest):
        if any(stack[depth] != entry for stack in stacks):
            return shortest[:depth]
    return shortest


def _stand_in(call: fx.Node, stack: Stack) -> None:
    """Have a call stand in other modules of the same classes."""
    if module_stack(call) != stack:
        kinds = [kind for _, kind in call.meta["nn_module_stack"].values()]
        kinds = ([""] * len(stack) + kinds)[-len(stack) :]
        call.meta["nn_module_stack"] = {
            f"{identity}@{depth}": (path, kind)
            for depth, ((identity, path), kind) in enumerate(zip(stack, kinds, strict=True))
        }
