"""The backend: what `torch.compile(model, backend="smart_autocast")` calls, in order of
execution."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import _logging
from ._torch.aot import training_graphs
from ._torch.autocast import wrap_with_autocast
from ._torch.checkpoints import (
    checkpoints_as_in_eager,
    marked_in_checkpoints,
    nothing_recomputed,
)
from ._torch.configs import (
    backward_traced_off,
    kernels_of_attention,
    own_cache_entries,
    scales_convolutions,
)
from ._torch.dynamo import (
    counters,
    graph_break_errors,
    keep_out_of_packages,
    lookup_backend,
    pass_through_error,
    timed,
    without_disable,
)
from ._torch.dynamo_graphs import composites_in_bodies_taken_apart, is_nested_region
from ._torch.fake_tensors import fake_inputs
from ._torch.guards import guard_value
from ._torch.higher_order import kernels_closed_in_gradients
from ._torch.inductor import inductor_put_right
from ._torch.joint_graphs import traced_right
from ._torch.kernels import kernels_opened
from ._torch.memory import guard_overlaps
from ._torch.ops import chooses_attention
from ._torch.partitioning import calls_apart, marks_heeded
from ._torch.predictions import kernels_predicted
from ._torch.returned_views import views_without_gradients
from ._torch.traces import traces_noted
from ._torch.whole_ops import ops_kept_whole
from .backward.joint_passes import save_random_numbers, save_what_is_compared
from .backward.nested import write_out
from .backward.region import Assumption, Region
from .custom_ops import first_run_watched
from .graphs import (
    check_graph_module,
    copy_graph,
    is_recorded,
    made_in,
    names_of,
    nodes_of,
)
from .lowering.bodies import inference_modes_as_no_grad
from .lowering.context import Context
from .lowering.lower import lower
from .lowering.propagate import propagate
from .lowering.separate import separate_bodies
from .options import Options, OptionTypeError, parse_options
from .policies.modules import bind
from .regions import call_name, dtypes_taken_over, hops_to_regions, source_line, state_changes
from .reports.breaks import warn_of_breaks
from .reports.telling import tell, trace
from .running import (
    changing_state,
    for_dtypes,
    putting_right_after_errors,
    with_autocast_off,
    with_views_without_gradients,
)
from .state import AutocastState, outside_of_contexts, put_right_after_errors
from .weights.plan import WeightPlan

log = _logging.log
_logging.register()

Inner = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

listeners: list[Callable[[fx.GraphModule, Context], Inner | None]] = []
"""Called with each graph once it is lowered, before anything else is done with it. What one returns
compiles the graph in the inner compiler's place."""


class NotCompiledError(pass_through_error(), RuntimeError):  # type: ignore[misc]
    """A graph that cannot be compiled, and that Dynamo would run in Python without the options that
    change its results. Reaches the user as a `RuntimeError`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)  # type: ignore[call-arg]


@put_right_after_errors()
def smart_autocast(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: lower its autocast regions, then hand it to the inner compiler.

    Args:
        graph_module: Dynamo's graph. It is changed in place, as Dynamo's backends may.
        example_inputs: the graph's inputs.
        mode: as in `torch.compile`; needs `inner="inductor"`.
        options: a dict of the fields of `autocast_backend.options.Options`, which says what each
            means.

    Returns:
        The compiled graph. It computes what the graph computes under the autocast state of this
        moment, which Dynamo guards on, whatever the state is when it runs.

    Raises:
        TypeError: `graph_module` is no graph; `torch.compile` makes one of a model.
        OptionValueError, OptionTypeError: before any work, for options that cannot be.
        PolicyError: an override that names no module, or that a call cannot take.
        RegionError: the graph's autocast regions do not nest; or, at a call, the dtype that a
            region without one was compiled for is no longer autocast's.
        NotCompiledError: with the option `autocast` or `policies`, errors of fake tensors at which
            Dynamo would leave the graph to Python.
    """
    check_graph_module(graph_module)
    parsed = parse_options(options, mode)
    try:
        return _compile(graph_module, example_inputs, parsed)
    except graph_break_errors() as error:
        given = [name for name in ("autocast", "policies") if getattr(parsed, name)]
        if not given:
            raise
        raise NotCompiledError(
            f"a graph cannot be compiled: {type(error).__name__}: {error}. Python would run it "
            f"without the options {given}; leave its code out of what is compiled, or write the "
            "regions into the code"
        ) from error


