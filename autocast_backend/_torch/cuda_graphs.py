"""CUDA graphs that Inductor has recorded: what they hold."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

Place = tuple[Sequence[torch.Tensor | None], int]
"""A list that holds a tensor, and where in it."""


def recorded_outputs() -> Mapping[int, list[Place]]:
    """Where recordings keep outputs that are in the memory of a static input, by storage.

    A forward returns each weight that its backward is to read. The recording keeps the tensor that
    it then saw for good, and returns it again at each replay (`CUDAGraphNode._add_first_outputs`).
    The lists themselves are given, because the holders of their tensors are going to be counted.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    name = "tree_manager_containers"  # one for each thread, but for those of autograd
    if trees is None or not (hasattr(trees.local, name) or torch._C._is_key_in_tls(name)):
        return {}
    places: dict[int, list[Place]] = defaultdict(list)
    for container in trees.get_obj(trees.local, name).values():
        manager = container.tree_manager
        levels = [] if manager is None or manager.roots is None else [manager.roots]
        while levels:
            for recordings in levels.pop().values():
                for recording in recordings:
                    levels.append(recording.children)
                    kept = recording.static_output_tensors
                    for i in range(len(kept)):
                        if kept[i] is not None:
                            places[kept[i].untyped_storage()._cdata].append((kept, i))
    return places
