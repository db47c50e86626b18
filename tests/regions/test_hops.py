"""The region pass and its inverse: the higher-order ops they write, and that nothing else changes.

Torch's own pass, which `torch.export` runs, is the reference where it works; where it does not, a
test reproduces what it does.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._export.passes.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass
from torch._export.serde.serialize import SerializeError
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from autocast_backend import AutocastState
from autocast_backend._torch.autocast import enter_autocast, exit_autocast, wrap_with_autocast
from autocast_backend.regions import RegionError, hops_to_regions, regions_to_hops
from tests.support import assert_same_bits

BF16, FP16 = torch.bfloat16, torch.float16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def autocast(dtype: torch.dtype = BF16, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


class Model(nn.Module):
    """A layer, a buffer, and a function as `forward`."""

    def __init__(self, function: Callable[[Model, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def export(function: Callable[[Model, torch.Tensor], Any]) -> ExportedProgram:
    return torch.export.export(Model(function), (X,))


def one(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        y = m.layer(x)
    return y + 1


def nested(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        y = m.layer(x)
        with autocast(enabled=False):
            z = m.layer(y.float())
            with autocast(FP16):
                w = m.layer(z)
        v = m.layer(w)
    return y, z, w, v


def adjacent(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        y = m.layer(x)
    with autocast(FP16):
        z = m.layer(y)
    return m.layer(z.float())


def taken_apart_later(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        parts = m.layer(x).split(4, 1)
    return parts[1] + 1


def only_a_side_effect(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        m.seen.add_(m.layer(x).detach().sum(0))
    return x + 1


def without_grad(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        with torch.no_grad():
            y = m.layer(x)
        z = m.layer(y)
    with torch.no_grad(), autocast(FP16):
        return y, z, m.layer(x)


def in_a_branch(m: Model, x: torch.Tensor) -> Any:
    def with_region(t: torch.Tensor) -> torch.Tensor:
        with autocast(FP16):
            return m.layer(t)

    return torch.cond(x.sum() > 0, with_region, lambda t: m.layer(t).half(), (x,))


def around_a_branch(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        return torch.cond(x.sum() > 0, m.layer, lambda t: m.layer(t).sin(), (x,))


def empty(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        pass
    with autocast():
        return m.layer(x)


def no_change(m: Model, x: torch.Tensor) -> Any:
    with autocast():
        with autocast():
            y = m.layer(x)
        with autocast(FP16):
            return m.layer(y)


PROGRAMS = [
    one,
    nested,
    adjacent,
    taken_apart_later,
    only_a_side_effect,
    without_grad,
    in_a_branch,
    around_a_branch,
    empty,
    no_change,
]


def calls(module: fx.GraphModule, target: Any) -> list[fx.Node]:
    """All calls of a target, bodies included."""
    graphs = (m.graph for m in module.modules() if isinstance(m, fx.GraphModule))
    return [n for graph in graphs for n in graph.nodes if n.target is target]


def save_and_load(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


REGION = (enter_autocast, exit_autocast)


def is_call(node: fx.Node) -> bool:
    return node.op == "call_function"


def check_modules(module: fx.GraphModule) -> None:
    """The code is the graph's, and there is no body that it does not name."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            part.graph.lint()
            assert part.code == part.graph.python_code("self").src
            named = {str(n.target) for n in part.graph.find_nodes(op="get_attr") if n.users}
            assert {name for name, _ in part.named_children()} <= named


def run(program: ExportedProgram) -> Any:
    module = program.module()
    for buffer in module.buffers():  # which all modules of a program share
        buffer.zero_()
    return module(X), dict(module.named_buffers())


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_there_and_back_gives_the_same_program(function: Callable[..., Any]) -> None:
    program = export(function)
    expected = run(program)
    flat, signature = hops_to_regions(program.graph_module, program.graph_signature)
    check_modules(flat)
    assert calls(flat, wrap_with_autocast) == []
    assert len(calls(flat, enter_autocast)) == len(calls(flat, exit_autocast)) > 0
    back, signature = regions_to_hops(flat, signature)
    assert calls(back, enter_autocast) == calls(back, exit_autocast) == []
    assert calls(back, wrap_with_autocast)
    check_modules(back)

    again = program._update(back, signature)
    assert_same_bits(run(again), expected)
    assert str(again.graph_signature) == str(program.graph_signature)
    assert_same_bits(run(save_and_load(again)), expected)


