"""Checkpoints around compiled code, and in graphs that run as in eager mode.

A checkpoint that is not reentrant pairs the tensors that its two runs save by their order, and
compares no more than their number, shapes, dtypes and devices. A compiled graph saves others than
its code does in Python, often as many, of the same shapes. Where Dynamo has Python run the code in
one of the two runs (`torch.compiler.set_stance("force_eager")`, a `torch.vmap` over the same class
in between), the backward would compute with the wrong ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


class _CompiledCall:
    """Given to a checkpoint before each call of a graph, as if it was a tensor that the code saves.
    Where one run alone calls the graph, numbers or shapes differ, and the checkpoint raises an
    error, which may show these fields."""

    shape = (
        "none: a call of a graph that torch.compile made, in one of the two runs alone; Python ran "
        "its code in the other. Compile the checkpoint with the code"
    )
    dtype = None
    device = None
    requires_grad = False


_CALL = _CompiledCall()
_HELD = "smart_autocast_compiled_calls"


def marked_in_checkpoints(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Tell a checkpoint around the call, if there is one, that this graph is called."""

    def run(*args: Any) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
            return compiled(*args)
        pack: Callable[[Any], Any] = hooks[0]
        packed = pack(_CALL)
        results = compiled(*args)
        for value in pytree.tree_leaves(results):
            node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
            if node is not None:  # the checkpoint compares what is alive when the backward runs
                node.metadata.setdefault(_HELD, []).append(packed)
        return results

    return run


@contextlib.contextmanager
def nothing_recomputed(nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Have AOTAutograd trace a graph of such nodes, if it has no gradients in it, as one that
    recomputes nothing. From torch 2.12 on it raises an error where that draws random numbers in a
    checkpoint."""
    from torch._functorch import config

    computes_gradients = any(
        "autograd_backward" in node.meta or node.meta.get("custom") for node in nodes
    )
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    with contextlib.nullcontext() if computes_gradients else config.patch(name, False):
        yield


def checkpoints_as_in_eager(graph_module: fx.GraphModule) -> None:
    """Have a graph that runs as in eager mode call checkpoints as the code does. PyTorch runs those
    of Dynamo's graphs as selective ones, which raise in the backward where autocast's cache had the
    cast of a weight in one of the two runs alone (2.13)."""
    op = torch.ops.higher_order.tag_activation_checkpoint
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=op):
                node.target = _checkpoint
            module.recompile()


def _checkpoint(body: fx.GraphModule, *operands: Any, **options: Any) -> Any:
    context_fn = body.meta.get("_checkpoint_context_fn")
    options |= {} if context_fn is None else {"context_fn": context_fn}
    return checkpoint(body, *operands, **options)
