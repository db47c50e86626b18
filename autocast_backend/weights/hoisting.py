"""Take the casts of weights out of a lowered graph.

    def graph(w, b, x):                          def graph(x, w_cast, b_cast):
        w_cast = autocast_to_bf16(w)                 x_cast = autocast_to_bf16(x)
        b_cast = autocast_to_bf16(b)                 return linear(x_cast, w_cast, b_cast)
        x_cast = autocast_to_bf16(x)
        return linear(x_cast, w_cast, b_cast)

A weight is what eager autocast caches the cast of, a float32 leaf that requires grad; with
weight_cache="version" also a frozen parameter or a buffer. Eager autocast reads those anew in every
call, and so sees what is written to them in ways that PyTorch does not count.

Left alone: casts inside the bodies of checkpoints, which are to be made again in the backward pass;
weights that the graph writes to, computes gradients with respect to, or reads in ways that a
gradient from outside would not add up with as in eager mode; tensor subclasses; what FSDP manages,
whose tensors are filled anew behind the same version; casts that a call writes to or returns, where
each call has one of its own in eager mode.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._torch.autocast import disable_autocast
from .._torch.dynamo_graphs import (
    input_name,
    is_functorch_call,
    is_higher_order_op,
    is_static_input,
    keep_static_inputs,
    runs_backward,
)
from .._torch.fake_tensors import fake_inputs, fake_mode_of
from .._torch.formulas import grad_fn_of
from .._torch.fsdp import managed_by_fsdp
from .._torch.guards import guard_leaf_and_view
from .._torch.tensors import is_of_transform, is_plain_tensor
from .._torch.writes import hidden_writes, written_inputs
from ..graphs import copy_graph, is_recorded, names_of
from ..lowering.bodies import Bodies
from ..lowering.proving import written_and_returned
from ..lowering.writing import CACHED
from ..ops.smart_casts import SMART_CASTS
from ..reports.report import WeightCast
from ..validation.compare import is_weight
from .cache import fsdp_error

_FSDP = "FSDP manages it, and fills it anew without counting that"


@dataclass(frozen=True)
class Hoisted:
    """A graph whose weights are cast outside of it.

    Attributes:
        graph_module: takes the arguments of `kept`, of `older` and of `newer`, then the casts.
        inputs: fake inputs of it.
        arguments: fake inputs of the original graph.
        kept: which arguments of the original graph it takes.
        weights: which arguments of the original graph are cast.
        dtypes: to what, for each of `weights`.
        grads: whether autograd records the cast, for each of `weights`.
        static: whether it is a parameter or a buffer, for each of `weights`. A leaf that requires
            grad and is neither may be an activation, which the next call has other values in.
        older: which arguments of the original graph get a gradient through their cast, and another
            one from a call before the first that reads the cast; once for each such call. They
            are taken, again, after those of `kept`.
        newer: the same for later calls, taken after those of `older`.
    """

    graph_module: fx.GraphModule
    inputs: list[Any]
    arguments: list[Any]
    kept: tuple[int, ...]
    weights: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]
    static: tuple[bool, ...]
    older: tuple[int, ...]
    newer: tuple[int, ...]


def weight_casts(
    graph_module: fx.GraphModule, inputs: Sequence[Any], *, lasting: bool
) -> tuple[dict[fx.Node, int], list[WeightCast]]:
    """The casts of weights in a lowered graph that can leave it, each with the number of the
    argument it casts; and all casts of weights, for the report: those that cannot say why.

    Args:
        lasting: whether casts are kept across scopes (`weight_cache="version"`).

    Raises:
        WeightCacheError: they are `lasting` and FSDP manages a weight.
    """
    taken: dict[fx.Node, int] = {}
    told: list[WeightCast] = []
    weights: dict[fx.Node, str] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    written = [*written_inputs(graph_module, inputs).values()]
    recorded = is_recorded(graph_module)
    for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        casts = [reader for reader in _readers(node) if _is_lowering_cast(reader)]
        if casts and node.meta["example_value"].requires_grad and value.dtype is torch.float32:
            guard_leaf_and_view(node, value)
        if not _is_weight(node, value):
            continue
        weights[node] = input_name(node)
        if not casts:
            continue
        reason = _why_not(value, written)
        if reason is None and recorded:
            reason = _why_not_with_grad(node, casts)
        if lasting and reason == _FSDP:
            raise fsdp_error(input_name(node))
        for cast in casts:
            inside = reason or _why_not_this_cast(cast, lasting=lasting)
            dtype = cast.meta["example_value"].dtype
            told.append(WeightCast(input_name(node), dtype, inside, cast.name))
            if inside is None:
                taken[cast] = i
    told += _casts_in_bodies(graph_module, weights, names_of(graph_module))
    return taken, told


def _casts_in_bodies(
    module: fx.GraphModule, weights: Mapping[fx.Node, str], names: Mapping[fx.Node, str]
) -> Iterator[WeightCast]:
    """The casts of weights in the bodies of a graph, for the report.

    Args:
        weights: the inputs of the graph that are, and their names.
        names: those of all nodes.
    """
    bodies = Bodies(module)
    for node in module.graph.nodes:
        inputs = {i: weights[o] for i, o in bodies.operands(node).items() if o in weights}
        for weight, name in inputs.items():
            for cast in filter(_is_lowering_cast, weight.users):
                inside = f"the body of {node.target} casts it"
                yield WeightCast(name, cast.meta["example_value"].dtype, inside, names[cast])
        if inputs:
            yield from _casts_in_bodies(bodies.of(node).module, inputs, names)  # type: ignore[union-attr]


def hoist(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    casts: dict[fx.Node, int],
) -> Hoisted:
    """A copy of the graph that takes `casts` in as arguments.

    Args:
        casts: as `weight_casts` found them.
    """
    names = {cast.name: i for cast, i in casts.items()}
    older, newer = _reads_with_gradient(graph_module, casts)
    module = copy_graph(graph_module)
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    # Dynamo of torch 2.11 writes some after calls: the sizes that a hook on a tensor is given.
    first_call = next(node for node in graph.nodes if node.op != "placeholder")
    for node in placeholders:
        first_call.prepend(node)
    fakes = fake_inputs(inputs)
    last = placeholders[-1]
    named = {node.name: node for node in graph.nodes}
    for name, i in older + newer:
        weight = placeholders[i].meta["example_value"]
        with graph.inserting_after(last):
            last = graph.placeholder(f"{placeholders[i].name}_of_{name}")
        last.meta = {k: v for k, v in placeholders[i].meta.items() if k in _META_OF_INPUTS}
        last._dynamo_source = None
        reader = named[name]
        for source in reader.all_input_nodes:
            if source.meta.get("example_value") is weight:
                reader.replace_input_with(source, last)
    weights: list[int] = []
    values: list[Any] = []
    same: dict[tuple[int, torch.dtype], fx.Node] = {}
    for node in _in_eagers_order([n for n in graph.nodes if n.name in names]):
        i, result = names[node.name], node.meta["example_value"]
        operand = None if result.requires_grad else same.get((i, result.dtype))
        if operand is None:
            with graph.inserting_after(last):
                operand = last = graph.placeholder(f"{node.name}_outside")
            operand.meta = {k: v for k, v in node.meta.items() if k != "nn_module_stack"}
            # The cast of a static input is static, too: it is there anyway, so that saving it for
            # the backward costs nothing, and for CUDA graphs `GraphWeights` keeps its address.
            operand.meta["tensor_dict"] = placeholders[i].meta.get("tensor_dict", {})
            operand._dynamo_source = None
            weights.append(i)
            values.append(_leaf_like(fakes[i], result))
            if not result.requires_grad:  # else each region has gradients of its own
                same[i, result.dtype] = operand
        node.replace_all_uses_with(operand)
        graph.erase_node(node)
    cast = set(weights)
    kept = [i for i, node in enumerate(placeholders) if node.users or i not in cast]
    for i in cast.difference(kept):
        graph.erase_node(placeholders[i])
    keep_static_inputs(module, graph_module)
    module.recompile()
    return Hoisted(
        graph_module=module,
        inputs=[fakes[i] for i in kept]
        + [_leaf_like(fakes[i], fakes[i]) for _, i in older + newer]
        + values,
        arguments=fakes,
        kept=tuple(kept),
        weights=tuple(weights),
        dtypes=tuple(v.dtype for v in values),
        grads=tuple(v.requires_grad for v in values),
        static=tuple(_is_static(placeholders[i], inputs[i]) for i in weights),
        older=tuple(i for _, i in older),
        newer=tuple(i for _, i in newer),
    )


_META_OF_INPUTS = ("example_value", "tensor_dict")


def _reads_with_gradient(
    graph_module: fx.GraphModule, casts: dict[fx.Node, int]
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The calls, by name, that read a weight without a cast and give it a gradient, beside a cast
    that gives it one: those before the first that reads the cast, and those after it. Each gets a
    node of its own outside of the graph, or the gradients of several would come as one sum."""
    places = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    cast_at: dict[int, int] = {}
    for cast, i in casts.items():
        if cast.meta["example_value"].requires_grad:
            first = min(places[user] for user in cast.users)
            cast_at[i] = min(first, cast_at.get(i, first))
    reads: list[tuple[int, int, str, int]] = []
    for i in cast_at:
        weight = placeholders[i].meta["example_value"]
        for reader in _readers(placeholders[i]):
            if reader not in casts and _terms(reader, weight):
                values = [id(node.meta.get("example_value")) for node in reader.all_input_nodes]
                # of one call, the last argument's first, as with casts
                reads.append((places[reader], -values.index(id(weight)), reader.name, i))
    reads.sort()
    older = [(name, i) for place, _, name, i in reads if place < cast_at[i]]
    newer = [(name, i) for place, _, name, i in reads if place >= cast_at[i]]
    return older, newer


