"""Dynamo: backends, errors, counters, and what its graphs hold."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import fx
from torch._functorch.eager_transforms import _autograd_grad
from torch._ops import HigherOrderOperator
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from .dispatch import pass_autograd_keys, put_back_autograd_keys

_F = TypeVar("_F", bound=Callable[..., Any])


def pass_through_error() -> type[Exception]:
    """The base class of errors that Dynamo hands to the user unchanged; any other class raised by a
    backend arrives wrapped in `BackendCompilerFailed`, which `except ValueError` does not catch."""
    from torch._dynamo.exc import ShortenTraceback

    return ShortenTraceback


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What a backend raises where Dynamo does not fail, but leaves the graph's code to Python."""
    from torch._dynamo.exc import exceptions_allowed_to_be_fallback

    return exceptions_allowed_to_be_fallback


def dynamo_error() -> type[Exception]:
    """What higher-order ops raise that cannot be traced, of all of Dynamo's errors."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def lookup_backend(name: str) -> Callable[..., Any]:
    """The registered Dynamo backend `name`; there is no public lookup. Inductor is imported, which
    it would be by its first call: `traces.py` looks at its partitioner."""
    from torch._dynamo.backends.registry import lookup_backend

    if name == "inductor":
        importlib.import_module("torch._inductor.compile_fx")
    return lookup_backend(name)


def backend_names() -> list[str]:
    """Every registered backend, debugging ones (`aot_eager`, `eager`) included."""
    from torch._dynamo.backends.registry import list_backends

    return list_backends(exclude_tags=())


def counters() -> Any:
    """Dynamo's counters: what `torch.compile` did, by subsystem. Ours is `smart_autocast`."""
    from torch._dynamo.utils import counters

    return counters


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A module that `Module.compile` has compiled as it is without: `torch.compile` unwraps only
    what it has returned itself."""
    if getattr(fn, "_compiled_call_impl", None) is not None:
        return fn._call_impl  # type: ignore[attr-defined]
    return fn


def never_traced(fn: _F) -> _F:
    """Have Dynamo leave a function alone, and what it calls. Where a compiled function calls
    `loss.backward()`, Dynamo would compile each Python function the autograd engine comes to.

    `torch.compiler.disable` wraps the function for that, which every call pays for.
    """
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    code: CodeType = fn.__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def without_disable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compiler.disable` has wrapped: a backend's code comes wrapped, and once more from
    Dynamo, which unwraps what it was given but cannot look into a function of ours around it."""
    while (
        getattr(fn, "_torchdynamo_disable", False)
        and getattr(fn, "_torchdynamo_wrapper_id", None) == id(fn)  # not copied by functools.wraps
    ):
        fn = fn._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return fn


def timed(stage: str) -> contextlib.AbstractContextManager[Any]:
    """Record a stage in `torch._dynamo.utils.compile_times()`."""
    from torch._dynamo.utils import dynamo_timed

    return dynamo_timed(f"smart_autocast.{stage}")


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """The lock under which Dynamo compiles. Reentrant."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextlib.contextmanager
def compile_session() -> Iterator[None]:
    """For what is compiled outside of Dynamo's own compilation: its lock, and what it tells other
    threads meanwhile. Compiled functions that they call would take the trace of a graph for
    `torch.fx.symbolic_trace`, and raise."""
    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    with compile_lock(), session():
        yield


def compiled_frame() -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The local and global variables of the function Dynamo compiles at this moment, where a
    backend is called by Dynamo. A graph's nodes name modules by the variable they were reached
    through; nothing public leads from there to the modules themselves."""
    output = _output_graph()
    return None if output is None else (dict(output.local_scope), dict(output.global_scope))


def inputs_of_dynamo() -> tuple[list[fx.Node], list[Any]]:
    """The inputs of the whole graph that Dynamo compiles at this moment, and their values; none
    where a backend is not called by Dynamo."""
    output = _output_graph()
    return ([], []) if output is None else (output.placeholders, output.example_inputs())


