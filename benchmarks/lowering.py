"""Processor seconds to lower graphs of growing size: they must grow as the number of nodes does.

The graphs are chains of linear, gelu, layer_norm and add, each with parameters of its own, as
Dynamo captures them. In `same` all layers have one width, so validation meets few distinct calls;
in `distinct` every layer has a width of its own, so it meets only new ones. `known` is `distinct`
with the verdicts of an earlier compilation at hand.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.config
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from autocast_backend.graphs import copy_graph
from autocast_backend.lowering.context import Context
from autocast_backend.lowering.lower import lower
from autocast_backend.state import AutocastState
from autocast_backend.validation import verdicts
from benchmarks.harness import Row, compare, interleave

SIZES = (100, 300, 1_000, 3_000, 10_000, 20_000)
QUICK_SIZES = (100, 1_000, 5_000)
LARGE = 1_000
KINDS = ("same", "distinct", "known")
STAGES = ("regions", "validation", "lowering")
NODES_PER_LAYER = 8
AMBIENT: dict[str, Any] = {"device_type": "cpu", "dtype": torch.bfloat16}


class _Chain:
    """Builds a graph and, beside each node, the value it has under eager autocast."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.fake_mode = FakeTensorMode()

    def placeholder(self, *shape: int, parameter: bool = True) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        with self.fake_mode:
            node.meta["example_value"] = torch.empty(shape, requires_grad=parameter)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda n: n.meta["example_value"])
        with self.fake_mode, torch.autocast(**AMBIENT, cache_enabled=False):
            node.meta["example_value"] = target(*values)
        return node

    def layer(self, x: fx.Node, width_in: int, width: int) -> fx.Node:
        weight, bias = self.placeholder(width, width_in), self.placeholder(width)
        scale, shift = self.placeholder(width), self.placeholder(width)
        h = self.call(F.gelu, self.call(F.linear, x, weight, bias))
        return self.call(torch.add, h, self.call(F.layer_norm, h, (width,), scale, shift))


@functools.cache
def chain(nodes: int, *, distinct: bool) -> fx.GraphModule:
    """A graph of about `nodes` nodes; with `distinct`, no two layers have the same width."""
    build = _Chain()
    x = build.placeholder(4, 8, parameter=False)
    widths = [8 + layer * distinct for layer in range(max(1, nodes // NODES_PER_LAYER) + 1)]
    for width_in, width in itertools.pairwise(widths):
        x = build.layer(x, width_in, width)
    build.graph.output(x)
    return fx.GraphModule(nn.Module(), build.graph)


class Lowering:
    """A sampler: processor seconds to lower one graph, copying it and garbage not included.

    Lowering runs on one thread and waits for nothing, so processor time is all its time, and does
    not depend on who else uses the machine.

    Attributes:
        nodes: how many the graph has.
        stages: elapsed seconds by stage, one entry per sample.
        checked: calls that the last sample validated; none where the verdicts were known.
    """

    def __init__(self, nodes: int, kind: str) -> None:
        self._graph = chain(nodes, distinct=kind != "same")
        self._known = kind == "known"
        self._ambient = AutocastState.of(AMBIENT)
        self.nodes = len(self._graph.graph.nodes)
        self.stages: list[dict[str, float]] = []
        self.checked = 0

    def __call__(self) -> float:
        if not self._known:
            verdicts.forget()
        gc.collect()
        gc.freeze()  # or collections during this lowering would walk the graphs of all the others
        graph, context = copy_graph(self._graph), Context(ambient=self._ambient)
        with torch._inductor.config.patch(fx_graph_cache=False):  # no verdicts from disk
            start = time.process_time()
            lower(graph, context)
            seconds = time.process_time() - start
        gc.unfreeze()
        self.stages.append({name: context.report.seconds[name] for name in STAGES})
        self.checked = context.report.checked
        return seconds


def measure(
    kind: str, *, sizes: Sequence[int], rounds: int, seed: int
) -> tuple[list[Row], list[Lowering]]:
    """Seconds for each size, and the samplers, which know the graphs' sizes and the stages."""
    lowerings = [Lowering(size, kind) for size in sizes]
    samplers = {f"{lowering.nodes} nodes": lowering for lowering in lowerings}
    warmup = 0 if kind == "distinct" else 1  # for `known`, that is where the verdicts come from
    samples = interleave(samplers, rounds=rounds, warmup=warmup, seed=seed)
    return compare(samples), lowerings


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The `k` of the least-squares fit `seconds = c * sizes ** k`: 1 is linear, 2 quadratic."""
    xs, ys = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - x_mean) ** 2 for x in xs)