def _in_eagers_order(casts: list[fx.Node]) -> list[fx.Node]:
    """Casts in the order in which eager autocast makes them, which decides the order in which their
    gradients get ready: call by call, and those of one call as they stand in the graph."""
    places = {node: i for i, node in enumerate(casts[0].graph.nodes)} if casts else {}
    return sorted(casts, key=lambda c: (min(places[user] for user in c.users), places[c]))


_LOWERING_CASTS = tuple(
    getattr(torch.ops.smart_autocast, name).default
    for name in ("autocast_to_fp16", "autocast_to_bf16", "autocast_to_reduced_precision")
)

_PROMOTE = torch.ops.smart_autocast.promote.default


def _is_lowering_cast(node: fx.Node) -> bool:
    if node.target not in _LOWERING_CASTS:
        return False
    argument = node.args[0].meta.get("example_value")  # type: ignore[union-attr]
    result = node.meta.get("example_value")  # None inside a torch.func transform
    return argument is not None and result is not None and result.dtype is not argument.dtype


def _is_weight(node: fx.Node, value: Any) -> bool:
    """Whether an input is a weight; activations are not."""
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return False
    return is_weight(value) or _is_static(node, value)


def _is_static(node: fx.Node, value: Any) -> bool:
    """Whether an input is a parameter or a buffer."""
    return isinstance(value, torch.nn.Parameter) or is_static_input(node)


