"""Joint graphs: the forward and the backward of one region in one graph, traced under a given
autocast state of the backward pass, and the backward that can be taken out of it.

    joint, traced off                        joint, traced under cpu: bfloat16
    ------------------------------------     ------------------------------------------------
    t = t(weight)                            t = t(weight)
    y = addmm(bias, x, t)                    y = addmm(bias, x, t)
    -- backward ------------------------     -- backward ------------------------------------
    gx = mm(tangent, t(t))                   gx = mm(to_bf16(tangent), to_bf16(t(t)))
                                             gx = to_fp32(gx)      the engine casts it back

The forwards are the same, so the backward of any state can start from the values that the forward
which really ran has saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch.fake_tensors import is_a_number_now, number_now, size_expression
from .._torch.hooks import unpacking_of
from .._torch.joint_graphs import JointGraph, run_and_save_rng_state
from .._torch.partitioning import in_backward, is_random, is_recomputed
from .._torch.traces import Trace, trace_of
from .ambient import BackwardError
from .differences import attribute, body_of
from .nested import write_out


class Numbering:
    """Numbers for the values of several graphs of one region: two nodes have one number if they
    compute the same from the same inputs. Names do not tell: what a partitioner saves may come from
    the backward half of the graph, where another state shifts the names.

    Random numbers are the same if they are drawn by the same call, counting those alike. And so are
    values that were the same before Inductor's passes (`mark_values`).
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._calls: dict[int, tuple[Any, str]] = {}  # what draws random numbers: op and arguments
        self.repeated: set[int] = set()  # random numbers that one graph draws by several such calls

    def of(
        self,
        module: fx.GraphModule,
        inputs: Mapping[str, int] | None = None,
        same: Mapping[int, int] | None = None,
        draws: Mapping[fx.Node, int] | None = None,
    ) -> dict[fx.Node, int]:
        """The number of every node of `module`.

        Args:
            module: a joint graph, or one partitioned from it.
            inputs: numbers of the placeholders that are values of another graph, by name.
            same: by the number of a value, that of the value it stands for.
            draws: numbers of calls that draw the random numbers of a call in another graph.
        """
        numbers: dict[fx.Node, int] = {}
        drawn: Counter[Any] = Counter()
        for node in module.graph.nodes:
            if inputs and node.op == "placeholder" and node.name in inputs:
                numbers[node] = inputs[node.name]
                continue
            target, arguments = (node.target, (node.args, node.kwargs))
            identity: Any = ""
            if node.op == "placeholder" or _has_effect(node):
                identity = node.name
            elif node.op == "get_attr":
                identity = body_of(module, node) or node.target
            if node.op in ("placeholder", "get_attr", "output"):
                target, arguments = "", ((), {})
            drawing = _random_call(node)
            if drawing is not None:
                target, arguments = drawing
            told = str(fx.map_arg(arguments, lambda n: f"%{numbers[n]}"))
            if drawing is not None:
                number = draws.get(node) if draws else None
                if number is not None and self._calls.get(number) == (target, told):
                    numbers[node] = number
                    continue
                identity = drawn[target, told]
                drawn[target, told] += 1
            keys: list[tuple[Any, ...]] = [(node.op, target, identity, told)]
            mark = node.meta.get(_VALUE)
            if mark and mark[0] == node.name and drawing is None:
                keys.append(mark[1:])
            seen = (self._numbers[key] for key in keys if key in self._numbers)
            number = next(seen, len(self._numbers))
            for key in keys:
                self._numbers.setdefault(key, number)
            numbers[node] = same.get(number, number) if same else number
            if drawing is not None:
                self._calls[number] = (target, told)
            if drawing is not None and identity > 0:
                first = self._numbers[node.op, target, 0, told]
                self.repeated |= {first, numbers[node]}
        return numbers


_VALUE = "smart_autocast_value"


def mark_values(joint: fx.GraphModule, numbering: Numbering) -> None:
    """Mark what the forward computes by its numbers before Inductor's passes. Those may make one op
    of several calls in the trace for one state and not in that for another: of attention that is
    written out, if its backward is in the same dtype. What is computed from its result would have
    another number then, though it is the same value.

    Args:
        joint: the graph as it was traced.
        numbering: that of all traces of one region.
    """
    for node, number in numbering.of(joint).items():
        if not in_backward(node):
            # Passes give a node's meta to what they put in its place, and to others.
            node.meta[_VALUE] = (node.name, "marked", number)