@pytest.mark.parametrize("function", [one, nested, adjacent, in_a_branch])
def test_where_torchs_own_pass_works_it_gives_the_same(function: Callable[..., Any]) -> None:
    """The same calls with the same arguments, metadata and results."""
    program = export(function)
    flat, _ = hops_to_regions(program.graph_module, program.graph_signature)
    ours, _ = regions_to_hops(flat)
    theirs, _ = replace_autocast_with_hop_pass(flat, None)
    arguments = [
        sorted(str(n.args[:4]) for n in calls(m, wrap_with_autocast)) for m in (ours, theirs)
    ]
    assert arguments[0] == arguments[1] != []
    meta = [[n.meta for n in calls(m, wrap_with_autocast)] for m in (ours, theirs)]
    for key in ("nn_module_stack", "torch_fn"):
        assert [m.get(key) or {} for m in meta[0]] == [m[key] for m in meta[1]]
    inputs = [*program.state_dict.values(), X]
    assert_same_bits(ours(*inputs), theirs(*inputs))


def test_names_stay() -> None:
    """What a region gives is called as before, and as the signature says."""
    program = export(one)
    flat, signature = hops_to_regions(program.graph_module, program.graph_signature)
    inside, add = (n.name for n in flat.graph.nodes if n.target not in REGION and is_call(n))
    hops, after = regions_to_hops(flat, signature)
    results = [n.name for n in hops.graph.nodes if is_call(n)]
    assert results == ["wrap_with_autocast", inside, add]
    (output,) = hops.graph.find_nodes(op="output")
    assert [spec.arg.name for spec in after.output_specs] == [n.name for n in output.args[0]]


def test_outputs_that_become_one_are_renamed() -> None:
    """A body that returns one value twice: inlined, both outputs are one node."""

    def function(m: Model, x: torch.Tensor) -> Any:
        with autocast():
            y, z = m.layer(x), m.layer(x + 1)
        return y, z

    program = export(function)
    (call,) = calls(program.graph_module, wrap_with_autocast)
    body = getattr(program.graph_module, call.args[4].target)
    (output,) = body.graph.find_nodes(op="output")
    output.args = ((output.args[0][0],) * 2,)
    body.recompile()
    flat, signature = hops_to_regions(program.graph_module, program.graph_signature)
    (result,) = flat.graph.find_nodes(op="output")
    names = [n.name for n in result.args[0]]
    assert names[0] == names[1]
    assert [spec.arg.name for spec in signature.output_specs] == names
    assert_same_bits(*program._update(*regions_to_hops(flat, signature)).module()(X))


def test_a_list_stays_in_its_region() -> None:
    """What takes apart the list that a call in the region gives goes in as well: a call may return
    tensors, not lists of them, or it could not be saved."""
    program = export(taken_apart_later)
    flat, signature = hops_to_regions(program.graph_module, program.graph_signature)
    (exit_,) = calls(flat, exit_autocast)
    for node in reversed(calls(flat, operator.getitem)):
        exit_.append(node)
    hops, signature = regions_to_hops(flat, signature)
    (call,) = calls(hops, wrap_with_autocast)
    assert all(isinstance(value, torch.Tensor) for value in call.meta["val"])
    assert_same_bits(run(save_and_load(program._update(hops, signature))), run(program))


def test_a_list_in_a_tuple_stays_in_its_region() -> None:
    with torch.library._scoped_library("test_hops", "DEF") as library:
        library.define("sum_and_parts(Tensor x) -> (Tensor, Tensor[])")
        implementation = lambda x: (x.sum(), [part.clone() for part in x.split(4, 1)])  # noqa: E731
        library.impl("sum_and_parts", implementation, "CompositeExplicitAutograd")

        def function(m: Model, x: torch.Tensor) -> Any:
            with autocast():
                _, parts = torch.ops.test_hops.sum_and_parts(m.layer(x).detach())
            return parts[1] + 1

        program = export(function)
        flat, signature = hops_to_regions(program.graph_module, program.graph_signature)
        (exit_,) = calls(flat, exit_autocast)
        for node in reversed(calls(flat, operator.getitem)):
            exit_.append(node)
        hops, signature = regions_to_hops(flat, signature)
        (call,) = calls(hops, wrap_with_autocast)
        assert all(isinstance(value, torch.Tensor) for value in call.meta["val"])
        assert_same_bits(run(program._update(hops, signature)), run(program))


