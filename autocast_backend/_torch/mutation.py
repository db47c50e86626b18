"""AOTAutograd's graphs that write to tensors, as they are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import _prims_common as prims
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from .fake_tensors import is_known
from .memory import overlaps_by_symbols
from .ops import arguments_of
from .patches import replaced


@contextlib.contextmanager
def outputs_in_their_places() -> Iterator[None]:
    """Have a graph return what it computes where it writes to two inputs, to one of them by the
    hand of its caller. If it returns the other one, AOTAutograd of torch before 2.15 puts that in
    the place of an output some places before: of what is written to the first, or of a result.

        buffer += 1                  written in the graph, and returned by Dynamo's
        return layer(h.relu_())      h requires grad: written after the graph has run

    What an output that is an input holds is not looked at, so it may as well be a copy.
    """
    from torch._functorch._aot_autograd import graph_capture, graph_capture_wrappers

    kinds: Any = graph_capture_wrappers
    original = vars(graph_capture)["create_functionalized_fn"]

    def apart(meta: Any, output: Any) -> Any:
        if output.output_type != kinds.OutputType.is_input or output.base_idx is None:
            return output
        if meta.input_info[output.base_idx].mutation_type != kinds.MutationType.MUTATED_IN_GRAPH:
            return output
        return replace(output, output_type=kinds.OutputType.non_alias)

    def create_functionalized_fn(*args: Any, meta: Any, **kwargs: Any) -> Any:
        if meta.mutated_inp_runtime_indices:
            outputs = [apart(meta, output) for output in meta.output_info]
            meta = copy.copy(meta)
            meta.output_info = outputs
        return original(*args, meta=meta, **kwargs)

    with replaced(graph_capture, "create_functionalized_fn", create_functionalized_fn):
        yield


@contextlib.contextmanager
def views_of_what_they_are() -> Iterator[None]:
    """Have a graph return views as such of what they are views of, where AOTAutograd makes one
    input of several, as they overlap and the graph writes to one. Outside of the graph it makes
    views anew, then of something else than in the graph:

        x.mul_(3); return y.t()      x, y = base[:2], base.t(): returned is base.t(). Without the
                                     calls of the view, AOTAutograd reads its size and strides.
        z = y @ y; return v, z.t()   the number of z, among results, is taken for that of an input
    """
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._functorch._aot_autograd.schemas import OutputType as kinds

    original = vars(runtime_wrappers)["create_synthetic_base_metadata"]

    def create_synthetic_base_metadata(meta: Any, bases: Sequence[Any], *args: Any) -> Any:
        def without_calls(output: Any) -> Any:
            if output.output_type not in (kinds.alias_of_input, kinds.is_input):
                return replace(output, base_idx=None)
            is_moved = not isinstance(bases[output.base_idx], int)
            return replace(output, view_meta_sequence=None) if is_moved else output

        before = meta.output_info
        meta = copy.copy(meta)
        meta.output_info = [without_calls(output) for output in before]
        merged, *others = original(meta, bases, *args)
        for i, output in enumerate(before):
            if meta.output_info[i].base_idx is None:
                merged.output_info[i] = output
        return merged, *others

    with replaced(
        runtime_wrappers, "create_synthetic_base_metadata", create_synthetic_base_metadata
    ):
        yield


@contextlib.contextmanager
def strides_kept() -> Iterator[None]:
    """Have a tensor keep its strides when a graph writes to it. AOTAutograd computes what it holds
    from then on with an op that may return other strides:

        t = x.t(); t.masked_fill_(mask, 0)     strides (1, 4)
        t_1 = masked_fill(t, mask, 0)          (4, 1), so that t_1.flatten() is a view
    """
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    original = FunctionalTensorMode.__torch_dispatch__

    def dispatch(self: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = original(self, op, types, args, kwargs)
        if isinstance(op, OpOverload) and op._schema.is_mutable:
            for tensor in _written(op, args, kwargs or {}):
                if isinstance(tensor, FunctionalTensor):
                    _put_strides_back(tensor)
        return result

    with replaced(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


def _written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    given = {**dict(zip((a.name for a in arguments_of(op)), args, strict=False)), **kwargs}
    written = [a.name for a in arguments_of(op) if a.is_write]
    return pytree.tree_leaves([given.get(name) for name in written])


def _put_strides_back(tensor: Any) -> None:
    """Order the memory of what a functional tensor holds as that of the tensor."""
    from torch.fx.experimental.symbolic_shapes import sym_eq

    value = tensor.from_functional()
    if not (
        prims.is_non_overlapping_and_dense_or_false(tensor)
        and is_known(sym_eq(value.shape, tensor.shape))
    ):
        return
    if is_known(sym_eq(value.stride(), tensor.stride())):
        return
    order, _ = prims.compute_elementwise_output_logical_to_physical_perm(tensor)
    ordered = value.permute(order).contiguous()
    back = [order.index(i) for i in range(len(order))]
    tensor.replace_(ordered.permute(back))
    tensor.commit_update()
    tensor.sync()


@contextlib.contextmanager
def writes_right() -> Iterator[None]:
    """Have AOTAutograd compile graphs that write to tensors as they are."""
    with (
        outputs_in_their_places(),
        views_of_what_they_are(),
        overlaps_by_symbols(),
        strides_kept(),
    ):
        yield
