"""Higher-order ops that PyTorch computes under another autocast state than eager mode does.

Leaf functions run when the compiled graph does, and so under the state of that moment.

In eager mode, the backward of `cond` and `map` traces a graph of the body, forward and backward,
under the state of the forward, and then runs the ops of that graph one by one under the state that
it finds itself in. When AOTAutograd traces them, the same functions of PyTorch do the same, but for
two things that are put right here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .autocast import enter_autocast, exit_autocast
from .kernels import kernels_closed
from .patches import replaced


def is_selective(body: fx.GraphModule) -> bool:
    """Whether a checkpoint has a `context_fn` for this body: in eager mode it runs under the
    dispatch modes that this makes, if autograd records."""
    return "_checkpoint_context_fn" in body.meta


def call_leaf_function_under(
    module: fx.GraphModule, node: fx.Node, contexts: Sequence[tuple[Any, ...]]
) -> None:
    """Have a node that calls a leaf function enter autocast contexts around it; other nodes are
    left alone.

    What is decorated with `leaf_function` is not traced. PyTorch calls it with autocast off where
    nothing is recorded, and in the dtypes that the thread has at that moment where something is.

    Args:
        contexts: the arguments of `enter_autocast` for each.
    """
    if str(node.target) != "invoke_leaf_function":
        return
    attribute, *others = node.args
    assert isinstance(attribute, fx.Node)
    assert isinstance(attribute.target, str)
    leaf = getattr(module, attribute.target)

    def call(*args: Any, **kwargs: Any) -> Any:
        entered = [enter_autocast(*context) for context in contexts]
        try:
            return leaf(*args, **kwargs)
        finally:
            for context in reversed(entered):
                exit_autocast(context)

    name = f"{node.name}_under_autocast"
    setattr(module, name, type(leaf)(call))
    with module.graph.inserting_before(node):
        node.args = (module.graph.create_node("get_attr", name), *others)


@contextlib.contextmanager
def gradients_as_eager() -> Iterator[None]:
    """Trace the gradients of `cond` and `map` as eager mode computes them.

    - `backward_pass_autocast`, which says under which state a joint graph is traced, would hold for
      the graphs inside of it too.
    - The gradients of two branches need not have one dtype in eager mode: autocast acts on one of
      them and not on the other, and autograd casts what comes out. A traced `cond` needs one, so
      each branch casts its own.
    """
    with contextlib.ExitStack() as stack:
        for name, function, changed in (
            ("cond", "create_bw_fn", _under_the_forwards),
            ("cond", "materialize_as_graph", _casting),
            ("map", "create_bw_fn", _under_the_forwards),
        ):
            module = importlib.import_module(f"torch._higher_order_ops.{name}")
            original = vars(module).get(function)  # another version of torch may have none
            if original is not None:
                stack.enter_context(replaced(module, function, changed(original)))
        stack.enter_context(kernels_closed_in_gradients())
        yield


@contextlib.contextmanager
def kernels_closed_in_gradients() -> Iterator[None]:
    """Trace the graph of a body's forward and backward with the kernels of ATen as they are: eager
    mode does, and autocast acts in them when the ops of the graph run, under the state of then."""
    with contextlib.ExitStack() as stack:
        for name in ("cond", "map", "partitioner"):
            module = importlib.import_module(f"torch._higher_order_ops.{name}")
            original = vars(module).get("materialize_as_graph")
            if original is not None:
                changed = _with_kernels_closed(original)
                stack.enter_context(replaced(module, "materialize_as_graph", changed))
        yield


def _with_kernels_closed(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def materialize_as_graph(*args: Any, **kwargs: Any) -> Any:
        with kernels_closed():
            return trace(*args, **kwargs)

    return materialize_as_graph


def _under_the_forwards(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_bw_fn(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        from torch._functorch import config

        backward = create(*args, **kwargs)

        def under_the_forwards(*operands: Any) -> Any:
            with config.patch(backward_pass_autocast="same_as_forward"):
                return backward(*operands)

        return under_the_forwards

    return create_bw_fn


def _casting(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def materialize_as_graph(*args: Any, **kwargs: Any) -> fx.GraphModule:
        module: fx.GraphModule = trace(*args, **kwargs)
        output = module.graph.output_node()
        for node in output.all_input_nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                with module.graph.inserting_before(output):
                    cast = module.graph.call_method("to", (node, value.dtype))
                output.replace_input_with(node, cast)
        module.recompile()
        return module

    return materialize_as_graph
