"""`lower`: an exported program with smart casts in place of its autocast regions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from .._logging import log
from .._torch.autocast import autocast_device_types, enter_autocast
from .._torch.dynamo_graphs import is_higher_order_op
from .._torch.export import erase_tracepoints, with_graph
from .._torch.modes import outside_of_inference_mode
from .._torch.tensors import is_of_transform
from ..graphs import copy_graph, names_of, nodes_of
from ..lowering.context import Context
from ..lowering.propagate import propagate
from ..lowering.standalone import lower_flat
from ..policies.modules import bind
from ..policies.overrides import PolicyError, parse_overrides
from ..regions import RegionError, call_name, hops_to_regions, regions_to_hops, where
from ..reports.report import Report
from ..state import AutocastState
from .checks import floating_point_checks, with_dtype, without_dtype
from .devices import casts_fake_tensors, on_device_type
from .storable import without_absent_dtypes, without_absent_results


def lower(
    exported_program: ExportedProgram,
    *,
    ambient: AutocastState | Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    device_type: str | None = None,
    policies: Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """Rewrite the autocast regions of an exported program into smart casts.

    Every call is proved equal to itself under autocast on the program's fake values, as when
    `torch.compile` lowers a graph, and for bfloat16, float16 and float64 in place of float32. What
    is not proved stays in a `wrap_with_autocast` call, and is warned of: whoever traces the program
    again (`run_decompositions`, AOTInductor, the ONNX exporter) traces it with autocast off.

    Args:
        exported_program: from `torch.export.export` or `torch.export.load`; it is left as it is.
        ambient: the autocast state around the program: an `AutocastState`, the arguments of one
            `torch.autocast`, or a sequence of them. Regions in the program come on top. `()`: off.
        device_type: lower for this device type, such as `"cuda"`, what was exported on the CPU: its
            regions and its policies become those of that device type. The program itself stays
            on the CPU; `torch.export.passes.move_to_device_pass` moves it. None: for the device
            types that the program's tensors are on.
        policies: overrides, as the option `policies` of the backend takes them.

    Returns:
        A verified program of the same signature, with the same parameters, to be run with autocast
        off. `autocast_backend.export.module` runs it for other floating-point dtypes than those it
        was exported with.

    Raises:
        TypeError, ValueError: an argument that is not what it should be, or a program that was
            decomposed already, or one that does not run itself: `strict=True` takes no heed of
            autocast, so that `y.float()` of what a region computed counts for nothing, and
            `strict=False` takes none in a few calls (`nn.LSTM`, `F.affine_grid`).
        PolicyError: an override that names no module, or that a call cannot take.
        RegionError: enter and exit nodes that do not pair up.
        RuntimeError: with `device_type`: a call that cannot be run on fake tensors of it.
    """
    return lower_with_report(
        exported_program, ambient=ambient, device_type=device_type, policies=policies
    )[0]


def lower_with_report(
    exported_program: ExportedProgram,
    *,
    ambient: AutocastState | Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    device_type: str | None = None,
    policies: Mapping[str, Any] | None = None,
) -> tuple[ExportedProgram, Report]:
    """As `lower`; with what was done: counts, and the calls that stay under autocast, with why."""
    _check(exported_program)
    check_device_type(device_type)
    overrides = bind(parse_overrides("policies", policies), exported_program.graph_module)
    state = AutocastState.of(ambient)
    if device_type and state.enabled_devices and not state.device(device_type).enabled:
        given = ", ".join(d.device_type for d in state.enabled_devices)
        raise ValueError(
            f"ambient: expected autocast for {device_type!r}, which device_type names; got one for "
            f"{given}, which would do nothing there"
        )
    context = Context(state, other_dtypes="all", overrides=overrides, watched=False)
    graph, signature = hops_to_regions(
        exported_program.graph_module, exported_program.graph_signature
    )
    erase_tracepoints(graph)
    forget_weight_cache_flag(graph)
    checks = [(check, without_dtype(check)) for check in floating_point_checks(graph)]
    _check_dtypes(graph, checks)
    with on_device_type(graph, device_type), _explained(device_type):
        elsewhere = device_type is not None or bool(context.ambient.enabled_devices)
        lower_flat(graph, context, propagated=not elsewhere)
    for check, _ in checks:
        with_dtype(check)
    without_absent_dtypes(graph)
    without_absent_results(graph)
    _warn_of_what_traces_lose(graph, context.report)
    graph, signature = regions_to_hops(graph, signature)
    assert signature is not None  # there was one
    return with_graph(exported_program, graph, signature), context.report


@contextlib.contextmanager
def _explained(device_type: str | None) -> Iterator[None]:
    """Say what fake tensors of a device type that is not there have to do with an error."""
    try:
        yield
    except (RegionError, PolicyError):
        raise
    except (RuntimeError, AssertionError) as error:
        if device_type is None:
            raise
        raise RuntimeError(
            f"device_type={device_type!r}: the program does not run on fake tensors of that device "
            f"type: {error}. If the device is missing, lower the program where torch has it"
        ) from error


def forget_weight_cache_flag(graph_module: fx.GraphModule) -> None:
    """Let regions inherit whether weight casts are cached.

    Export traces with the cache off, and writes that down as the region's `cache_enabled`, whatever
    the model asked for. Eager autocast, which the lowered program is to equal, caches.
    """
    for node in nodes_of(graph_module):
        if node.target is enter_autocast and node.args[3:] == (False,):
            node.args = (*node.args[:3], None)


def _warn_of_what_traces_lose(graph: fx.GraphModule, report: Report) -> None:
    """Say which calls compute something else once the program is traced again."""
    nodes = {name: node for node, name in names_of(graph).items()}
    calls = [nodes[b.node] for b in report.bracketed if b.node in nodes]
    lost = [call_name(call) for call in calls if not is_higher_order_op(call.target)]
    if lost:
        more = f", and {len(lost) - 1} more," if len(lost) > 1 else ""
        log.warning(
            "%s%s stays under autocast in the lowered program, which so computes what the model "
            "does. run_decompositions(), AOTInductor and the ONNX exporter trace such calls with "
            "autocast off: what they give may not be what the model gives",
            lost[0],
            more,
        )


def _check_dtypes(graph: fx.GraphModule, checks: Sequence[tuple[fx.Node, torch.dtype]]) -> None:
    """Refuse a program that was traced with other dtypes than its autocast gives.

    What the trace took for nothing, `x.float()` of what it took for float32, is not in the program:
    later calls read its result in the place of `x`.
    """
    if not checks:
        return
    names = names_of(graph)
    tensors = {names[check.all_input_nodes[0]]: dtype for check, dtype in checks}
    copied = copy_graph(graph)
    for node in nodes_of(copied):
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            value = value.detach()  # dtypes are asked for, and the program may write to its inputs
        if node.op != "get_attr" or value is not None:  # bodies have none, and stand for themselves
            node.meta["example_value"] = value
    try:
        with outside_of_inference_mode(), torch.no_grad():
            propagate(copied, Context(AutocastState.off()))
    except (RuntimeError, TypeError) as error:
        log.info("what the program's checks of dtypes expect is not checked: %s", error)
        return
    for node, name in names_of(copied).items():
        found = getattr(node.meta.get("example_value"), "dtype", None)
        if name in tensors and found != tensors[name]:
            raise ValueError(
                f"exported_program: {where(node)} was exported as {tensors[name]}, and is {found} "
                "under the autocast of the program, which so does not run itself. torch.export "
                "does not heed autocast with strict=True: export with strict=False. That does not "
                "heed it in calls such as nn.LSTM and F.affine_grid, where fake tensors do not "
                "show it: put those into a region with enabled=False"
            )


def _check(program: Any) -> None:
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            "exported_program: expected a torch.export.ExportedProgram, as torch.export.export "
            f"returns; got {type(program).__name__}. Of a model, it is "
            "torch.export.export(model, inputs)"
        )
    if program.dialect != "TRAINING":
        raise ValueError(
            "exported_program: expected a program as torch.export.export returns it; got one that "
            "run_decompositions() has made: its casts have dtypes already. Lower it first, and "
            "decompose what lower returns"
        )
    for name, value in program.constants.items():
        if isinstance(value, torch.Tensor) and is_of_transform(value):
            raise ValueError(
                f"exported_program: expected one that runs itself; its constant {name!r} is a "
                "wrapper that a torch.func transform made while torch.export.export traced it. "
                "Export the model without the transform"
            )


def check_device_type(device_type: Any, argument: str = "device_type") -> None:
    """Refuse what is neither None nor a device type whose autocast can be asked."""
    if device_type is None:
        return
    if not isinstance(device_type, str):
        raise TypeError(f"{argument}: expected a string or None; got {device_type!r}")
    types = autocast_device_types()
    if device_type not in types or not casts_fake_tensors(device_type):
        known = ", ".join(filter(casts_fake_tensors, types))
        raise ValueError(f"{argument}: expected one of {known}; got {device_type!r}")
