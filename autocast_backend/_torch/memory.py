"""Which inputs of a graph share memory.

AOTAutograd makes one input of those that overlap, if the graph writes to one of them, and reads
them at the places where they were then. Dynamo asks for none of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import compute_overlapping_tensors

from .dynamo import inputs_of_dynamo
from .dynamo_graphs import is_reached
from .fake_tensors import fake_mode_of, guards_suppressed, observing
from .guards import guard_inputs
from .patches import replaced
from .tensors import are_alone, has_storage, is_fake, storages_of
from .writes import written_inputs


def shared_memory(values: Iterable[Any]) -> list[str]:
    """Which of some values, by number, are tensors of one memory, and where in it each is."""
    places: defaultdict[int, list[str]] = defaultdict(list)
    with torch._C.DisableTorchFunctionSubclass():
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor) and has_storage(value):
                storage = value.untyped_storage()._cdata
                places[storage].append(f"{i} at {_place(value)}")
    return [", ".join(shared) for shared in places.values() if len(shared) > 1]


def guard_overlaps(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have Dynamo compile a graph anew where its inputs overlap in another way than now, if it may
    write to one.

    Args:
        graph_module: Dynamo's graph.
        inputs: its inputs.
    """
    written = written_inputs(graph_module, inputs)
    if not written:
        return
    memory: set[int] = set()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if any(isinstance(value, torch.Tensor) and is_fake(value) for value in inputs):
        # A part of a graph, of DDP's optimizer: it may write to a view of an input of the whole,
        # and its inputs do not tell how much memory those of the whole have.
        memory = storages_of(node.meta["example_value"] for node in written)
        placeholders, inputs = inputs_of_dynamo()
    nodes: list[fx.Node] = []
    fakes: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    writes: list[int] = []
    for node, value in zip(placeholders, inputs, strict=True):
        fake = node.meta.get("example_value")
        if isinstance(fake, torch.Tensor) and has_storage(fake) and is_reached(node):
            if node in written or fake.untyped_storage()._cdata in memory:
                writes.append(len(nodes))
            nodes.append(node)
            fakes.append(fake)
            values.append(value)
    if writes and len(nodes) > 1:
        guard_inputs(nodes, writes, _Overlaps(fakes, values, writes), "same_overlaps")


class _Overlaps:
    """Whether the tensors of a call overlap as others did.

    Args:
        fakes: the fake tensors of those others, some of whose sizes may be symbols.
        values: those others. Fake tensors may have less memory than these.
        written: the numbers of those that are written to.
    """

    def __init__(
        self,
        fakes: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        written: Iterable[int],
    ) -> None:
        self._written = frozenset(written)
        with torch._C.DisableTorchFunctionSubclass():
            with observing(fake_mode_of(fakes)):
                groups = self._groups(fakes, symbolic=True)
            self._known = {
                group: [
                    None if isinstance(traced, torch.SymInt) else number
                    for traced, number in zip(
                        _places(fakes, group), _places(values, group), strict=True
                    )
                ]
                for group in groups
            }

    def __call__(
        self, written: Sequence[torch.Tensor], everything: Callable[[], Sequence[torch.Tensor]]
    ) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            if are_alone(written):
                return not self._known
            tensors = everything()
            return self._groups(tensors) == [*self._known] and all(
                then in (None, now)
                for group, known in self._known.items()
                for then, now in zip_longest(known, _places(tensors, group))
            )

    def _groups(
        self, tensors: Sequence[torch.Tensor], *, symbolic: bool = False
    ) -> list[tuple[int, ...]]:
        """The groups of tensors of which AOTAutograd makes one input. It guards on no more than a
        group with symbols for sizes."""
        storages = [t.untyped_storage()._cdata for t in tensors]
        if len(set(storages)) == len(storages):
            return []
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for i, storage in enumerate(storages):
            groups[storage].append(i)
        return [
            tuple(group)
            for group in groups.values()
            if len(group) > 1
            and not self._written.isdisjoint(group)
            and len(compute_overlapping_tensors([tensors[i] for i in group], symbolic)) > 1
        ]


def _places(tensors: Sequence[torch.Tensor], group: Iterable[int]) -> list[int]:
    """Where the tensors of a group are in the input that AOTAutograd makes of them."""
    return [number for i in group for number in _place(tensors[i])]


def _place(tensor: torch.Tensor) -> list[int]:
    """Where a tensor is in what it is a view of, and what that is."""
    base = tensor if tensor._base is None else tensor._base
    offsets = (tensor.storage_offset(), base.storage_offset(), base.untyped_storage().nbytes())
    return [*offsets, *base.shape, *base.stride()]


@contextmanager
def overlaps_by_symbols() -> Iterator[None]:
    """Have AOTAutograd look for overlaps by symbolic sizes, also where they have become numbers: it
    takes them for numbers then, and the tensors do not give any. What it finds is guarded on
    (`guard_overlaps`): where it does not know Dynamo's names of inputs, it assumes more, of sizes.
    """
    from torch._functorch._aot_autograd import input_output_analysis

    def compute(tensors: list[torch.Tensor], symbolic: bool) -> set[int]:
        with guards_suppressed(fake_mode_of(tensors)):
            return compute_overlapping_tensors(tensors, symbolic=True)

    with replaced(input_output_analysis, "compute_overlapping_tensors", compute):
        yield
