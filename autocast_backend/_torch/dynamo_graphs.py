"""What the nodes of Dynamo's graphs stand for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch.eager_transforms import _autograd_grad
from torch._ops import HigherOrderOperator
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from .dispatch import pass_autograd_keys, put_back_autograd_keys

_NUMPY_CALLS = ("numpy_to_tensor_wrapper", "numpy_method_wrapper", "numpy_operator_wrapper")


def is_numpy_call(target: Any) -> bool:
    """Whether a node's target stands for a function, a method or an operator of NumPy."""
    kind = type(target)  # by name: who has no graph of Dynamo's need not import it
    return kind.__name__ in _NUMPY_CALLS and kind.__module__ == "torch._dynamo.utils"


def is_functorch_transform(target: Any) -> int:
    """+1 where a graph node enters a `torch.func` transform, -1 where it leaves one, else 0.

    Between the two, example values are wrappers of a transform level that no longer exists.
    """
    name = getattr(target, "__name__", "")
    if name.endswith("_increment_nesting"):
        return 1
    return -1 if name.endswith("_decrement_nesting") else 0


def is_functorch_call(target: Any) -> bool:
    """Whether a graph node is a part of a `torch.func` transform itself: it enters or leaves one,
    or gives or takes a wrapper around a tensor."""
    return "_functorch" in (getattr(target, "__module__", None) or "")


def is_gradient_transform(target: Any) -> bool:
    """Whether a graph node enters `torch.func.grad`, `jvp` or another transform than `vmap`: all
    that a call gives inside is a wrapper, whatever the call takes."""
    return is_functorch_transform(target) == 1 and "vmap" not in getattr(target, "__name__", "")


def requires_grad_changes_after(node: fx.Node, value: fx.Node) -> bool:
    """Whether the graph changes `requires_grad` of a value after a node, in place."""
    changes = {user for user in value.users if user.target in ("requires_grad_", "detach_")}
    if not changes:
        return False
    later = node.next
    while later.op != "output" and later not in changes:
        later = later.next
    return later in changes


def runs_backward(target: Any) -> bool:
    """Whether a graph node runs the backward of calls before it: `torch.autograd.grad`, as which
    Dynamo traces `backward()`, too; or the function that `torch.func.vjp` returns."""
    return target is torch.autograd.grad or target is _autograd_grad


def calls_hook(node: fx.Node) -> bool:
    """Whether a node of a backward graph calls a hook that Dynamo's graph puts on a tensor or a
    module. There are such nodes for compiled autograd only, which traces the hook."""
    module = getattr(node.target, "__module__", "")
    return module == "torch._dynamo._trace_wrapped_higher_order_op"


@contextlib.contextmanager
def functorch_levels_restored() -> Iterator[None]:
    """Leave no `torch.func` transform open when a graph that enters one raises before it leaves."""
    from torch._C import _functorch

    depth = _functorch.get_dynamic_layer_stack_depth()
    dual = _is_in_dual_level()
    try:
        yield
    finally:
        if _is_in_dual_level() and not dual:  # of forward-mode AD: `torch.func.jvp`, `hessian`
            torch._C._exit_dual_level(level=0)
        # `pop_dynamic_layer_stack_and_undo_to_depth` of torch 2.11 fails an assertion.
        while _functorch.get_dynamic_layer_stack_depth() > depth:
            kind = _functorch.peek_interpreter_stack().key().name.lower()
            kind = {"functionalize": "func"}.get(kind, kind)
            getattr(_functorch, f"_{kind}_decrement_nesting")()


def is_higher_order_op(target: Any) -> bool:
    """Whether a node's target takes subgraphs (`torch.ops.higher_order.*`)."""
    return isinstance(target, HigherOrderOperator)


class GradMode:
    """Follows the grad mode through a graph, node by node. Dynamo writes `torch.no_grad()` and
    `torch.inference_mode()` as calls of private functions.

    Attributes:
        grad: whether autograd records after the nodes so far.
    """

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self._before: dict[fx.Node, bool] = {}  # by nodes that enter inference mode

    def follow(self, node: fx.Node) -> bool:
        """Go on to the next node of the graph; whether it is one that sets the mode."""
        if node.target is torch._C._set_grad_enabled:
            self.grad = bool(node.args[0])
        elif node.target is _enter_inference_mode:
            self._before[node] = self.grad
            self.grad = not node.args[0]
        elif node.target is _exit_inference_mode:
            self.grad = self._before[node.args[0]]  # type: ignore[index]
        else:
            return False
        return True