def _random_call(node: fx.Node) -> tuple[Any, Any] | None:
    """The op that draws random numbers and its arguments, where a node does: by itself, or, in a
    partitioned backward, once more from the state that the forward has saved."""
    if is_random(node.target):
        return node.target, (node.args, node.kwargs)
    name = getattr(node.target, "__name__", "")
    if name == "run_with_rng_state":  # (state, op, *arguments)
        return node.args[1], (node.args[2:], node.kwargs)
    if name == "graphsafe_run_with_rng_state":  # (op, *arguments, rng_state=state)
        kwargs = {k: v for k, v in node.kwargs.items() if k != "rng_state"}
        return node.args[0], (node.args[1:], kwargs)
    return None


def _recomputed_draws(
    partitioned: fx.GraphModule, reference: fx.GraphModule
) -> dict[fx.Node, fx.Node]:
    """By calls in a partitioned backward that draw from a state the forward has saved, the call of
    the joint graph that each repeats.

    PyTorch numbers the states in the order of the calls in the joint graph
    (`torch._functorch.partitioners.functionalize_rng_ops`), leaving out those whose results the
    backward does not read. Which those are is not told, so nothing is said where some are missing.
    """
    states: dict[tuple[str, int], fx.Node] = {}
    targets: dict[fx.Node, Any] = {}
    for node in partitioned.graph.nodes:
        call = _random_call(node)
        if call is not None and not is_random(node.target):
            targets[node] = call[0]
            state = node.kwargs.get("rng_state", node.args[0])
            kind, _, number = state.name.rpartition("_")
            if kind not in ("rng_state_output", "bwd_rng_state"):  # a nested region's own
                return {}
            states[kind, int(number)] = node
    calls = [n for n in reference.graph.nodes if _random_call(n) and is_recomputed(n)]
    draws = [states[key] for key in sorted(states)]
    kinds = {kind for kind, _ in states}
    if len(kinds) != 1 or [targets[n] for n in draws] != [n.target for n in calls]:
        return {}
    return dict(zip(draws, calls, strict=True))


def extract_backward(
    joint: JointGraph, partitioned: fx.GraphModule, reference: JointGraph
) -> fx.GraphModule:
    """The backward of `joint` with the inputs of another backward of the same forward.

    What that one's forward has saved is used; other forward values are computed again from it, and
    random numbers drawn again as that one draws them.

    Args:
        joint: traced under the state of the backward that is wanted, without nested regions.
        partitioned: a backward graph of the same region, with whose forward this one must work.
        reference: the joint graph it was partitioned from, which tells what its inputs are.

    Raises:
        BackwardError: the backward needs a forward value that was not saved and cannot be computed
            again.
    """
    numbering = Numbering()
    first_joint, written_out = write_out(reference.graph_module)
    saved_as = saved_nodes(partitioned, reference)
    nodes = {n: written_out[v.name] for n, v in saved_as.items() if v.name in written_out}
    told = trace_of(partitioned)
    values_of_sizes = {
        str(value): value
        for node in reference.graph_module.graph.nodes
        if size_expression(value := node.meta.get("val")) is not None
    }
    known = numbering.of(first_joint)
    graph = fx.Graph()
    inputs: dict[str, fx.Node] = {}
    names: dict[str, fx.Node] = {}
    sizes: dict[Any, fx.Node] = {}
    for placeholder in partitioned.graph.find_nodes(op="placeholder"):
        inputs[placeholder.name] = copy = graph.placeholder(placeholder.name)
        meta = dict(placeholder.meta)
        expression = told.sizes.get(placeholder.name) if told else None
        if expression is not None and values_of_sizes and "val" not in meta:  # out of a cache
            if expression in values_of_sizes:
                meta["val"] = values_of_sizes[expression]
            elif not is_a_number_now(expression, next(iter(values_of_sizes.values()))):
                raise BackwardError(f"the size {expression} that the forward saved is not there")
        size = size_expression(meta.get("val"))
        if size is not None:
            sizes[size] = copy
        source = nodes.get(placeholder.name)
        if source is not None and size not in (None, size_expression(source.meta.get("val"))):
            source = None  # it has the name of another size
        if source is not None:
            _check_same(placeholder, source)
            names[placeholder.name] = source
        copy.meta = meta if source is None else dict(source.meta)
    unpacked: dict[int, fx.Node | None] = {}
    stands_for: dict[int, int] = {}
    unpacking = unpacking_of(partitioned)
    partitioned, _ = write_out(partitioned)
    if unpacking is not None:
        numbers = numbering.of(unpacking.module)
        copies = {p: inputs[p.name] for p in unpacking.module.graph.find_nodes(op="placeholder")}
        graph.graph_copy(unpacking.module.graph, copies)
        for name, node in unpacking.results.items():
            unpacked[known[nodes[name]]] = copies[node] if node else None
            if node:
                stands_for[numbers[node]] = known[nodes[name]]
    saved = {name: known[names[name]] for name in inputs if name in names}
    saved = {name: number for name, number in saved.items() if number not in unpacked}
    values: dict[int, Any] = {number: inputs[name] for name, number in saved.items()}
    values |= {number: node for number, node in unpacked.items() if node is not None}
    repeats = _recomputed_draws(partitioned, first_joint)
    draws = {node: known[call] for node, call in repeats.items()}
    first = numbering.of(partitioned, saved, stands_for, draws)
    drawn = {
        number: node
        for node, number in first.items()
        if _random_call(node)
        and number in known.values()
        and (draws.get(node) == number or number not in numbering.repeated)
    }

    def draw(node: fx.Node) -> fx.Node:
        """Copy from the partitioned graph what draws a random number of the forward again."""
        if node.op == "placeholder":
            return inputs[node.name]
        if first[node] not in values:
            values[first[node]] = graph.node_copy(node, draw)
        return values[first[node]]

    module = joint.graph_module
    numbers = numbering.of(module)
    for node, number in numbers.items():
        # Of calls that give one size, now one and now another is traced first, and stands for all.
        if number not in values and (size := size_expression(node.meta.get("val"))) in sizes:
            values[number] = sizes[size]
        fixed = number_now(node.meta.get("val"))
        if number not in values and fixed is not None:
            values[number] = fixed
    outputs = pytree.arg_tree_leaves(*module.graph.output_node().args)
    gradients = outputs[joint.num_forward_outputs :]
    for node in _needed(module, gradients, numbers, values.keys(), drawn.keys()):
        number = numbers[node]
        if number in drawn:
            draw(drawn[number])
        else:
            values[number] = graph.node_copy(node, lambda n: values[numbers[n]])
    graph.output(tuple(values[numbers[g]] if isinstance(g, fx.Node) else g for g in gradients))
    if unpacked:  # not all of it is needed
        graph.eliminate_dead_code()
    return fx.GraphModule({**_attributes(partitioned), **_attributes(module)}, graph)


