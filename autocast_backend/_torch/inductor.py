"""Inductor's graphs and kernels, put right where their numbers are wrong."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import fx

from . import (
    comparisons,
    compiler_flags,
    contractions,
    division,
    functions,
    indices,
    lowerings,
    predictions,
    reductions,
    reinplacing,
    roundings,
    scheduling,
    simplifications,
)
from .flags import inductor_right


@contextlib.contextmanager
def inductor_put_right() -> Iterator[None]:
    """Have Inductor compute what ATen does, in what this thread compiles meanwhile."""
    reinplacing.register()
    comparisons.register()
    division.register()
    contractions.register()  # before the roundings, which call these with float32
    roundings.register()
    reductions.register()
    functions.register()
    lowerings.register()  # last, so called first: it rounds numbers that those take as float32
    indices.register()
    scheduling.register()
    simplifications.register()
    predictions.register()
    compiler_flags.register()
    _register()
    with inductor_right.raised():
        yield


@functools.cache
def _register() -> None:
    """Without its passes, as in `mode="lite"`, Inductor has no kernel for custom ops that write."""
    from torch._inductor import compile_fx, config
    from torch._inductor.fx_passes import post_grad

    passes = compile_fx._recursive_post_grad_passes
    ops = torch.ops.higher_order
    wrapped = (ops.auto_functionalized, ops.auto_functionalized_v2)

    def recursive_post_grad_passes(gm: fx.GraphModule, is_inference: bool = False) -> None:
        passes(gm, is_inference)
        if not inductor_right.on:
            return
        comparisons.round_what_is_compared(gm.graph)
        if config.use_post_grad_passes:
            return
        for module in gm.modules():
            if isinstance(module, fx.GraphModule) and any(
                node.target in wrapped for node in module.graph.nodes
            ):
                post_grad.decompose_auto_functionalized(module.graph)
                module.recompile()

    compile_fx._recursive_post_grad_passes = recursive_post_grad_passes
