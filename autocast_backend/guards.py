"""Shape guards of what is compiled late.

A backward variant, or a graph whose casts are made outside, is traced after Dynamo has installed
its guards. Where tracing or compiling it assumes something new about a dynamic size, the assumption
is checked at every call of it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from ._torch.fake_tensors import fake_mode_of, symbol_of
from .backward.ambient import BackwardError

_checked_by_dynamo: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many of a shape environment's guards Dynamo knew. Whatever is traced later hangs on all that
were added after those, for it or for another graph: what has been assumed is not assumed again."""


class ShapeGuards:
    """What is assumed about the sizes of `inputs` from now on, and what others have assumed since
    their graph was captured."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        mode = fake_mode_of(inputs)
        self._shape_env = env = None if mode is None else mode.shape_env
        self._known = 0 if env is None else _checked_by_dynamo.setdefault(env, len(env.guards))

    def conditions(self) -> list[Any]:
        """What has been assumed since, as sympy relations."""
        assumed = [] if self._shape_env is None else self._shape_env.guards[self._known :]
        return [guard.expr for guard in assumed]

    def check(self, values: Sequence[Any]) -> Callable[[Sequence[Any]], str | None] | None:
        """A function that finds in real arguments what breaks the assumptions made since; None
        where there are none.

        Args:
            values: the fake values of these arguments, which hold the symbolic sizes.
        """
        conditions = self.conditions()
        if not conditions:
            return None
        places = _places(values)

        def broken(args: Sequence[Any]) -> str | None:
            sizes = {symbol: _size(args, place) for symbol, place in places.items()}
            for condition in conditions:
                if condition.xreplace(sizes) != True:  # noqa: E712  (a sympy relation)
                    found = ", ".join(f"{s} = {n}" for s, n in sizes.items())
                    return f"was compiled for {condition}, which these inputs break ({found})"
            return None

        return broken

    def around(
        self, code: Callable[[list[Any]], Any], graph: fx.GraphModule, what: str
    ) -> Callable[[list[Any]], Any]:
        """`code`, after a check of what has been assumed since; itself where that is nothing.

        Args:
            code: the compiled `graph` of a backward; it raises `BackwardError` for other sizes.
            graph: its placeholders hold the symbolic sizes.
            what: names the code in the error.
        """
        nodes = graph.graph.find_nodes(op="placeholder")
        check = self.check([node.meta.get("val") for node in nodes])
        if check is None:
            return code

        def checked(args: list[Any]) -> Any:
            if broken := check(args):
                raise BackwardError(
                    f"{what} {broken}. Compile with dynamic=False, or call backward() outside of "
                    "autocast"
                )
            return code(args)

        return checked


def _places(values: Sequence[Any]) -> dict[Any, tuple[int, int | None]]:
    """Where each symbol can be read: (argument, dimension), or (argument, None) for an integer."""
    places: dict[Any, tuple[int, int | None]] = {}
    for i, value in enumerate(values):
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            symbol = symbol_of(size)
            if symbol is not None:
                places.setdefault(symbol, (i, dim))
    return places


def _size(args: Sequence[Any], place: tuple[int, int | None]) -> int:
    argument, dim = place
    return int(args[argument] if dim is None else args[argument].shape[dim])