def _why_not(value: torch.Tensor, written: Sequence[torch.Tensor]) -> str | None:
    """Why the casts of a weight stay in the graph; None where they need not."""
    if not is_plain_tensor(value) and fake_mode_of([value]) is None:
        return f"it is a tensor subclass, {type(value).__name__}"
    if value.is_inference():
        return "it was made in inference mode, where PyTorch does not count what is written to it"
    if managed_by_fsdp([value]):
        return _FSDP
    storage = value.untyped_storage()._cdata
    if any(storage == other.untyped_storage()._cdata for other in written):
        return "the graph writes to its memory"
    return None


def _why_not_this_cast(cast: fx.Node, *, lasting: bool) -> str | None:
    if not cast.users:
        return "no call reads it"
    if CACHED not in cast.meta:
        if cast.meta["example_value"].requires_grad:
            return "eager autocast does not cache it"
        if not lasting:
            return 'eager autocast does not cache it, weight_cache="version" does'
    if lasting and _is_handed_out(cast):
        return "a call writes to the cast, or it is returned"
    return None


def _is_handed_out(cast: fx.Node) -> bool:
    """Whether the graph returns a cast, or a call that reads it writes to its memory or returns it
    to others who may, as ops of users do. Later calls would read what was written.

    Args:
        cast: or the input of a body that is one.
    """
    return any(_hands_out(reader, cast) for reader in cast.users)


