"""The backend: what `torch.compile(model, backend="smart_autocast")` calls, in order of
execution."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import _logging
from ._torch import (
    backward_pass_autocast_config,
    bystander_device_types,
    counters,
    disable_autocast,
    lookup_backend,
    patch_backward_pass_autocast,
    timed,
)
from .lowering import Context, lower
from .options import Options, parse_options
from .propagate import propagate
from .state import AutocastState

log = _logging.log
_logging.register()


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
        options: see `Options`.

    Returns:
        The compiled graph. It computes what the graph computes under the autocast state of this
        moment, which Dynamo guards on, whatever the state is when it runs.

    Raises:
        OptionValueError, OptionTypeError: before any work, for options that cannot be.
        RegionError: the graph's autocast regions do not nest.
    """
    parsed = parse_options(options, mode)
    now = AutocastState.current()
    context = Context(ambient=now.inside(parsed.autocast), validate=parsed.validate)
    report = context.report
    with timed("lower"):
        if parsed.autocast:
            graph_module = propagate(graph_module, context)
        graph_module = lower(graph_module, context)
    _tell(graph_module, context)
    with report.timed("inner"), _while_compiling(now, in_region=bool(report.nodes)):
        compiled = _inner(parsed)(graph_module, example_inputs)
    log.debug("seconds by stage: %s", report.seconds)
    if report.bracketed:
        compiled = _restoring_after_errors(compiled, now)
    return _with_autocast_off(compiled) if now.enabled_devices else compiled


def _inner(options: Options) -> Callable[..., Any]:
    if not isinstance(options.inner, str):
        return options.inner
    backend = lookup_backend(options.inner)
    if not options.inductor:
        return backend
    return lambda graph_module, inputs: backend(
        graph_module, inputs, config_patches=dict(options.inductor)
    )


@contextlib.contextmanager
def _while_compiling(now: AutocastState, in_region: bool) -> Iterator[None]:
    """Compile with autocast off, in a way that keeps it off wherever the compiled code runs.

    The lowered graph holds its casts; autocast must not act on it again. AOTAutograd would switch
    autocast off around the compiled forward, the compiled backward and the backward's lazy
    compilation, but only if it finds some device type on when it compiles - and a backward may run
    under any state. So device types that nothing here lives on are left on: bystanders.

    Backward is traced as stock traces it, under the state around the forward. Its dtypes stay out
    of the config (structured logs cannot write a dtype down) and are those in force; the bystanders
    carry them, because AOTAutograd's cache key has the dtypes of the device types that are on.
    """
    if not now.enabled_devices and not (in_region and torch.is_grad_enabled()):
        yield  # nothing of ours is in the graph, and nothing can act on it: as stock
        return
    compiling = AutocastState.off()
    dtypes = [d.dtype for d in now.enabled_devices] or [torch.bfloat16]
    for bystander, dtype in zip(bystander_device_types(), dtypes, strict=False):
        compiling = compiling.enter(bystander, dtype)
    with contextlib.ExitStack() as stack:
        if now.enabled_devices and backward_pass_autocast_config() == "same_as_forward":
            regions = [{"device_type": d.device_type} for d in now.enabled_devices]
            stack.enter_context(patch_backward_pass_autocast(regions))
        stack.enter_context(compiling.applied())
        yield


def _with_autocast_off(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Switch autocast off around the call: inner compilers other than AOTAutograd do not."""

    def run(*args: Any) -> Any:
        with disable_autocast():
            return compiled(*args)

    return run


def _restoring_after_errors(compiled: Callable[..., Any], now: AutocastState) -> Callable[..., Any]:
    """Leave the autocast state as it was when a call raises inside a bracket, whose exit nodes then
    do not run. AOTAutograd traces brackets away; an inner compiler like "eager" executes them."""

    def run(*args: Any) -> Any:
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        try:
            return compiled(*args)
        except BaseException:
            now.restore()
            while torch.autocast_decrement_nesting() >= nesting:
                pass
            torch.autocast_increment_nesting()
            raise

    return run


def _tell(graph_module: fx.GraphModule, context: Context) -> None:
    report = context.report
    counted = counters()["smart_autocast"]
    counted["graphs"] += 1
    counted["lowered"] += report.lowered
    counted["untouched"] += report.untouched
    counted["bracketed"] += len(report.bracketed)
    counted["casts"] += report.casts
    counted["checked"] += report.checked
    if not report.nodes:
        return
    log.info("under %s: %s", context.ambient, report)
    for _, alike in itertools.groupby(report.bracketed, lambda bracketed: bracketed.reason):
        first, *rest = alike
        also = f" (and {len(rest)} calls after it)" if rest else ""
        log.info("stays under autocast: %s%s", first, also)
    if log.isEnabledFor(logging.DEBUG):
        code = graph_module.print_readable(print_output=False)
        log.debug("lowered graph:\n%s", code)