def _attributes(module: fx.GraphModule) -> dict[str, Any]:
    """What the `get_attr` nodes of a graph read, by name."""
    return {str(n.target): attribute(module, n) for n in module.graph.find_nodes(op="get_attr")}


def saved_nodes(partitioned: fx.GraphModule, reference: JointGraph) -> Mapping[str, fx.Node]:
    """The nodes of the joint graph that a backward was taken from, by what that calls them.

    Raises:
        BackwardError: `reference`, traced again, is another graph.
    """
    module = reference.graph_module
    trace = trace_of(partitioned)
    if trace is None or trace.after_inductor != reference.after_inductor:
        return {node.name: node for node in module.graph.nodes}
    again = Trace.of(module, reference.after_inductor, as_dynamic=trace.dynamic)
    if again.digest != trace.digest:
        raise BackwardError(
            "traced again, its forward is another one: it hangs on more than its inputs, on a "
            "setting or a variable that has changed meanwhile"
        )
    names = list(again.nodes)
    nodes = {node.name: node for node in module.graph.nodes}
    return {name: nodes[names[place]] for name, place in trace.nodes.items()}


def _check_same(placeholder: fx.Node, source: fx.Node) -> None:
    """Without a trace there are names alone. Should they have shifted, the value is likely to be
    another kind of value."""
    was, now = placeholder.meta.get("val"), source.meta.get("val")
    if isinstance(was, torch.Tensor) and (
        not isinstance(now, torch.Tensor) or (was.dtype, was.ndim) != (now.dtype, now.ndim)
    ):
        raise BackwardError(f"what the forward saved as {placeholder.name} is not there any more")


def _needed(
    module: fx.GraphModule,
    gradients: Sequence[Any],
    numbers: Mapping[fx.Node, int],
    saved: Collection[int],
    drawn: Collection[int],
) -> list[fx.Node]:
    """What must be computed for `gradients` besides what is `saved`, in order."""
    pending = [g for g in gradients if isinstance(g, fx.Node)]
    pending += [n for n in module.graph.nodes if in_backward(n) and _has_effect(n)]
    firsts: dict[int, fx.Node] = {}
    for node in module.graph.nodes:
        firsts.setdefault(numbers[node], node)
    needed: set[fx.Node] = set()
    while pending:
        node = firsts[numbers[pending.pop()]]
        if numbers[node] in saved or node in needed:
            continue
        needed.add(node)
        if numbers[node] in drawn:
            continue
        drawn_once = _random_call(node) or node.target is run_and_save_rng_state
        if node.op == "placeholder" or (drawn_once and not in_backward(node)):
            raise BackwardError(f"the forward did not save {node.name}, which the backward reads")
        pending += node.all_input_nodes
    return [node for node in module.graph.nodes if node in needed]


def _has_effect(node: fx.Node) -> bool:
    return node.op == "call_function" and node.is_impure()
