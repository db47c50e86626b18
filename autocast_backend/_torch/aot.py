"""AOTAutograd: the training graphs it makes, and joint graphs traced again."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import math
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .dynamo import compile_session, counters, timed
from .fake_tensors import fake_mode_of, numbers_as_first_traced
from .higher_order import gradients_as_eager
from .hooks import unpacking_noted
from .memory import overlaps_by_symbols
from .patches import replaced


@dataclass
class TrainingGraph:
    """What AOTAutograd knows of one training graph when forward and backward are compiled, or
    loaded from its cache, and about to become a `torch.autograd.Function`.

    Attributes:
        compiled_backward: the compiled backward, where there is one already: loaded from the cache,
            or compiled early because of dynamic shapes.
        compile_backward: compiles a backward graph for its list of fake inputs, as the inner
            compiler does; None on a cache hit.
        backward_module: the backward graph, as partitioned.
        placeholders: fake inputs of the backward graph with the strides the compiled forward gives
            them; None on a cache hit.
        contexts: enters what the backward must be compiled in.
        for_compiled_autograd: makes the backward graph that compiled autograd copies into its own
            graph, instead of calling the compiled backward; None leaves it as it is.
        state_for_compiled_autograd: what else that graph depends on: compiled autograd uses a
            capture again only where it is equal.
    """

    compiled_backward: Callable[..., Any] | None
    compile_backward: Callable[..., Any] | None
    backward_module: Callable[[], fx.GraphModule]
    placeholders: list[Any] | None
    contexts: Callable[[], contextlib.AbstractContextManager[Any]]
    for_compiled_autograd: Callable[[fx.GraphModule], fx.GraphModule] | None = None
    state_for_compiled_autograd: Callable[[], Hashable] | None = None


@contextlib.contextmanager
def training_graphs(change: Callable[[TrainingGraph], None]) -> Iterator[None]:
    """Call `change` with every training graph AOTAutograd finishes meanwhile; what it assigns to
    `compiled_backward`, `compile_backward`, `for_compiled_autograd` and
    `state_for_compiled_autograd` takes effect.

    Fresh compilations and cache hits of every inner compiler that uses AOTAutograd come through
    `AOTDispatchAutograd.post_compile`, and nothing else sees the compiled backward of a cache hit.
    A wrapper around the inner compiler's backward would not survive into the next process.
    """
    importlib.import_module("torch._dynamo")  # the next import needs it, on a fresh start
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    original = AOTDispatchAutograd.post_compile
    signature = inspect.signature(original)
    thread = threading.get_ident()

    def post_compile(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        # torch 2.11: the fields are arguments
        spec = bound.arguments.get("spec") or SimpleNamespace(**bound.arguments)
        if not spec.aot_config.enable_log:  # what Inductor has for a pattern that it found
            return original(*args, **kwargs)
        # torch before 2.13: the compiler stands in the configuration
        holder = spec if hasattr(spec, "bw_compiler") else spec.aot_config
        graph = _training_graph(spec, holder.bw_compiler)
        change(graph)
        spec.compiled_bw_func = graph.compiled_backward
        if graph.compile_backward is not None:
            holder.bw_compiler = graph.compile_backward
        if graph.for_compiled_autograd is not None:
            spec.lazy_backward_info = _when_captured(
                spec.lazy_backward_info, graph.for_compiled_autograd
            )
        if "spec" not in bound.arguments:
            bound.arguments.update(vars(spec))
        with _capturing_each_state(graph.state_for_compiled_autograd):
            return original(*bound.args, **bound.kwargs)

    with (
        replaced(AOTDispatchAutograd, "post_compile", staticmethod(post_compile)),
        unpacking_noted(),
        metadata_kept(),
    ):
        yield


@contextlib.contextmanager
def metadata_kept() -> Iterator[None]:
    """With `mode="lite"` AOTAutograd traces its joint graph once more. Let nodes keep their marks:
    which are the backward's, which a checkpoint has computed again."""
    from torch.fx.experimental import proxy_tensor

    original = proxy_tensor.selective_decompose

    def selective_decompose(*args: Any, **kwargs: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return original(*args, **kwargs)

    with replaced(proxy_tensor, "selective_decompose", selective_decompose):
        yield


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


@contextlib.contextmanager
def calls_apart() -> Iterator[None]:
    """Have each call draw random numbers of its own, and 0.0 and -0.0 be two numbers. Partitioners,
    and Inductor's freezing, make one call of those with equal arguments. Their list of ops that
    draw has no `randn_like`, `uniform` or `exponential`, no custom op, and not the higher-order op
    of those that write.
    """
    from torch._functorch import compile_utils

    original, apart = compile_utils.get_aten_target, compile_utils.rand_ops[0]

    def get_aten_target(node: fx.Node) -> Any:
        return apart if draws_itself(node) or _has_negative_zero(node) else original(node)

    with replaced(compile_utils, "get_aten_target", get_aten_target):
        yield


def draws_itself(node: fx.Node) -> bool:
    """Whether a call draws random numbers, itself or by the op that it wraps."""
    return any(is_random(op) for op in (node.target, *node.args))


def is_random(op: Any) -> bool:
    """Whether an op is tagged as one that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _has_negative_zero(node: fx.Node) -> bool:
    arguments = (*node.args, *node.kwargs.values())
    return any(isinstance(a, float) and a == 0 and math.copysign(1, a) < 0 for a in arguments)


@contextlib.contextmanager
def marks_heeded(mark: Callable[[fx.Graph], None]) -> Iterator[None]:
    """Have the partitioner save what must be saved. Where it may use little memory, it overlooks
    some: all with a budget of 0, or what returns several tensors.

    Args:
        mark: is given each joint graph as the partitioner gets it, after Inductor's passes.
    """
    from torch._functorch import partitioners

    original = partitioners.choose_saved_values_set

    def choose_saved_values_set(joint: fx.Graph, node_info: Any, *args: Any, **kwargs: Any) -> Any:
        mark(joint)
        chosen = original(joint, node_info, *args, **kwargs)
        # What returns several tensors is none of them, though it may be chosen for its mark.
        chosen = [n for n in chosen if not isinstance(n.meta.get("val"), (tuple, list))]
        return chosen + _overlooked(chosen, node_info.required_bw_nodes)

    with replaced(partitioners, "choose_saved_values_set", choose_saved_values_set):
        yield


def _overlooked(saved: list[fx.Node], backward: Collection[fx.Node]) -> list[fx.Node]:
    """What must be saved, and would be computed again for `backward` with what is `saved`. Of a
    view that is what it is one of."""
    from torch._functorch.partitioners import get_default_op_list

    is_view = get_default_op_list().is_view
    overlooked: list[fx.Node] = []
    seen = {*saved, *backward}
    pending = [*backward]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in seen:
                continue
            seen.add(node)
            call: Any = node.args[0] if node.target is operator.getitem else node
            (overlooked if is_saved(call) and not is_view(call) else pending).append(node)
    return overlooked


def _training_graph(spec: Any, compile_backward: Callable[..., Any] | None) -> TrainingGraph:
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import CompileContext, TracingContext, compile_context, tracing

    lazy = spec.lazy_backward_info
    fresh = hasattr(lazy, "bw_module")
    here = TracingContext.try_get()
    saved = getattr(lazy, "saved_context", None) or here
    compiling = getattr(lazy, "saved_compile_context", None) or CompileContext.try_get()

    @contextlib.contextmanager
    def contexts() -> Iterator[None]:
        context = saved
        if not fresh and saved is not None:
            context = TracingContext(saved.fake_mode)
            context.fw_metadata = spec.fw_metadata
        with tracing(context), compile_context(compiling), get_metrics_context():
            yield

    return TrainingGraph(
        compiled_backward=spec.compiled_bw_func,
        compile_backward=compile_backward,
        backward_module=(lambda: lazy.bw_module) if fresh else lambda: lazy.bw_module_fn(),
        placeholders=lazy.placeholder_list if fresh else None,
        contexts=contexts,
    )


def _when_captured(lazy: Any, change: Callable[[fx.GraphModule], fx.GraphModule]) -> Any:
    """AOTAutograd's record of a backward graph, that shows compiled autograd a changed one."""
    from torch._dynamo import compiled_autograd

    if not hasattr(lazy, "bw_module"):
        return type(lazy)(lambda: change(lazy.bw_module_fn()))

    class Shown(type(lazy)):  # type: ignore[misc]
        @property
        def bw_module(self) -> fx.GraphModule:
            module = self.__dict__["bw_module"]
            return change(module) if compiled_autograd.compiled_autograd_enabled else module

    shown = object.__new__(Shown)
    shown.__dict__.update(lazy.__dict__)
    return shown


@contextlib.contextmanager
def _capturing_each_state(state: Callable[[], Hashable] | None) -> Iterator[None]:
    """Have compiled autograd capture the region that is finished meanwhile once for each `state`.
    Its cache knows a region by a number; here each state has one of its own.

    torch 2.11 has no such place: a capture is used again, and refuses to run (captured.py)."""
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.autograd.function import AUTOGRAD_FUNCTION_COUNTER

    factory = getattr(runtime_wrappers, "_AOTDispatchAutogradFunctionFactory", None)
    if factory is None or state is None:
        yield
        return
    original = factory.build
    numbers: dict[Hashable, int] = defaultdict(lambda: next(AUTOGRAD_FUNCTION_COUNTER))

    def build(self: Any) -> Any:
        function = original(self)
        key = function._compiled_autograd_key  # (number, *symbolic integers)
        function._compiled_autograd_key = lambda context: (numbers[state()], *key(context)[1:])
        return function

    with replaced(factory, "build", build):
        yield


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Switch off the modes that a compiler may find: of dispatch, compiled autograd's tracing or a
    user's, and of `__torch_function__`, whose effects Dynamo has put into the graph. Subclasses of
    tensors still have their `__torch_function__`."""
    from torch._dynamo.utils import get_torch_function_mode_stack, set_torch_function_mode_stack
    from torch.utils._python_dispatch import _disable_current_modes

    before = get_torch_function_mode_stack()
    set_torch_function_mode_stack([])
    try:
        with _disable_current_modes():
            yield
    finally:
        set_torch_function_mode_stack(before)


def in_dispatch_mode() -> bool:
    """Whether any dispatch mode is on; asking is 100 times cheaper than `outside_of_modes`."""
    return torch._C._len_torch_dispatch_stack() > 0


def _is_of_selective_checkpoint(mode: Any) -> bool:
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))


def in_selective_checkpoint() -> bool:
    """Whether the dispatch mode of one of its two runs is on. It pairs their calls by the order."""
    if not in_dispatch_mode():
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(map(_is_of_selective_checkpoint, _get_current_dispatch_mode_stack()))


@contextlib.contextmanager
def outside_of_selective_checkpoints() -> Iterator[None]:
    """Switch off their modes; others still see what is done."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    def popped() -> list[Any]:
        return [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]

    def push(modes: Iterable[Any]) -> None:
        for mode in modes:
            _push_mode(mode)

    modes = popped()[::-1]
    push(mode for mode in modes if not _is_of_selective_checkpoint(mode))
    try:
        yield
    finally:
        popped()
        push(modes)


def outside_of_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Switch off the modes of `__torch_function__`, a user's or that of a default device."""
    return torch._C.DisableTorchFunction()


def in_function_mode() -> bool:
    """Whether a call of PyTorch's would be given to such a mode."""
    return torch._C._is_torch_function_mode_enabled()


@contextlib.contextmanager
def outside_of_inference_mode() -> Iterator[None]:
    """As Dynamo compiles: in inference mode, composite ops come whole to those who look below
    autograd, who then see none of the casts inside of them. Autograd stays off."""
    from torch._dynamo.utils import (
        maybe_disable_inference_mode,
        maybe_disable_inference_mode_for_fake_prop,
    )

    with maybe_disable_inference_mode(), maybe_disable_inference_mode_for_fake_prop():
        yield


@contextlib.contextmanager
def compiling_again(inputs: Sequence[Any]) -> Iterator[None]:
    """The contexts a compiler needs outside of Dynamo's compilation, for fake inputs."""
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import TracingContext, tracing

    with (
        compile_session(),
        outside_of_modes(),
        outside_of_inference_mode(),
        tracing(TracingContext(fake_mode_of(inputs))),
        get_metrics_context(),
        timed("compile_again"),  # AOTAutogradCache loads nothing outside of such a block
    ):
        yield


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one graph, as the inner compiler's partitioner gets them.

    Attributes:
        graph_module: its outputs are those of the forward, then the gradients.
        num_forward_outputs: how many outputs are the forward's.
        compile_backward: the inner compiler's backward compiler; None if it cannot be seen.
        after_inductor: whether Inductor's passes over joint graphs have run.
    """

    graph_module: fx.GraphModule
    num_forward_outputs: int
    compile_backward: Callable[..., Any] | None
    after_inductor: bool = False


# How a partitioned forward draws what a checkpoint will draw again.
run_and_save_rng_state = torch._prims.rng_prims.run_and_save_rng_state


class _Captured(Exception):
    """Stops AOTAutograd once the joint graph is there."""


def trace_joint_graph(
    compile_graph: Callable[..., Any],
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    backward_autocast: list[dict[str, Any]],
    joint_pass: Callable[[fx.GraphModule], None],
) -> JointGraph:
    """The joint graph AOTAutograd traces for `graph_module` when the backward runs inside these
    `torch.autocast` contexts.

    Args:
        compile_graph: an inner compiler that uses AOTAutograd, called with its own decompositions
            and settings and stopped before it partitions.
        graph_module: taken over by the compiler: give it a copy.
        inputs: fake inputs.
        backward_autocast: what the backward is traced under; empty for "off".
        joint_pass: sees the joint graph, after the user's own pass, and none of those that Inductor
            then traces to put them in the place of a pattern.
    """
    from torch._dynamo.backends import common
    from torch._functorch import config
    from torch._functorch.partitioners import default_partition
    from torch._guards import TracingContext, tracing

    original = vars(common)["aot_module_simplified"]
    passes, without_ours = joint_passes(joint_pass), joint_passes()
    found: list[JointGraph] = []
    outermost = partitioned = False

    def aot_module_simplified(*args: Any, **kwargs: Any) -> Any:
        partition = kwargs.get("partition_fn", default_partition)
        compiler = kwargs.get("bw_compiler")

        def capture(graph: fx.GraphModule, *_: Any, num_fwd_outputs: int, **__: Any) -> Any:
            found.append(JointGraph(graph, num_fwd_outputs, compiler, _is_inductors(partition)))
            raise _Captured

        def partition_fn(graph: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
            nonlocal partitioned
            if not outermost:  # the body of a higher-order op
                return partition(graph, joint_inputs, **arguments)
            partitioned = True
            with _before_partitioning(partition, capture) as prepare:
                return prepare(graph, joint_inputs, **arguments)

        return original(*args, **{**kwargs, "partition_fn": partition_fn})

    def joint_custom_pass(graph: fx.GraphModule, joint_inputs: Any) -> fx.GraphModule:
        nonlocal outermost
        outermost = True
        return (without_ours if partitioned else passes)(graph, joint_inputs)

    counted = counters()["aot_autograd"].copy()
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(common, "aot_module_simplified", aot_module_simplified))
        stack.enter_context(metadata_kept())
        stack.enter_context(writes_to_inputs_right())
        stack.enter_context(gradients_as_eager())
        stack.enter_context(tracing(TracingContext(fake_mode_of(inputs))))
        stack.enter_context(numbers_as_first_traced(inputs))
        stack.enter_context(
            config.patch(
                backward_pass_autocast=backward_autocast,
                joint_custom_pass=joint_custom_pass,
                enable_autograd_cache=False,
            )
        )
        with contextlib.suppress(_Captured):
            compile_graph(graph_module, inputs)
    counters()["aot_autograd"] = counted  # an interrupted call is counted as a failed one
    if not found:
        raise RuntimeError(
            "the inner compiler calls AOTAutograd in a way that cannot be followed; build it with "
            "torch._dynamo.backends.common.aot_autograd"
        )
    return found[0]


def joint_passes(*ours: Callable[[fx.GraphModule], None]) -> Callable[..., fx.GraphModule]:
    """What `torch._functorch.config.joint_custom_pass` is to be: the user's pass of this moment,
    once all of the backward is tagged, and then ours."""
    from torch._functorch import config

    users = config.joint_custom_pass

    def joint_custom_pass(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        _tag_backward(graph)
        graph = users(graph, inputs) if callable(users) else graph
        for joint_pass in ours:
            joint_pass(graph)
        return graph

    return joint_custom_pass


def _tag_backward(joint: fx.GraphModule) -> None:
    """Tag the nodes of a joint graph, just traced, that came from the backward of an
    `autograd.Function`: they have the metadata of Dynamo's graph of it, where AOTAutograd's tag is
    missing. Nodes that were written since (`tensorify_python_scalars`, for numbers that change from
    call to call) have no metadata but their value; the forward reads some of them."""
    for node in joint.graph.nodes:
        traced = not node.meta.keys() <= {"val"}
        if traced and node.op == "call_function" and node.meta.get("partitioner_tag") is None:
            node.meta["partitioner_tag"] = "is_backward"


def is_recomputed(node: fx.Node) -> bool:
    """Whether a checkpoint has a node of a joint graph computed again in the backward."""
    from torch._functorch.partitioners import must_recompute

    return bool(must_recompute(node))


def written_in_forward(joint: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint graph that the forward writes to: in the graph, or, where autograd
    records the write or the compiler wants it, after the forward graph has run."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    copies = joint.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    in_graph = [n.args[0] for n in copies if n.meta["partitioner_tag"] == "must_be_in_forward"]
    results = joint.output_node().meta.get("desc", ())
    later = [r.mutated_input for r in results if isinstance(r, InputMutationAOTOutput)]
    placeholders = joint.find_nodes(op="placeholder")
    return [p for p in placeholders if p in in_graph or p.meta.get("desc") in later]


def must_save(node: fx.Node) -> None:
    """Forbid partitioners to compute a node of the forward again in the backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def is_saved(node: fx.Node) -> bool:
    """Whether that is forbidden."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def _is_inductors(partition: Callable[..., Any]) -> bool:
    return getattr(partition, "__module__", "") == "torch._inductor.compile_fx"


@contextlib.contextmanager
def _before_partitioning(
    partition: Callable[..., Any], capture: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """`capture` in the place of `partition`; in Inductor's, after its passes over the joint graph,
    which decide what the values that a forward saves are called."""
    if not _is_inductors(partition):
        yield capture
        return
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Capture(CustomPartitionerFn):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return capture(*args, **kwargs)

        def uuid(self) -> None:
            return None

    with config.patch(custom_partitioner_fn=Capture()):
        yield partition
