"""Write a settled plan into its graph: smart casts, brackets, and no more regions."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._torch.autocast import disable_autocast, enter_autocast, exit_autocast
from .._torch.dynamo_graphs import is_nonstrict
from .._torch.fake_tensors import observing
from .._torch.higher_order import call_leaf_function_under
from .._torch.inside import opaque_ops
from .._torch.kernels import close_kernels, put_back_kernels
from ..policies.table import Policy
from ..regions import is_cleared, is_opened_in, source_line, target_name
from ..reports.report import Bracketed, Report
from . import recipes
from .bodies import IN_PLACE, Bodies
from .planning import Candidate, Plan
from .recipes import Recipe, tensor_arguments

_FULL_PRECISION_DTYPE = torch.ops.smart_autocast.full_precision_dtype.default
CACHED = "smart_autocast_cached"
"""In the `meta` of a cast that eager autocast would keep in its weight cache, and that others may
have left there before the graph runs."""

CastKey = tuple[Any, ...]
"""A cast that eager autocast would find in its cache: the weight, the smart cast and its other
arguments, the scope, the grad mode."""


class Writer:
    """Writes the plan of one graph into it.

    Args:
        fake_mode: of the graph's example values; the casts get example values of their own.
        names: what the report calls each node.
        report: counts what is written.
    """

    def __init__(
        self, plan: Plan, fake_mode: Any, names: Mapping[fx.Node, str], report: Report
    ) -> None:
        self.module = plan.module
        self.graph = plan.module.graph
        self.plan = plan
        self.fake_mode = fake_mode
        self.names = names
        self.report = report
        # The casts eager autocast would find in its cache: one per weight, scope and grad mode. In
        # the body of a checkpoint, they may be operands.
        self.weight_casts: dict[CastKey, fx.Node] = {}
        # `w.float()` is w itself, and the cache knows tensors: id of a value -> its first node.
        self._first = {id(n.meta.get("example_value")): n for n in reversed(self.graph.nodes)}

    def write(self) -> None:
        """Rewrite every candidate, bracket those that were refused, and drop the region nodes."""
        for c in self.plan.candidates:
            on = [d.device_type for d in c.placement.state.enabled_devices]
            for op in () if c.overridden else opaque_ops(c.node.target, on):
                self.report.opaque[op] = c.placement.state
            if c.refused is not None:
                # In eager, these casts come from the cache; AOTAutograd's weights are no leaves.
                weights = [(i, Policy.LOWER_PRECISION_FP) for i in c.shared]
                recipe = recipes.of_casts(c.node, c.placement.state, weights)
                self._rewrite(c, replace(recipe, within=c.shared_within))
                self.report.bracketed.append(_bracketed(c, self.names[c.node]))
            elif c.recipe:
                self._rewrite(c, c.recipe)
                self.report.lowered += 1
            else:
                self.report.untouched += 1
        for run in _runs([c for c in self.plan.candidates if c.refused is not None]):
            self._bracket(run)
        for node in reversed(self.plan.regions):
            self.graph.erase_node(node)

    def share_with_bodies(self, writers: Mapping[fx.GraphModule, Writer]) -> None:
        """Let the bodies of checkpoints read the weight casts of this graph, as eager's cache does:
        the gradients of all uses then add up in the lower precision.

            y = tag_activation_checkpoint(body, x, w)      y = tag_activation_checkpoint(
            w_cast = autocast_to_bf16(w)                       body, x, w, w_cast)

        Bodies in bodies read them, too. A weight that one checkpoint alone reads is cast in there,
        to be cast again in its backward, and so is one that a body reads in a region of its own, at
        whose end eager's cache is cleared.
        """
        inside = self._casts_in_bodies(writers)
        readers = Counter(key for calls in inside.values() for key in calls.values())
        for (writer, cast), calls in inside.items():
            own = cast in writer.weight_casts
            again = own and any(IN_PLACE[str(node.target)].again for node in calls)
            if again or any(k in self.weight_casts or readers[k] > 1 for k in calls.values()):
                self._share(writer, cast, calls, writers)

    def _casts_in_bodies(
        self, writers: Mapping[fx.GraphModule, Writer]
    ) -> dict[tuple[Writer, CastKey], dict[fx.Node, CastKey]]:
        """The casts of this graph's weights in the bodies it calls, and in those these call; for
        each, which nodes call the body, and which cast of this graph each of them means."""
        bodies = Bodies(self.module)
        inside: dict[tuple[Writer, CastKey], dict[fx.Node, CastKey]] = {}
        for node in self.graph.nodes:
            body = bodies.of(node)
            if body is None or not body.call.shares(node) or body.module not in writers:
                continue
            writer = writers[body.module]
            inputs = writer.graph.find_nodes(op="placeholder")
            operands = dict(zip(inputs, node.args[body.call.first_operand :], strict=True))
            given = {c for c, made in writer.weight_casts.items() if made.op == "placeholder"}
            deeper = (c.values() for c in writer._casts_in_bodies(writers).values())
            for cast in itertools.chain(writer.weight_casts, *deeper):
                weight, *how = cast
                if (
                    cast not in given
                    and weight in operands
                    and not is_opened_in(how[-2], writer.graph)
                ):
                    key = (self._weight(operands[weight]), *how)
                    inside.setdefault((writer, cast), {})[node] = key
        return inside

    def _share(
        self,
        writer: Writer,
        cast: CastKey,
        calls: Mapping[fx.Node, CastKey],
        writers: Mapping[fx.GraphModule, Writer],
    ) -> None:
        """Give a body a cast of a weight as an operand, in each node that calls it."""
        if cast not in writer.weight_casts:  # bodies in that body make it
            for (deeper, its_cast), its_calls in writer._casts_in_bodies(writers).items():
                if cast in its_calls.values():
                    writer._share(deeper, its_cast, its_calls, writers)
        made = writer.weight_casts[cast]
        for node, key in calls.items():
            outside = self.weight_casts.get(key)
            if outside is None:
                with self.graph.inserting_before(node):
                    outside = self.graph.node_copy(
                        made, {made.all_input_nodes[0]: key[0]}.__getitem__
                    )
                self.weight_casts[key] = outside
                self.report.casts += 1
            elif not _stands_before(outside, node):
                node.prepend(outside)
            node.args = (*node.args, outside)
        last = writer.graph.find_nodes(op="placeholder")[-1]
        with writer.graph.inserting_after(last):
            operand = writer.graph.placeholder(made.name)
        operand.meta = dict(made.meta)
        (weight,) = made.all_input_nodes
        made.replace_all_uses_with(operand)
        writer.graph.erase_node(made)
        writer.weight_casts[cast] = operand
        if not weight.users:
            _drop_operand(calls, writer.graph, weight)
        self.report.casts -= 1

    def _rewrite(self, c: Candidate, recipe: Recipe) -> None:
        if not recipe:
            return
        node = c.node
        with self.graph.inserting_before(node):
            target, args, kwargs = recipes.apply(recipe, node, lambda _, n: n, self._caller(c))
        if target is not node.target:
            node.op, node.target = "call_function", target
        node.args, node.kwargs = args, kwargs

    def _caller(self, c: Candidate) -> recipes.Call:
        """Adds calls to the graph; the cast of a shared weight only where it is not there yet."""
        arguments = tensor_arguments(c.node)
        shared = {arguments[i] for i in c.shared}

        def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
            if not isinstance(args[0], fx.Node) or args[0] not in shared:
                return self._add(c, target, args, kwargs, c.in_transform)
            weight = self._weight(args[0])
            key = (weight, target, args[1:], c.placement.scope, c.grad)
            if key not in self.weight_casts:
                with self.graph.inserting_before(c.node):
                    # A weight comes from outside of transforms, and its cast has an example value.
                    cast = self._add(c, target, (weight, *args[1:]), kwargs, inside=False)
                self.weight_casts[key] = cast
                if not is_cleared(c.placement.scope):
                    cast.meta[CACHED] = True
            return self.weight_casts[key]

        return call

    def _weight(self, node: fx.Node) -> fx.Node:
        """The first node with a weight that is the value of `node`, too."""
        return self._first[id(node.meta["example_value"])]

    def _add(self, c: Candidate, target: Any, args: Any, kwargs: Any, inside: bool) -> fx.Node:
        """Add a call; inside a transform there is no example value to give it."""
        node = self.graph.call_function(target, args, kwargs)
        if self.fake_mode is not None and not inside:
            values = fx.node.map_arg((args, kwargs), lambda n: n.meta.get("example_value"))
            with observing(self.fake_mode), torch.set_grad_enabled(c.grad), disable_autocast():
                node.meta["example_value"] = target(*values[0], **values[1])
        for name in ("stack_trace", "nn_module_stack", "custom"):
            if name in c.node.meta:
                node.meta[name] = c.node.meta[name]
        self.report.casts += target not in (operator.getitem, _FULL_PRECISION_DTYPE)
        return node

    def _bracket(self, run: list[Candidate]) -> None:
        # AOTAutograd traces with the weight cache off; but a call may cast a leaf of its own twice,
        # of `torch.func.grad` for one. What the cache keeps is freed with the outermost context:
        # tensors of the trace, which nothing else will ask for. But where one leaf is traced twice,
        # the second trace would find those of the first.
        state = run[0].placement.state
        cache = state.cache_enabled
        contexts = [(d.device_type, d.dtype, True, cache) for d in state.enabled_devices]
        for c in run:
            call_leaf_function_under(self.module, c.node, contexts)
        with self.graph.inserting_before(run[0].node):
            # Named, because AOTAutograd's cache knows a graph by its names: stock's graph may be
            # the same but for them, and what stock makes of it is not (_torch/kernels.py).
            entered = [
                self.graph.create_node("call_function", enter_autocast, context, name="bracket")
                for context in contexts
            ]
        at = run[-1].node
        for enter in reversed(entered):
            with self.graph.inserting_after(at):
                at = self.graph.call_function(exit_autocast, (enter,))
        if run[0].selective:
            with self.graph.inserting_before(entered[0]):
                closed = self.graph.call_function(close_kernels)
            with self.graph.inserting_after(at):
                at = self.graph.call_function(put_back_kernels, (closed,))
        if cache and any(is_nonstrict(c.node) and not c.grad for c in run):
            # Dynamo, too, has traced what it reads of its own. (Where autograd records, PyTorch
            # has no gradients for that, and the error of a second trace says more than none.)
            with self.graph.inserting_before(entered[0]):
                self.graph.call_function(torch.clear_autocast_cache)
            self._clear_cache_after(at)
        elif self.plan.retraced and cache:
            self._clear_cache_after(at)

    def _clear_cache_after(self, node: fx.Node) -> None:
        with self.graph.inserting_after(node):
            self.graph.call_function(torch.clear_autocast_cache)


def _drop_operand(calls: Iterable[fx.Node], body: fx.Graph, operand: fx.Node) -> None:
    """Call a body without an operand that it does not read."""
    operands = body.find_nodes(op="placeholder")
    for node in calls:
        at = len(node.args) - len(operands) + operands.index(operand)
        node.args = (*node.args[:at], *node.args[at + 1 :])
    body.erase_node(operand)


def _stands_before(node: fx.Node, other: fx.Node) -> bool:
    return next(n for n in node.graph.nodes if n in (node, other)) is node


def _runs(refused: list[Candidate]) -> Iterator[list[Candidate]]:
    """Maximal runs of neighbours under one state: each gets one bracket."""
    numbered = enumerate(refused)
    for _, run in itertools.groupby(
        numbered, lambda pair: (pair[1].position - pair[0], pair[1].placement.state)
    ):
        yield [c for _, c in run]


def _bracketed(c: Candidate, name: str) -> Bracketed:
    return Bracketed(name, target_name(c.node), c.refused or "", source_line(c.node))
