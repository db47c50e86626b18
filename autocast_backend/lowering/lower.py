"""Lowering: rewrite autocast regions into smart casts, with autocast off.

    enter = _enter_autocast("cpu", torch.bfloat16, True, None)
    h = linear(x, w, b)
    y = cat([h, x])
    _exit_autocast(enter)

becomes

    x_cast = autocast_to_bf16(x)
    w_cast = autocast_to_bf16(w)
    b_cast = autocast_to_bf16(b)
    h = linear(x_cast, w_cast, b_cast)
    wide = promote([h, x])
    y = cat([wide[0], wide[1]])

Left alone: nodes outside every region; nodes that autocast does not change; `out=` and in-place
calls, which eager autocast does not change either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._logging import log
from .._torch.dynamo_graphs import is_numpy_call
from .._torch.fake_tensors import fake_mode_of
from .._torch.inside import opaque_ops
from .._torch.kernels import kernels_opened
from .._torch.ops import op_name_of
from ..graphs import names_of, nodes_of, recompile
from ..regions import is_region_node
from .context import Context
from .other_dtypes import judge_other_dtypes
from .planning import Candidate, Plan, plan_graph
from .propagate import propagate
from .proving import judge
from .scripted import told_of_scripted
from .transforms import judge_transforms
from .writing import Writer


def lower(graph_module: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Lower every region of `graph_module` in place, and return it; or return it as it is
    (`Context.may_stay_eager`).

    Every call node needs the value it had under eager autocast in `meta["example_value"]`, as
    Dynamo's graphs have.

    Raises:
        RegionError: the graph's enter and exit nodes do not pair up.
        ValueError: there are regions, and no node has an example value.
    """
    if context.ambient.enabled_devices or any(map(is_region_node, graph_module.graph.nodes)):
        _check_example_values(graph_module)
    report = context.report
    with kernels_opened():  # once for all that is observed: it takes 1.6 ms
        plans, fake_mode = _settled(graph_module, context)
        names = names_of(graph_module)
        candidates = [c for plan in plans for c in plan.candidates]
        report.mistraced = [names[c.node] for c in candidates if c.mistraced]
        keepers = [names[c.node] for c in candidates if c.keeps or c.mistraced]
        if keepers and context.may_stay_eager:
            report.keepers = keepers
            return graph_module
        for told in told_of_scripted(candidates):
            log.warning("%s", told)
        with report.timed("lowering"):
            writers = {plan.module: Writer(plan, fake_mode, names, report) for plan in plans}
            for writer in writers.values():
                writer.write()
            for writer in writers.values():
                writer.share_with_bodies(writers)
            recompile(graph_module)
    return graph_module


def _settled(graph_module: fx.GraphModule, context: Context) -> tuple[list[Plan], Any]:
    """What is to become of every call, and the fake mode of the graph's values."""
    plans, candidates, fake_mode = _judged(graph_module, context)
    # Dynamo runs NumPy's functions under autocast, to know what they give; NumPy does not.
    numpy = bool(candidates) and any(is_numpy_call(n.target) for n in nodes_of(graph_module))
    if numpy or any(c.stale for c in candidates):
        propagate(graph_module, context)
        plans, _, fake_mode = _judged(graph_module, context)
    return plans, fake_mode


def _judged(
    graph_module: fx.GraphModule, context: Context
) -> tuple[list[Plan], list[Candidate], Any]:
    report = context.report
    with report.timed("regions"):
        outside = context.outside
        plans = list(plan_graph(graph_module, outside, torch.is_grad_enabled(), context.overridden))
    candidates = [c for plan in plans for c in plan.candidates]
    nodes = (node for plan in plans for node in plan.module.graph.nodes)
    fake_mode = fake_mode_of(node.meta.get("example_value") for node in nodes)
    with report.timed("validation"):
        if not context.watched:
            _refuse_opaque(candidates)
        judge(candidates, fake_mode, context.validate, report)
        judge_transforms(candidates, fake_mode)
        if context.other_dtypes == "cast":
            cast = [c for c in candidates if c.recipe and not c.in_transform]
            judge_other_dtypes(cast, fake_mode)
        elif context.other_dtypes == "all":
            judge_other_dtypes(candidates, fake_mode)
    return plans, candidates, fake_mode


def _refuse_opaque(candidates: list[Candidate]) -> None:
    """Have custom ops stay under autocast whose kernels nobody has looked into, as fake tensors do
    not run them."""
    for c in candidates:
        on = [d.device_type for d in c.placement.state.enabled_devices]
        if c.refused is None and not c.overridden and (ops := opaque_ops(c.node.target, on)):
            c.refused = (
                f"the custom op {op_name_of(ops[0])[0]} has no autocast rule, and its kernel may "
                "call ops that have one"
            )


def _check_example_values(module: fx.GraphModule) -> None:
    """Refuse a graph that nothing can be proved about. Dynamo gives every input an example value; a
    graph without inputs has calls of constants at most."""
    inputs = module.graph.find_nodes(op="placeholder")
    if inputs and not any("example_value" in node.meta for node in module.graph.nodes):
        raise ValueError(
            'graph_module: no node has meta["example_value"]; expected the fake value of every '
            "call under eager autocast, as in the graphs Dynamo gives a backend"
        )
