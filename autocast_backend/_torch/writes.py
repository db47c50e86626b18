"""Writes to tensors that their version counters do not show, and that PyTorch has no hooks for; or
that those of fake tensors do not show."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from ..graphs import nodes_of
from .dynamo import never_traced
from .dynamo_graphs import gives_data_attribute
from .ops import arguments_of, overloads_of
from .tensors import storages_of

Told = Callable[[Iterable[torch.Tensor]], None]
ToldReceived = Callable[[Sequence[torch.Tensor], Sequence[Any]], None]
"""Called with tensors, and with the works (`torch.distributed.Work`) that go on writing to them."""


def watch_hidden_writes(told: Told) -> None:
    """From now on, call `told` with the tensors of every block that hides what it writes to them.

    DDP sends buffers in one, before each forward, and FSDP gathers weights in some. Dynamo knows
    the class, and does not trace its methods.
    """
    exit_block = _unsafe_preserve_version_counter.__exit__

    @never_traced
    def exit_and_tell(self: Any, *args: Any) -> None:
        exit_block(self, *args)
        told(self.tensors)

    _unsafe_preserve_version_counter.__exit__ = exit_and_tell  # type: ignore[method-assign]


RECEIVING = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "gather_into_tensor_",  # of torch 2.15
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)
"""The ops of `torch.distributed` that write to tensors: to those of their first argument."""


def watch_collectives(told: ToldReceived) -> None:
    """From now on, call `told` with the tensors that a process receives from others.

    Their schemas do not say that they write, so PyTorch does not count it. A kernel where it would.
    """
    if not torch.distributed.is_available():
        return
    for name in RECEIVING:
        if hasattr(torch.ops.c10d, name):  # not all versions of PyTorch have all
            op = getattr(torch.ops.c10d, name).default
            kernel = functools.partial(_receive, told, op)
            _library().impl(name, kernel, "ADInplaceOrView", with_keyset=True)


@never_traced
def _receive(
    told: ToldReceived, op: Any, keys: Any, received: Any, *args: Any, **arguments: Any
) -> Any:
    results = op.redispatch(
        keys & torch._C._after_ADInplaceOrView_keyset, received, *args, **arguments
    )
    tensors = pytree.tree_leaves(received)
    told(tensors, _works_of(results) if all(t.is_cpu for t in tensors) else [])
    return results


def _works_of(results: Any) -> list[Any]:
    """What goes on after a call of an op of `torch.distributed`, by what it returned. For the CPU
    alone: on a GPU a work is not done before its stream is, whose order nobody else can see."""
    boxed = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.ScriptObject)]
    works = map(torch._C._distributed_c10d.Work.unbox, boxed)
    return [work for work in works if work is not None and not work.is_completed()]


@functools.cache
def _library() -> torch.library.Library:
    """The kernels are there as long as this is."""
    return torch.library.Library("c10d", "IMPL")


_STATISTICS = ("running_mean", "running_var")


def hidden_writes(node: fx.Node) -> list[fx.Node]:
    """The arguments of a call in Dynamo's graph to whose memory it may write, itself or through
    what it returns, without their fake tensors counting it."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name.partition(".")[0]  # without an overload
    if "batch_norm" in name:  # to the running statistics, of which most schemas do not tell
        is_first = isinstance(target, types.FunctionType) or name == "batch_norm_update_stats"
        first = 1 if is_first else 3  # `F.batch_norm`, or ATen's
        found = (*node.args[first : first + 2], *map(node.kwargs.get, _STATISTICS))
        always = "update" in name or "gather" in name
        training = always or True in (*node.args, *node.kwargs.values())
        return [n for n in found if training and isinstance(n, fx.Node)]
    in_place = name.endswith("_") and name.startswith(("_foreach_", "_fused_", "_amp_"))
    hides = (
        in_place
        or name in ("set_", "triton_kernel_wrapper_mutation")
        or gives_data_attribute(target)
        or any(_writes(node, op) for op in overloads_of(target) or _of_function(target))
    )
    return node.all_input_nodes if hides else []


def _of_function(target: Any) -> tuple[torch._ops.OpOverload, ...]:
    """The ops of ATen that a function of `torch` calls, but for those whose name says that they
    write, which is counted."""
    name = target.__name__ if isinstance(target, types.BuiltinFunctionType) else "_"
    return () if name.endswith("_") else overloads_of(getattr(torch.ops.aten, name, None))


def _writes(node: fx.Node, op: torch._ops.OpOverload) -> bool:
    """Whether an op writes to arguments that a call gives it, by its schema."""
    written = (a for a in arguments_of(op) if a.is_write)
    return any(not a.kwarg_only or node.kwargs.get(a.name) is not None for a in written)


def written_inputs(
    graph_module: fx.GraphModule, inputs: Sequence[Any]
) -> dict[fx.Node, torch.Tensor]:
    """The inputs of Dynamo's graph that it may write to, with their fake tensors.

    Args:
        inputs: the fake tensors of all inputs.
    """
    nodes = graph_module.graph.find_nodes(op="placeholder")
    hidden = _storages_of_hidden_writes(graph_module)
    made_so = _made_with_a_write(inputs)
    return {
        node: value
        for node, value in zip(nodes, inputs, strict=True)
        if _is_written(node, value, hidden, id(value) in made_so)
    }


def _is_written(node: fx.Node, value: Any, hidden: set[int], made_so: bool) -> bool:
    """Whether a graph writes to an input: the version of its fake tensor counts most writes, also
    those through views.

    Args:
        hidden: the storages of fake tensors that may be written to without a count.
        made_so: whether the fake tensor was made with a write.
    """
    fake = node.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    return fake._version > made_so or not hidden.isdisjoint(storages_of([fake]))


def _made_with_a_write(inputs: Sequence[Any]) -> set[int]:
    """The inputs, by their id, whose fake tensors PyTorch makes with `set_`, which counts as a
    write (`MetaConverter.meta_tensor`): they, or what they are views of, begin inside of their
    storage, or an input before them has that storage, too, and counts for itself.

    Where Dynamo met them in another order, one of them passes for written, and so do all.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    owners = [value if value._base is None else value._base for value in tensors]
    seen: set[int] = set()
    made_so = set()
    for owner in {id(owner): owner for owner in owners}.values():
        offset = owner.storage_offset() if owner.layout is torch.strided else 0
        storages = storages_of([owner])
        if (isinstance(offset, int) and offset > 0) or storages & seen:
            made_so.add(id(owner))
        seen |= storages
    return {id(v) for v, owner in zip(tensors, owners, strict=True) if id(owner) in made_so}


def _storages_of_hidden_writes(graph_module: fx.GraphModule) -> set[int]:
    calls = [node for node in nodes_of(graph_module) if node.op.startswith("call")]
    written = [argument for call in calls for argument in hidden_writes(call)]
    values = pytree.tree_leaves([argument.meta.get("example_value") for argument in written])
    return storages_of(value for value in values if isinstance(value, torch.Tensor))
