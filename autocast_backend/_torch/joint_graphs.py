"""Joint graphs, of forward and backward, as AOTAutograd traces them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .dynamo import counters
from .fake_tensors import fake_mode_of, numbers_as_first_traced
from .flags import compiling_as_now
from .higher_order import gradients_as_eager
from .mutation import writes_right
from .patches import replaced
from .returned_views import detached_outputs_right
from .tangents import tangents_of_overlaps_right
from .whole_ops import ops_right


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
            later = compiler and compiling_as_now(compiler)
            found.append(JointGraph(graph, num_fwd_outputs, later, _is_inductors(partition)))
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
        stack.enter_context(traced_right())
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


@contextlib.contextmanager
def traced_right() -> Iterator[None]:
    """What AOTAutograd's first trace of a graph and all later ones have in common."""
    with (
        ops_right(),
        writes_right(),
        detached_outputs_right(),
        tangents_of_overlaps_right(),
    ):
        yield


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
