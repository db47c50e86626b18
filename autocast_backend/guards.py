"""Shape guards of backward variants.

A variant is traced after Dynamo has installed its guards. Where tracing or compiling it assumes
something new about a dynamic size, the assumption is checked at every call of the variant instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ._torch.fake_tensors import fake_mode_of, symbol_of


class ShapeGuards:
    """What is assumed about the sizes of `inputs` from now on."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        mode = fake_mode_of(inputs)
        self._shape_env = None if mode is None else mode.shape_env
        self._known = 0 if self._shape_env is None else len(self._shape_env.guards)

    def conditions(self) -> list[Any]:
        """What has been assumed since, as sympy relations."""
        assumed = [] if self._shape_env is None else self._shape_env.guards[self._known :]
        return [guard.expr for guard in assumed]

    def around(
        self, code: Callable[[list[Any]], Any], graph: fx.GraphModule, what: str
    ) -> Callable[[list[Any]], Any]:
        """`code`, after a check of what has been assumed since; itself where that is nothing.

        Args:
            code: the compiled `graph`.
            graph: its placeholders hold the symbolic sizes.
            what: names the code in the error.
        """
        conditions = self.conditions()
        if not conditions:
            return code
        nodes = graph.graph.find_nodes(op="placeholder")
        places = _places([node.meta.get("val") for node in nodes])

        def checked(args: list[Any]) -> Any:
            sizes = {symbol: _size(args, place) for symbol, place in places.items()}
            for condition in conditions:
                if condition.xreplace(sizes) != True:  # noqa: E712  (a sympy relation)
                    raise RuntimeError(
                        f"{what} was compiled for {condition}, which these inputs break "
                        f"({', '.join(f'{s} = {n}' for s, n in sizes.items())}). Compile with "
                        "dynamic=False, or call backward() outside of autocast"
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