warn_of_breaks(smart_autocast)


def _compile(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], parsed: Options
) -> Callable[..., Any]:
    keep_out_of_packages(graph_module)
    if any(chooses_attention(node.target) for node in nodes_of(graph_module)):
        guard_value(kernels_of_attention, "sdpa_kernel")
    guard_overlaps(graph_module, example_inputs)
    now = AutocastState.current()
    context = Context(
        ambient=now.inside(parsed.autocast),
        validate=parsed.validate,
        overrides=bind(parsed.policies, graph_module),
        may_stay_eager=not (parsed.autocast or parsed.policies)
        and parsed.backward_pass_autocast == "auto",
    )
    report = context.report
    with timed("lower"):
        if any(n.target is wrap_with_autocast for n in nodes_of(graph_module)):
            graph_module, _ = hops_to_regions(graph_module)
        changes = state_changes(graph_module.graph)
        unrecorded = views_without_gradients(graph_module)
        dtypes = dtypes_taken_over(graph_module, now, parsed.autocast)
        separate_bodies(graph_module, context.outside, torch.is_grad_enabled())
        if parsed.autocast or parsed.policies:
            graph_module = propagate(graph_module, context)
        graph_module = lower(graph_module, context)
    if report.keepers:
        return _left_eager(graph_module, context)
    if report.mistraced:
        call = call_name(_named(graph_module, report.mistraced[0]))
        rnn = ", or switch Dynamo's config allow_rnn off" if "lstm" in call else ""
        raise NotCompiledError(
            f"{call} cannot be compiled under autocast: {_MISTRACED}. Leave its code out of what "
            f"is compiled (torch.compiler.disable){rnn}, or the options 'autocast', 'policies' and "
            "'backward_pass_autocast', without which such a graph runs as in eager mode"
        )
    if report.bracketed:
        inference_modes_as_no_grad(graph_module, torch.is_grad_enabled())
        composites_in_bodies_taken_apart(graph_module)
    with report.timed("weights"):
        plan = WeightPlan(
            graph_module,
            example_inputs,
            weight_cache=parsed.weight_cache,
            ambient=now,
            inductor=parsed.inductor if parsed.inner == "inductor" else None,
            report=report,
        )
    tell(graph_module, context)
    trace(graph_module, context)
    inner = _inner(parsed, autocast=bool(report.nodes or report.overridden))
    for listener in listeners:
        inner = listener(graph_module, context) or inner

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(report.timed("inner"))
            if is_recorded(module):
                region = _region(module, inputs, inner, parsed, context.ambient)
                stack.enter_context(training_graphs(region.follow_autocast))
                note = stack.enter_context(traces_noted())
                stack.enter_context(backward_traced_off(region.keep_in_backward, note))
                stack.enter_context(marks_heeded(save_random_numbers, save_what_is_compared))
                stack.enter_context(kernels_closed_in_gradients())
            stack.enter_context(nothing_recomputed(nodes_of(module)))
            stack.enter_context(own_cache_entries(nodes_of(module), inputs))
            stack.enter_context(traced_right())
            stack.enter_context(calls_apart())
            stack.enter_context(outside_of_contexts())
            stack.enter_context(kernels_opened())
            compiled = inner(module, inputs)
        if not callable(compiled):
            raise OptionTypeError(
                "option 'inner': expected a callable (graph_module, example_inputs) -> callable; "
                f"{parsed.inner!r} returned {compiled!r}"
            )
        compiled = without_disable(compiled)
        if report.opaque:
            compiled = first_run_watched(compiled, report.opaque)
        if report.bracketed:
            compiled = putting_right_after_errors(compiled, now)
        if now.enabled_devices:
            compiled = with_autocast_off(compiled)
        if unrecorded:
            compiled = with_views_without_gradients(compiled, unrecorded)
        if dtypes:
            compiled = for_dtypes(compiled, dtypes)
        if changes is not None:
            compiled = changing_state(compiled, changes)
        return marked_in_checkpoints(compiled) if is_recorded(module) else compiled

    # Dynamo does so, too, without wrapping twice; here for those who call the backend themselves.
    compiled = torch.compiler.disable(plan.compile(compile_graph), reason="compiled code")
    log.debug("seconds by stage: %s", report.seconds)
    return compiled