def test_an_index_of_a_tensor_stays_where_it_is() -> None:
    """Dynamo writes it as what takes a list apart; what it reads may be made, or written, later."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with autocast():
            y = x @ x.t()
        y.add_(1)
        return y[[0, 1]], y[y.argmax(1) % 4], y[0]

    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda g, _: graphs.append(g) or g.forward)(X)
    hops, _ = regions_to_hops(graphs[0])
    hops.graph.lint()
    assert_same_bits(hops(X), function(X))


def test_the_given_signature_is_left_alone() -> None:
    def function(m: Model, x: torch.Tensor) -> Any:
        with autocast():
            return m.layer(x)

    program = export(function)
    flat, signature = hops_to_regions(program.graph_module, program.graph_signature)
    before = str(signature)
    regions_to_hops(flat, signature)
    assert str(signature) == before
    replace_autocast_with_hop_pass(flat, signature)
    assert str(signature) != before  # torch's pass renames the outputs of what it was given


def test_a_region_around_a_branch_is_kept_raw_by_torch() -> None:
    """The region pass of `torch.export` leaves the enter and exit nodes: the program cannot be
    saved. Ours makes the call, and takes it back with the branches."""
    program = export(around_a_branch)
    assert calls(program.graph_module, enter_autocast)
    with pytest.raises((AssertionError, SerializeError), match="_enter_autocast"):
        torch.export.save(program, io.BytesIO())
    hops, signature = regions_to_hops(program.graph_module, program.graph_signature)
    assert len(calls(hops, wrap_with_autocast)) == 1
    again = regions_to_hops(*hops_to_regions(hops, signature))
    result, _ = run(program._update(*again))
    assert_same_bits(result, Model(around_a_branch)(X))


def test_what_a_body_has_goes_with_its_nodes() -> None:
    """A module that it calls, a buffer and a parameter that it reads."""
    parts = Model(one)
    parts.scale = nn.Parameter(torch.rand(8))
    body = fx.Graph()
    y = body.call_module("layer", (body.placeholder("x"),))
    y = body.call_function(torch.mul, (y, body.get_attr("scale")))
    body.output((body.call_function(torch.add, (y, body.get_attr("seen"))),))
    graph = fx.Graph()
    x, attribute = graph.placeholder("x"), graph.get_attr("body")
    call = graph.call_function(wrap_with_autocast, ("cpu", BF16, True, None, attribute, x))
    graph.output(graph.call_function(operator.getitem, (call, 0)))
    hops = fx.GraphModule({"body": fx.GraphModule(parts, body)}, graph)
    flat, _ = hops_to_regions(hops)
    assert not calls(flat, wrap_with_autocast)
    assert [buffer is parts.seen for buffer in flat.buffers()] == [True]
    assert {id(p) for p in flat.parameters()} == {id(p) for p in parts.parameters()}
    assert_same_bits(flat(X), hops(X))
    again, _ = regions_to_hops(flat)
    assert len(calls(again, wrap_with_autocast)) == 1
    assert_same_bits(again(X), hops(X))


def test_an_empty_region_disappears() -> None:
    program = export(empty)
    assert len(calls(program.graph_module, wrap_with_autocast)) == 2  # torch's pass keeps it
    with pytest.raises(SpecViolationError, match="missing val"):
        save_and_load(program)
    flat, _ = hops_to_regions(program.graph_module)
    assert len(calls(regions_to_hops(flat)[0], wrap_with_autocast)) == 1


def test_a_region_around_nothing_that_autocast_treats_disappears() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> None:
        enter = graph.call_function(enter_autocast, ("cpu", BF16))
        size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
        graph.call_function(exit_autocast, (enter,))
        graph.call_function(torch.mul, (x, size))

    assert calls(regions_to_hops(graph_with(build))[0], wrap_with_autocast) == []


def test_a_region_with_nothing_but_a_side_effect_can_be_saved() -> None:
    """Torch's pass makes a call without a value, which cannot be loaded again."""
    program = export(only_a_side_effect)
    with pytest.raises(SpecViolationError, match="missing val"):
        save_and_load(program)
    flat, signature = hops_to_regions(program.graph_module, program.graph_signature)
    ours = program._update(*regions_to_hops(flat, signature))
    assert_same_bits(run(save_and_load(ours)), run(program))