def _output_graph() -> Any | None:
    """What Dynamo has of the graph that it compiles at this moment on this thread; None where it
    compiles none."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def left_to_python(module: torch.nn.Module) -> str | None:
    """Why Dynamo does not compile the calls of a module, if it says so beforehand."""
    if isinstance(module, torch.nn.RNNBase) and not torch._dynamo.config.allow_rnn:
        return "torch._dynamo.config.allow_rnn is False"
    if getattr(module.forward, "_torchdynamo_disable", False):
        return "of torch.compiler.disable"
    return None


def keep_out_of_packages(graph_module: fx.GraphModule) -> None:
    """Have every process compile a graph again, with `torch._dynamo.config.caching_precompile` too.

    A package holds what AOTAutograd compiled, and calls no backend when it is loaded. What a
    backend has put around that is lost: a loaded backward could not follow its state.

    Raises:
        NotImplementedError: inside of `torch.compile(...).aot_compile`, which makes nothing else.
    """
    if vars(graph_module).pop("_backend_id", None) is None:  # the name AOTAutograd records it by
        return
    output = _output_graph()
    if output is None:
        raise NotImplementedError(
            "aot_compile writes a compiled graph to a file without what lets its backward follow "
            "the autocast state it meets. Call the compiled function instead: compile caches on "
            "disk, also in torch.compiler.save_cache_artifacts, work with smart_autocast"
        )
    output.bypass_package(
        "smart_autocast compiles in each process: its backwards follow the autocast state they "
        "meet, which a package does not keep. Compile caches on disk work as ever"
    )


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


def guard_leaf_and_view(node: fx.Node, value: torch.Tensor) -> None:
    """Have Dynamo compile anew for an input that is another kind of tensor than `value`: a leaf of
    autograd or not, a view or not. It does not ask, and eager autocast caches the casts of leaves
    that are no views. Parameters are both, and Dynamo asks for their type; one that is no leaf any
    more, since what requires grad was written to it, is still taken for one."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    source = getattr(node, "_dynamo_source", None)
    if source is None or TracingContext.try_get() is None or isinstance(value, torch.nn.Parameter):
        return
    base = GuardBuilder.NOT_NONE_MATCH if value._is_view() else GuardBuilder.CONSTANT_MATCH
    install_guard(
        AttrSource(source, "is_leaf").make_guard(GuardBuilder.CONSTANT_MATCH),
        AttrSource(source, "_base").make_guard(base),
    )


def guard_same(*paths: tuple[str, str, tuple[tuple[Any, bool], ...]]) -> None:
    """Have Dynamo compile anew once two paths no longer lead to one object.

    Args:
        paths: "L" or "G" for a local or a global variable, its name, and what leads on from it: an
            attribute, or with True the index of an item.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, GetItemSource, GlobalSource, LocalSource

    sources = []
    for scope, variable, steps in paths:
        source: Any = LocalSource(variable) if scope == "L" else GlobalSource(variable)
        for step, item in steps:
            source = GetItemSource(source, step) if item else AttrSource(source, step)
        sources.append(source)
    first, second = sources
    same = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=second)
    install_guard(first.make_guard(same))


def guard_value(of: Callable[[], Any], name: str) -> None:
    """Have Dynamo compile anew where `of` returns something else. Its logs call that `name`."""
    value = of()
    _guard(lambda known: lambda variables: of() == value, f"{name} == {value}")


def guard_inputs(
    nodes: Sequence[fx.Node],
    some: Iterable[int],
    same: Callable[[list[Any], Callable[[], list[Any]]], bool],
    name: str,
) -> None:
    """Have Dynamo compile anew where `same` is false of inputs of its graph.

    Args:
        nodes: the inputs, all of which `is_reached`.
        some: the numbers of those that `same` takes; it also takes what returns all of them.
        name: what Dynamo's logs call it.
    """
    paths = [str(input_path(node)) for node in nodes]
    told = ", ".join(paths[i] for i in some)

    def holds(known: dict[str, Any]) -> Callable[[Any], bool]:
        first = eval(f"lambda L: [{told}]", known)
        everything = eval(f"lambda L: [{', '.join(paths)}]", known)
        return lambda variables: same(first(variables), lambda: everything(variables))

    _guard(holds, f"{name}({told})")


def _guard(holds: Callable[[dict[str, Any]], Callable[[Any], bool]], told: str) -> None:
    """A guard that Dynamo calls `told` in its logs. `holds` is given the names that paths of inputs
    use, but for that of the local variables, and returns what takes those."""
    from torch._dynamo.guards import _get_closure_vars, install_guard
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, TracingContext

    if TracingContext.try_get() is None:  # who calls the backend without Dynamo
        return

    def create(builder: Any, guard: Guard) -> None:
        names = {"___holds": holds({**_get_closure_vars(), "G": builder.scope["G"]})}
        builder.add_python_lambda_leaf_guard_to_root(["___holds(L)"], [told], names)

    install_guard(Guard(GlobalStateSource(), create))


def _is_in_dual_level() -> bool:
    """Whether forward-mode AD is on. There is one level of it at most, and nothing tells of it."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:  # nested forward mode AD is not supported
        return True
    torch._C._exit_dual_level(level=level)
    return False
