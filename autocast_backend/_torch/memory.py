"""Which inputs of a graph share memory.

AOTAutograd makes one input of those that overlap, if the graph writes to one of them, and reads
them at the places where they were then. Dynamo asks for none of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import compute_overlapping_tensors

from .dynamo import guard_inputs, is_reached, is_static_input
from .fake_tensors import fake_mode_of, observing
from .patches import replaced
from .tensors import has_storage, is_alone
from .writes import written_inputs


def shared_memory(values: Iterable[Any]) -> list[str]:
    """Which of some values, by number, are tensors of one memory, and where in it each begins."""
    places: defaultdict[int, list[str]] = defaultdict(list)
    with torch._C.DisableTorchFunctionSubclass():
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and has_storage(value):
                storage = value.untyped_storage()._cdata
                places[storage].append(f"{i} at {value.storage_offset()}")
    return [", ".join(shared) for shared in places.values() if len(shared) > 1]


def guard_overlaps(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have Dynamo compile a graph anew where its inputs overlap in another way than now, if it may
    write to one. Parameters, and what modules hold, are taken to stay as they are to each other.

    Args:
        graph_module: Dynamo's graph.
        inputs: its inputs.
    """
    written = written_inputs(graph_module, inputs)
    tensors: dict[fx.Node, torch.Tensor] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        fake = node.meta.get("example_value")
        if isinstance(fake, torch.Tensor) and has_storage(fake) and is_reached(node):
            tensors[node] = fake
    passed = {node for node in tensors if not is_static_input(node)}
    if written.keys().isdisjoint(passed):  # those that are not written do not count for each other
        tensors = {n: t for n, t in tensors.items() if n in written or n in passed}
    nodes = [*tensors]
    numbers = [i for i, node in enumerate(nodes) if node in passed]
    writes = [i for i, node in enumerate(nodes) if node in written]
    if numbers and writes:
        same = _Overlaps([*tensors.values()], writes, numbers)
        guard_inputs(nodes, numbers, same, "same_overlaps")


class _Overlaps:
    """Whether the tensors of a call overlap as others did.

    Args:
        fakes: those others.
        written: the numbers of those that are written to.
        passed: the numbers of those that may come from anywhere.
    """

    def __init__(
        self, fakes: Sequence[torch.Tensor], written: Iterable[int], passed: Collection[int]
    ) -> None:
        self._written = frozenset(written)
        with observing(fake_mode_of(fakes)), torch._C.DisableTorchFunctionSubclass():
            self._known = self._of(fakes, symbolic=True)
        overlapping = {i for group in self._known for i in group}
        self._alone_as_then = overlapping.isdisjoint(passed)

    def __call__(
        self, passed: Sequence[torch.Tensor], everything: Callable[[], Sequence[torch.Tensor]]
    ) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            if self._alone_as_then and all(map(is_alone, passed)):
                return True
            now = self._of(everything())
        return now.keys() == self._known.keys() and all(
            isinstance(then, torch.SymInt) or then == number
            for group, places in self._known.items()
            for then, number in zip_longest(places, now[group])
        )

    def _of(
        self, tensors: Sequence[torch.Tensor], *, symbolic: bool = False
    ) -> dict[tuple[int, ...], list[int]]:
        """The groups of tensors of which AOTAutograd makes one input, and where they are in it. It
        guards on no more than a group with symbols for sizes."""
        storages = [t.untyped_storage()._cdata for t in tensors]
        if len(set(storages)) == len(storages):
            return {}
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for i, storage in enumerate(storages):
            groups[storage].append(i)
        found = {}
        for group in groups.values():
            sharing = [tensors[i] for i in group]
            if (
                len(group) > 1
                and not self._written.isdisjoint(group)
                and len(compute_overlapping_tensors(sharing, symbolic)) > 1
            ):
                found[tuple(group)] = [n for t in sharing for n in _place(t)]
        return found


def _place(tensor: torch.Tensor) -> list[int]:
    base = tensor if tensor._base is None else tensor._base
    offsets = (tensor.storage_offset(), base.storage_offset(), base.untyped_storage().nbytes())
    return [*offsets, *base.shape, *base.stride()]


@contextmanager
def overlaps_by_symbols() -> Iterator[None]:
    """Have AOTAutograd look for overlaps by symbolic sizes, also where they have become numbers: it
    takes them for numbers then, and the tensors do not give any."""
    from torch._functorch._aot_autograd import input_output_analysis

    def compute(tensors: list[torch.Tensor], symbolic: bool) -> set[int]:
        return compute_overlapping_tensors(tensors, symbolic=True)

    with replaced(input_output_analysis, "compute_overlapping_tensors", compute):
        yield