def test_a_region_with_a_question_about_sizes_can_be_saved() -> None:
    """`torch.export.save` takes no body that is given the answer."""

    def function(m: Model, x: torch.Tensor) -> Any:
        large = x.shape[0] * 0.5 > 1
        with autocast():
            return torch.cond(large, m.layer, lambda t: m.layer(t).sin(), (x,))

    model, sizes = Model(function), {"x": {0: torch.export.Dim("n", min=1, max=8)}}
    program = torch.export.export(model, (X,), dynamic_shapes=sizes)
    hops, signature = regions_to_hops(program.graph_module, program.graph_signature)
    (call,) = calls(hops, wrap_with_autocast)
    assert not any(isinstance(n.meta["val"], torch.SymBool) for n in call.args[5:])  # type: ignore[union-attr]
    loaded = save_and_load(program._update(hops, signature)).module()
    for x in (X, X[:2]):
        assert_same_bits(loaded(x), model(x))


def test_no_grad_inside_a_region_stays() -> None:
    """Torch's passes lose it: what comes out of it requires grad in the exported program."""

    def function(m: Model, x: torch.Tensor) -> Any:
        with autocast():
            with torch.no_grad():
                y = m.layer(x)
            return y, m.layer(y)

    assert [t.requires_grad for t in Model(function)(X)] == [False, True]
    assert [t.requires_grad for t in export(function).module()(X)] == [True, True]

    layer = nn.Linear(8, 8)

    def traced(x: torch.Tensor, w: torch.Tensor) -> Any:
        with autocast():
            with torch.no_grad():
                y = nn.functional.linear(x, w)
            return y, nn.functional.linear(y, w)

    graph = make_fx(traced, pre_dispatch=True)(X, layer.weight)
    hops, _ = regions_to_hops(graph)
    assert len(calls(hops, wrap_with_autocast)) == 1
    assert [t.requires_grad for t in hops(X, layer.weight)] == [False, True]


def test_a_region_that_changes_nothing_disappears() -> None:
    program = export(no_change)
    assert len(calls(program.graph_module, wrap_with_autocast)) == 3  # torch's pass: one too many
    flat, _ = hops_to_regions(program.graph_module)
    hops, _ = regions_to_hops(flat)
    assert [n.args[1] for n in calls(hops, wrap_with_autocast)] == [BF16, FP16]
    # The outermost one changes nothing either, where all of it runs under such a state.
    around = AutocastState.of({"device_type": "cpu", "dtype": BF16, "cache_enabled": False})
    hops, _ = regions_to_hops(flat, outside=around)
    assert [n.args[1] for n in calls(hops, wrap_with_autocast)] == [FP16]


def test_a_region_of_another_device_type_stays() -> None:
    """It changes nothing that can be seen from here, but who knows what is around."""

    def build(graph: fx.Graph, x: fx.Node) -> None:
        outer = graph.call_function(enter_autocast, ("cpu", BF16))
        inner = graph.call_function(enter_autocast, ("cuda", FP16, False))
        graph.call_function(torch.sin, (x,))
        graph.call_function(exit_autocast, (inner,))
        graph.call_function(exit_autocast, (outer,))

    graph = graph_with(build)
    assert len(calls(regions_to_hops(graph)[0], wrap_with_autocast)) == 2
    hops, _ = regions_to_hops(graph, outside=AutocastState.off().enter("cuda", FP16, False))
    assert [n.args[0] for n in calls(hops, wrap_with_autocast)] == ["cpu"]


def test_a_region_without_a_dtype_stays() -> None:
    """Nobody knows whether autocast is on around the graph: if so, the region changes nothing."""

    def build(graph: fx.Graph, x: fx.Node) -> None:
        enter = graph.call_function(enter_autocast, ("cpu", None, True, None))
        graph.call_function(torch.sin, (x,))
        graph.call_function(exit_autocast, (enter,))

    graph = graph_with(build)
    assert len(calls(regions_to_hops(graph)[0], wrap_with_autocast)) == 1
    on = AutocastState.of({"device_type": "cpu", "dtype": BF16})
    assert calls(regions_to_hops(graph, outside=on)[0], wrap_with_autocast) == []