def inference_mode_as_no_grad(graph_module: fx.GraphModule, grad: bool) -> None:
    """Have a graph switch autograd off where it enters inference mode, in which AOTAutograd traces
    no cast inside of composite ops. What it returns is no inference tensor in either case.

    Args:
        grad: whether autograd is on around the graph.
    """
    graph, mode = graph_module.graph, GradMode(grad)
    changed: list[fx.Node] = []
    for node in graph.nodes:
        if mode.follow(node) and node.target is not torch._C._set_grad_enabled:
            with graph.inserting_before(node):
                graph.call_function(torch._C._set_grad_enabled, (mode.grad,))
            changed.append(node)
    for node in reversed(changed):
        graph.erase_node(node)
    if changed:
        graph_module.recompile()


def composites_in_bodies_taken_apart(graph_module: fx.GraphModule) -> None:
    """Have the bodies of higher-order ops pass the keys of autograd. PyTorch traces those of
    `cond`, `map`, `scan` and `while_loop` below them, and without gradients those of nested compile
    regions: it would trace composite ops as a whole, without a cast inside. Bodies of checkpoints
    are as they were: what they are compiled to stays in AOTAutograd's cache."""
    bodies: dict[fx.GraphModule, None] = {}
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if is_higher_order_op(node.target) and str(node.target) not in _TRACED_IN_PLACE:
                names = (str(n.target) for n in node.all_input_nodes if n.op == "get_attr")
                read = (getattr(module, name, None) for name in names)
                bodies.update(dict.fromkeys(b for b in read if isinstance(b, fx.GraphModule)))
    for body in bodies:
        graph = body.graph
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            excluded = graph.call_function(pass_autograd_keys)
        with graph.inserting_before(graph.output_node()):
            graph.call_function(put_back_autograd_keys, (excluded,))
        body.recompile()


_TRACED_IN_PLACE = ("tag_activation_checkpoint", "autograd_function_apply")


def gives_data_attribute(target: Any) -> bool:
    """Whether a node reads `tensor.data`, which Dynamo writes as a call of this function."""
    return target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def is_static_input(node: torch.fx.Node) -> bool:
    """Whether Dynamo takes an input of its graph for a parameter or buffer of a module, which stays
    the same tensor from call to call."""
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def keep_static_inputs(copy: fx.GraphModule, original: fx.GraphModule) -> None:
    """Have AOTAutograd look for static inputs in a copy of Dynamo's graph, too: it does so in
    graphs with this attribute, and takes others for export's, whose placeholders say nothing."""
    name = "_param_name_to_source"
    if name in vars(original):
        vars(copy)[name] = vars(original)[name]


def is_nested_region(node: torch.fx.Node) -> bool:
    """Whether a node calls a region marked by `torch.compiler.nested_compile_region`."""
    return node.target is torch.ops.higher_order.invoke_subgraph


def is_nonstrict(node: torch.fx.Node) -> bool:
    """Whether a node calls a function marked by `torch._dynamo.nonstrict_trace`, which may read
    tensors that are no inputs of the graph."""
    return getattr(node.target, "__name__", "").startswith("flat_apply")


def input_name(node: torch.fx.Node) -> str:
    """What an input is called in the user's program, such as `self.blocks.0.weight`; where Dynamo
    did not say, its name in the graph."""
    path = input_path(node)
    if path is None:
        return node.name
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", path)
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", path)


def input_path(node: torch.fx.Node) -> str | None:
    """How the compiled code reaches an input, such as `L['self']._parameters['weight']`; None where
    Dynamo did not say."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    return str(source.name() if callable(source.name) else source.name)


def is_reached(node: torch.fx.Node) -> bool:
    """Whether an input is a tensor that the compiled code finds in a variable, or by what it leads
    to; not one that Dynamo makes, of a number or an array of NumPy."""
    return (input_path(node) or "").startswith(("L[", "G["))


def _is_in_dual_level() -> bool:
    """Whether forward-mode AD is on. There is one level of it at most, and nothing tells of it."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:  # nested forward mode AD is not supported
        return True
    torch._C._exit_dual_level(level=level)
    return False