def _hands_out(reader: fx.Node, cast: fx.Node) -> bool:
    if reader.op == "output" or is_functorch_call(reader.target):
        return True
    if is_higher_order_op(reader.target):
        bodies = Bodies(reader.graph.owning_module)  # type: ignore[arg-type]
        inputs = [i for i, operand in bodies.operands(reader).items() if operand is cast]
        return not inputs or any(map(_is_handed_out, inputs))
    # What does not run without autocast is in a bracket, and its casts are those that eager keeps.
    fake_mode = fake_mode_of([cast.meta["example_value"]])
    written, returned = written_and_returned(reader, None, fake_mode)
    return cast in written or cast in returned or cast in hidden_writes(reader)


def _why_not_with_grad(node: fx.Node, casts: Sequence[fx.Node]) -> str | None:
    """Each call that reads a weight gets it from a node of its own, so that its gradient reaches
    the weight by itself, as in eager mode. One that reads it twice would hand in a sum."""
    weight = node.meta["example_value"]
    if not weight.requires_grad:
        return None
    others = [reader for reader in _readers(node) if reader not in casts]
    if any(runs_backward(reader.target) for reader in others):
        return "the graph computes gradients with respect to it"
    recorded = any(cast.meta["example_value"].requires_grad for cast in casts)
    if any(_hands_on(r, weight) or (recorded and _terms(r, weight) > 1) for r in others):
        return "read without a cast, too, its gradients would add up in another order"
    return None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that read a tensor. One that returns it as it is - `w.float()` of a float32 `w` -
    stands for those that read its result, and so does `promote`, which returns it among others."""
    value = node.meta.get("example_value")
    for user in node.users:
        if value is not None and user.meta.get("example_value") is value:
            yield from _readers(user)
        elif value is not None and user.target is _PROMOTE and "example_value" in user.meta:
            for result in user.users:
                if result.meta.get("example_value") is value:
                    yield from _readers(result)
        else:
            yield user


def _terms(reader: fx.Node, weight: torch.Tensor) -> int:
    """How many gradients a call hands to a weight: one for each time it reads it, and inside of
    `w @ w` or `F.normalize(w)` that is twice. What a call writes to has its gradient's function
    from the last write: there all reads before and after it count, which may be too many."""
    given = [value for n in _inputs_and_what_they_cast(reader) for value in _tensors(n)]
    results = _results(reader) or []
    written = set(map(id, results))
    before = {grad_fn_of(value) for value in given if id(value) not in written}
    calls = [grad_fn_of(value) for value in results]
    seen: set[Any] = set()
    terms = 0
    while calls:
        call = calls.pop()
        if call is None or call in before or call in seen:
            continue
        seen.add(call)
        for earlier, _ in call.next_functions:
            if getattr(earlier, "variable", None) is weight:
                terms += 1
            else:
                calls.append(earlier)
    return terms


def _inputs_and_what_they_cast(reader: fx.Node) -> list[fx.Node]:
    """What a call takes, and what lowering casts for it: a result from before lowering goes back to
    what was cast by a cast of its own."""
    inputs = list(reader.all_input_nodes)
    for node in inputs:
        for maker in node.all_input_nodes if node.target is operator.getitem else [node]:
            if maker.target in SMART_CASTS:
                inputs += maker.all_input_nodes
    return inputs


def _results(reader: fx.Node) -> list[torch.Tensor] | None:
    """The tensors that a call gives, or that it writes to: `x[:] = w` gives none. None where nobody
    knows, as of a cast inside a torch.func transform."""
    if reader.target is operator.setitem:
        reader = reader.args[0]  # type: ignore[assignment]
    return None if reader.meta.get("example_value") is None else _tensors(reader)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _hands_on(reader: fx.Node, weight: torch.Tensor) -> bool:
    """Whether nobody knows how often a call reads a weight, or it gives it to other readers, whose
    gradients the weight gets."""
    results = _results(reader)
    if is_higher_order_op(reader.target) or results is None:
        return True
    storage = weight.untyped_storage()._cdata
    return any(
        is_of_transform(result)
        or (result.requires_grad and result.untyped_storage()._cdata == storage)
        for result in results
    )


def _leaf_like(weight: Any, cast: Any) -> Any:
    """A fake tensor for the cast of a fake weight, in the mode the inner compiler traces with."""
    with fake_mode_of([weight]), torch.no_grad(), disable_autocast():  # type: ignore[union-attr]
        return weight.detach().to(cast.dtype).requires_grad_(cast.requires_grad)