def test_a_region_that_changes_the_weight_cache_alone_stays() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> None:
        opened = []
        for cache_enabled in (None, False, None, False, True):
            arguments = ("cpu", BF16, True, cache_enabled)
            opened.append(graph.call_function(enter_autocast, arguments))
            graph.call_function(torch.sin, (x,))
        for enter in reversed(opened):
            graph.call_function(exit_autocast, (enter,))

    hops, _ = regions_to_hops(graph_with(build))
    assert [n.args[3] for n in calls(hops, wrap_with_autocast)] == [None, False, True]


def test_a_region_without_a_dtype_has_the_one_in_force() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> None:
        outer = graph.call_function(enter_autocast, ("cpu", FP16))
        for enabled in (True, False):  # the former changes nothing
            inner = graph.call_function(enter_autocast, ("cpu", None, enabled))
            graph.call_function(torch.sin, (x,))
            graph.call_function(exit_autocast, (inner,))
        graph.call_function(exit_autocast, (outer,))

    hops, _ = regions_to_hops(graph_with(build))
    wrapped = [n.args[:3] for n in calls(hops, wrap_with_autocast)]
    assert wrapped == [("cpu", FP16, True), ("cpu", None, False)]


def graph_with(build: Callable[[fx.Graph, fx.Node], None]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    build(graph, x)
    graph.output(x)
    return fx.GraphModule(nn.Module(), graph)


def unclosed(graph: fx.Graph, x: fx.Node) -> None:
    graph.call_function(enter_autocast, ("cpu", BF16))
    graph.call_function(torch.sin, (x,)).stack_trace = '  File "model.py", line 7, in forward\n'


def unopened(graph: fx.Graph, x: fx.Node) -> None:
    graph.call_function(torch.sin, (x,)).stack_trace = '  File "model.py", line 7, in forward\n'
    graph.call_function(exit_autocast, (x,))


def crossing(graph: fx.Graph, x: fx.Node) -> None:
    first = graph.call_function(enter_autocast, ("cpu", BF16))
    second = graph.call_function(enter_autocast, ("cpu", FP16))
    graph.call_function(torch.sin, (x,)).stack_trace = '  File "model.py", line 7, in forward\n'
    graph.call_function(exit_autocast, (first,))
    graph.call_function(exit_autocast, (second,))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (unclosed, r"node _enter_autocast \(near sin, .*line 7.*never closes"),
        (unopened, r"node _exit_autocast \(near sin, .*line 7.*no open region"),
        (crossing, r"node _exit_autocast \(near sin, .*line 7.*must nest"),
    ],
)
def test_malformed_regions_are_refused(build: Any, words: str) -> None:
    graph_module = graph_with(build)
    before = str(graph_module.graph)
    with pytest.raises(RegionError, match=words):
        regions_to_hops(graph_module)
    assert str(graph_module.graph) == before


def without_body(graph: fx.Graph, x: fx.Node) -> None:
    graph.call_function(wrap_with_autocast, ("cpu", BF16, True, None))


def body_is_a_value(graph: fx.Graph, x: fx.Node) -> None:
    graph.call_function(wrap_with_autocast, ("cpu", BF16, True, None, x, x))


@pytest.mark.parametrize("build", [without_body, body_is_a_value])
def test_malformed_calls_are_refused(build: Any) -> None:
    with pytest.raises(RegionError, match=r"node wrap_with_autocast.*expected.*with a body from"):
        hops_to_regions(graph_with(build))


def test_an_operand_too_few_is_refused() -> None:
    program = export(one)
    (call,) = calls(program.graph_module, wrap_with_autocast)
    call.args = call.args[:-1]
    with pytest.raises(RegionError, match=r"one operand for each of the body's 3 inputs; got 2"):
        hops_to_regions(program.graph_module)


@pytest.mark.parametrize("convert", [hops_to_regions, regions_to_hops])
def test_what_is_no_graph_is_refused(convert: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"graph_module: expected a .*GraphModule.*; got Exported"):
        convert(export(one))
    with pytest.raises(TypeError, match=r"signature: expected an ExportGraphSignature.*; got dict"):
        convert(export(one).graph_module, {})
