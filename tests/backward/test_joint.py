"""Joint graphs: which backward can be taken out of one, and which is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from autocast_backend import BackwardError
from autocast_backend._torch.aot import TrainingGraph, training_graphs
from autocast_backend._torch.autocast import disable_autocast
from autocast_backend._torch.joint_graphs import JointGraph
from autocast_backend.backward.differences import autocast_can_change, calls_of, differing_ops
from autocast_backend.backward.joint import extract_backward
from autocast_backend.backward.joint_passes import keep_in_backward
from tests.support import BF16, assert_same_bits

ATEN = torch.ops.aten
GRADIENT = {"partitioner_tag": "is_backward"}


def joint_graph(*, cast: bool = False, random: bool = False) -> JointGraph:
    """y = tanh(x @ w), with its gradient for x; the product of the backward in bfloat16 if cast."""
    graph = fx.Graph()

    def call(target: Any, *args: Any, dtype: torch.dtype = torch.float32, **meta: Any) -> fx.Node:
        node = graph.create_node("call_function", target, args, {}, name=target.__name__[:-8])
        node.meta = {"val": torch.empty(2, 2, dtype=dtype), **meta}
        return node

    x, w, tangent = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    for node in (x, w, tangent):
        node.meta["val"] = torch.empty(2, 2)
    mm = call(ATEN.mm.default, x, w)
    if random:
        mm = call(ATEN.bernoulli.default, mm)
    y = call(ATEN.tanh.default, mm)
    slope = call(ATEN.tanh_backward.default, tangent, y, **GRADIENT)
    if cast:
        low = {"dtype": torch.bfloat16, **GRADIENT}
        slope = call(ATEN._to_copy.default, slope, **low)
        w = call(ATEN._to_copy.default, w, **low)
        gx = call(ATEN._to_copy.default, call(ATEN.mm.default, slope, w, **low), **GRADIENT)
    else:
        gx = call(ATEN.mm.default, slope, w, **GRADIENT)
    graph.output((y, gx, None))
    return JointGraph(fx.GraphModule(nn.Module(), graph), 1, None)


def extract(joint: JointGraph, *saved: str, reference: JointGraph | None = None) -> fx.GraphModule:
    """The backward of `joint` for a forward that has saved these values of `reference`."""
    return extract_backward(joint, partitioned(*saved), reference or joint)


def partitioned(*names: str) -> fx.GraphModule:
    """A backward graph with these inputs and two gradients."""
    graph = fx.Graph()
    for name in names:
        graph.placeholder(name)
    graph.output((None, None))
    return fx.GraphModule(nn.Module(), graph)


def test_the_backward_starts_from_what_was_saved() -> None:
    backward = extract(joint_graph(), "primals_2", "tanh", "tangents_1")
    w, y, tangent = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2)
    gradient, nothing = backward(w, y, tangent)
    assert torch.equal(gradient, ATEN.tanh_backward(tangent, y) @ w)
    assert nothing is None


def test_what_was_not_saved_is_computed_again_from_what_was() -> None:
    backward = extract(joint_graph(), "primals_1", "primals_2", "unrelated", "tangents_1")
    x, w, tangent = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2)
    gradient, _ = backward(x, w, torch.empty(0), tangent)
    assert torch.equal(gradient, ATEN.tanh_backward(tangent, torch.tanh(x @ w)) @ w)


@pytest.mark.parametrize(
    ("joint", "saved", "missing"),
    [
        (joint_graph(), ("tanh", "tangents_1"), "primals_2"),
        (joint_graph(random=True), ("primals_1", "primals_2", "tangents_1"), "bernoulli"),
    ],
    ids=["an_input", "random_numbers"],
)
def test_what_cannot_be_computed_again_is_refused(
    joint: JointGraph, saved: tuple[str, ...], missing: str
) -> None:
    with pytest.raises(BackwardError, match=f"did not save {missing}"):
        extract(joint, *saved)


def test_saved_values_are_found_by_what_they_compute_not_by_their_names() -> None:
    """Another state shifts the names of the backward half, from which a partitioner may save."""
    reference, other = joint_graph(), joint_graph()
    (mm,) = (n for n in other.graph_module.graph.nodes if n.name == "mm")
    (mm_1,) = (n for n in other.graph_module.graph.nodes if n.name == "mm_1")
    mm.name, mm_1.name = "mm_1", "mm"
    backward = extract(other, "mm", "primals_2", "tangents_1", reference=reference)
    product, w, tangent = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2)
    gradient, _ = backward(product, w, tangent)
    assert torch.equal(gradient, ATEN.tanh_backward(tangent, torch.tanh(product)) @ w)


def test_calls_tell_backwards_apart() -> None:
    off, again, low = (
        calls_of(extract(joint_graph(cast=cast), "primals_2", "tanh", "tangents_1"))
        for cast in (False, False, True)
    )
    assert off == again
    assert off != low
    assert differing_ops(off, low) == [
        "aten.mm(float32, float32) would be aten.mm(bfloat16, bfloat16)"
    ]


def test_autocast_does_not_act_inside_of_decompositions() -> None:
    """Eager runs one kernel there. PyTorch calls decompositions with autocast switched off, also
    where the op itself was called under autocast: a variant may be traced with them."""
    seen = []

    def softmax_backward(g: torch.Tensor, y: torch.Tensor, dim: int, _: torch.dtype) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        product = g * y
        return product - y * product.sum(dim, keepdim=True)

    inner = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        decompositions={ATEN._softmax_backward_data.default: softmax_backward},
    )
    counters = torch._dynamo.utils.counters["smart_autocast"]
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(
        lambda x: torch.softmax(x @ x, -1), backend="smart_autocast", options={"inner": inner}
    )
    out = compiled(x)
    with torch.autocast(**BF16):
        out.sum().backward()
    assert counters["backward_variants"] == 1
    assert seen
    assert not any(seen)


def backward_of(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """The backward graph AOTAutograd partitions."""
    found: list[TrainingGraph] = []
    torch._dynamo.reset()
    with disable_autocast(), training_graphs(found.append):
        torch.compile(function, backend="aot_eager")(*inputs)
    return found[0].backward_module()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.relu(x) * 2, False),
        (lambda x: x.sin().cumsum(0), False),
        (lambda x: x @ x, True),
        (lambda x: torch.cdist(x, x + 1), False),
        (lambda x: torch.nn.functional.max_pool1d(x, 2), False),
        (lambda x: torch.linalg.inv(x), True),
        (lambda x: torch.stack([x, x.sin()]).prod(0), True),
    ],
)
def test_which_backwards_autocast_can_change(function: Any, expected: bool) -> None:
    """By the ops they call; `tests/conformance` shows for all of op_db that it is enough."""
    backward = backward_of(function, torch.randn(4, 4, requires_grad=True))
    assert autocast_can_change(backward, ["cpu"]) is expected


def test_what_a_state_could_change_is_computed_in_the_backward() -> None:
    """`lu_solve` on the right multiplies two forward values in its backward: a partitioner would
    save the product, in the precision of a backward outside of autocast."""
    factors, pivots = torch.linalg.lu_factor(torch.randn(3, 3))
    inputs = factors.requires_grad_(), pivots, torch.randn(2, 3, requires_grad=True)

    def function(*given: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_solve(*given, left=False)

    def gradients(**compile_arguments: Any) -> Any:
        torch._dynamo.reset()
        out = torch.compile(function, **compile_arguments)(*inputs)
        with torch.autocast(**BF16):
            return torch.autograd.grad(out.sum(), (inputs[0], inputs[2]))

    ours = gradients(backend="smart_autocast", options={"inner": "aot_eager"})
    assert_same_bits(ours, gradients(backend="eager"))
    joint = joint_graph().graph_module
    keep_in_backward(joint, ["cpu"])
    tags = {n.name: n.meta.get("partitioner_tag") for n in joint.graph.nodes}
    assert tags["mm_1"] == "must_be_in_backward"
    assert (tags["mm"], tags["tanh_backward"]) == (None, "must_be_in_backward")