def _region(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    inner: Callable[..., Any],
    options: Options,
    ambient: AutocastState,
) -> Region:
    """What is needed to compile the backward again for another state. Copies: the inner compiler
    takes the graph over, and real inputs must not be kept alive."""
    given = options.backward_pass_autocast
    assumed = {"auto": None, "same_as_forward": ambient, "off": AutocastState.off()}
    state = assumed[given] if isinstance(given, str) else AutocastState.of(given)
    name = repr(given if isinstance(given, str) else list(given))
    assumption = Assumption(
        state=state, name=name, on_mismatch=options.on_backward_autocast_mismatch
    )
    lines = (source_line(n) for n in graph_module.graph.nodes if n.op.startswith("call_"))
    return Region(
        copy_graph(graph_module),
        fake_inputs(inputs),
        inner,
        assumption,
        line=next(filter(None, lines), "a graph without a line of its own"),
    )


def _inner(options: Options, *, autocast: bool) -> Inner:
    """The inner compiler.

    Args:
        autocast: whether autocast, or a policy of the user's, acts in the graph.
    """
    if not isinstance(options.inner, str):
        return options.inner
    backend = lookup_backend(options.inner)
    if options.inner.startswith("aot_eager"):
        return _kept_whole(backend)
    if options.inner != "inductor":
        return backend

    def inductor(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        patches = dict(options.inductor)
        tensors = [*made_in(graph_module), *(i for i in inputs if isinstance(i, torch.Tensor))]
        low = autocast or any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
        if low and all(t.device.type == "cpu" for t in tensors):
            # Results are rounded inside of kernels, too, as in eager mode.
            patches = {"emulate_precision_casts": True, **patches}
        if autocast and scales_convolutions(patches):
            # The weights would be scaled after their casts, and be float32 again.
            log.info("efficient_conv_bn_eval_fx_passes is off for a graph in which autocast acts")
            patches["efficient_conv_bn_eval_fx_passes"] = False
        if any(map(is_nested_region, nodes_of(graph_module))):
            # The code of such a region's backward may write over an input that the region's next
            # call reads as well: wrong gradients, with stock on torch 2.11 to 2.15, too.
            patches = {"inplace_buffers": False, "allow_buffer_reuse": False, **patches}
        if op_by_op:
            # Convolutions in channels_last round elsewhere, and Inductor mixes dtypes around them.
            patches = {"layout_optimization": False, **patches}
        with inductor_put_right():
            return backend(graph_module, inputs, config_patches=patches or None)

    op_by_op = options.inductor.get("fallback_by_default")
    return _kept_whole(inductor) if op_by_op else inductor


def _kept_whole(inner: Inner) -> Inner:
    """An inner compiler that runs op by op, with ATen's own ops, and is told what these give."""

    def compiler(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with ops_kept_whole(), kernels_predicted():
            return inner(graph_module, inputs)

    return compiler


_MISTRACED = "AOTAutograd's trace of it gives another dtype than eager autocast does"


def _named(graph_module: fx.GraphModule, name: str) -> fx.Node:
    """The call of a name in the report."""
    return next(node for node, known in names_of(graph_module).items() if known == name)


def _left_eager(graph_module: fx.GraphModule, context: Context) -> Callable[..., Any]:
    """Run a graph as Dynamo captured it, under the autocast state that Dynamo guards on. Bodies are
    written out whose gradients PyTorch would compute without the casts."""
    report = context.report
    call = _named(graph_module, (report.mistraced or report.keepers)[0])
    why = (
        f"of {call_name(call)}: {_MISTRACED}"
        if report.mistraced
        else f"the casts that {call_name(call)} makes of weights could not be shared with other "
        "calls, as autocast shares them. If allow_in_graph hides a function of yours from Dynamo, "
        "take it away"
    )
    log.warning("not compiled: a graph runs as in eager mode, because %s", why)
    counters()["smart_autocast"]["left_eager"] += 1
    trace(graph_module, context)
    for listener in listeners:
        listener(graph_module, context)
    written = write_out(graph_module).module
    checkpoints_as_in_eager(written)
    return putting_right_after_errors(written.forward, context.ambient)
