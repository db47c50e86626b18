"""Guards: what has Dynamo compile anew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .dynamo_graphs import input_path


def guard_leaf_and_view(node: fx.Node, value: torch.Tensor) -> None:
    """Have Dynamo compile anew for an input that is another kind of tensor than `value`: a leaf of
    autograd or not, a view or not. It does not ask, and eager autocast caches the casts of leaves
    that are no views. Parameters are both, and Dynamo asks for their type; one that is no leaf any
    more, since what requires grad was written to it, is still taken for one."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    source = getattr(node, "_dynamo_source", None)
    if source is None or TracingContext.try_get() is None or isinstance(value, torch.nn.Parameter):
        return
    base = GuardBuilder.NOT_NONE_MATCH if value._is_view() else GuardBuilder.CONSTANT_MATCH
    install_guard(
        AttrSource(source, "is_leaf").make_guard(GuardBuilder.CONSTANT_MATCH),
        AttrSource(source, "_base").make_guard(base),
    )


def guard_same(*paths: tuple[str, str, tuple[tuple[Any, bool], ...]]) -> None:
    """Have Dynamo compile anew once two paths no longer lead to one object.

    Args:
        paths: "L" or "G" for a local or a global variable, its name, and what leads on from it: an
            attribute, or with True the index of an item.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, GetItemSource, GlobalSource, LocalSource

    sources = []
    for scope, variable, steps in paths:
        source: Any = LocalSource(variable) if scope == "L" else GlobalSource(variable)
        for step, item in steps:
            source = GetItemSource(source, step) if item else AttrSource(source, step)
        sources.append(source)
    first, second = sources
    same = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=second)
    install_guard(first.make_guard(same))


def guard_value(of: Callable[[], Any], name: str) -> None:
    """Have Dynamo compile anew where `of` returns something else. Its logs call that `name`."""
    value = of()
    _guard(lambda known: lambda variables: of() == value, f"{name} == {value}")


def guard_inputs(
    nodes: Sequence[fx.Node],
    some: Iterable[int],
    same: Callable[[list[Any], Callable[[], list[Any]]], bool],
    name: str,
) -> None:
    """Have Dynamo compile anew where `same` is false of inputs of its graph.

    Args:
        nodes: the inputs, all of which `is_reached`.
        some: the numbers of those that `same` takes; it also takes what returns all of them.
        name: what Dynamo's logs call it.
    """
    paths = [str(input_path(node)) for node in nodes]
    told = ", ".join(paths[i] for i in some)

    def holds(known: dict[str, Any]) -> Callable[[Any], bool]:
        first = eval(f"lambda L: [{told}]", known)
        everything = eval(f"lambda L: [{', '.join(paths)}]", known)
        return lambda variables: same(first(variables), lambda: everything(variables))

    _guard(holds, f"{name}({told})")


def _guard(holds: Callable[[dict[str, Any]], Callable[[Any], bool]], told: str) -> None:
    """A guard that Dynamo calls `told` in its logs. `holds` is given the names that paths of inputs
    use, but for that of the local variables, and returns what takes those."""
    from torch._dynamo.guards import _get_closure_vars, install_guard
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, TracingContext

    if TracingContext.try_get() is None:  # who calls the backend without Dynamo
        return

    def create(builder: Any, guard: Guard) -> None:
        names = {"___holds": holds({**_get_closure_vars(), "G": builder.scope["G"]})}
        builder.add_python_lambda_leaf_guard_to_root(["___holds(L)"], [told], names)

    install_guard(Guard(GlobalStateSource(), create))
