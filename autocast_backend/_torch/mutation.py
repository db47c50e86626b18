"""AOTAutograd's graphs that write to inputs, as they are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .memory import overlaps_by_symbols
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
def writes_to_inputs_right() -> Iterator[None]:
    """Have AOTAutograd compile graphs that write to inputs as they are."""
    with outputs_in_their_places(), views_of_what_they_are(), overlaps_by_symbols():
        yield
