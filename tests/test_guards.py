"""A variant that was compiled for an assumption about a dynamic size is not used without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autocast_backend import BackwardError
from autocast_backend.guards import ShapeGuards
from tests.support import BF16


def dynamic_graph() -> tuple[fx.GraphModule, torch.Tensor]:
    """A graph of one input, whose first size is dynamic, and that input."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    real = torch.empty(6, 3)
    torch._dynamo.mark_dynamic(real, 0)
    fake = mode.from_tensor(real)
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = fake
    graph.output(node)
    return fx.GraphModule(torch.nn.Module(), graph), fake


def run(args: list[Any]) -> Any:
    return args[0].shape[0]


def test_without_a_new_assumption_the_code_is_left_alone() -> None:
    module, x = dynamic_graph()
    assert x.shape[0] > 3  # known before
    assert ShapeGuards([x]).around(run, module, "it") is run


@pytest.mark.parametrize("specialise", [False, True], ids=["range", "one_value"])
def test_an_assumption_made_meanwhile_is_checked_at_every_call(specialise: bool) -> None:
    module, x = dynamic_graph()
    guards = ShapeGuards([x])
    assert x.shape[0] == 6 if specialise else x.shape[0] > 4
    checked = guards.around(run, module, "the backward of model.py")
    assert checked([torch.empty(6, 3)]) == 6
    if not specialise:
        assert checked([torch.empty(5, 3)]) == 5
    with pytest.raises(BackwardError, match=r"backward of model\.py was compiled for .* = 4"):
        checked([torch.empty(4, 3)])


def test_static_inputs_need_no_check() -> None:
    module, _ = dynamic_graph()
    assert ShapeGuards([torch.empty(2)]).around(run, module, "it") is run


@pytest.mark.filterwarnings("ignore::autocast_backend.BackwardAutocastWarning")
def test_what_a_comparison_has_assumed_holds_for_the_variant_compiled_after_it() -> None:
    """A pinned backward is traced to be compared with what it meets, and compiled later."""
    again = False

    def softmax_backward(g: torch.Tensor, y: torch.Tensor, dim: int, _: torch.dtype) -> Any:
        if again:
            assert g.shape[0] > 5
        return g * y - y * (g * y).sum(dim, keepdim=True)

    inner = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        decompositions={torch.ops.aten._softmax_backward_data.default: softmax_backward},
    )
    options = {"inner": inner, "backward_pass_autocast": BF16}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: torch.softmax(x @ w, -1),
        backend="smart_autocast",
        options=options,
        dynamic=True,
    )
    w = torch.randn(8, 8, requires_grad=True)
    large, small = (compiled(torch.randn(n, 8), w).sum() for n in (7, 4))
    again = True
    large.backward()
    with pytest.raises(BackwardError, match="was compiled for"):
        small.backward()


def test_assumptions_of_another_graph_of_the_same_capture_count() -> None:
    """What has been assumed is not assumed again: the second of two traces adds no guard."""
    module, x = dynamic_graph()
    ShapeGuards([x])
    assert x.shape[0] > 4  # by the one
    late = ShapeGuards([x])
    assert x.shape[0] > 4  # by the other
    with pytest.raises(BackwardError, match="was compiled for"):
        late.around(run, module, "it")([torch.empty(4, 3)])


@pytest.fixture
def doubling_small_sizes_under_autocast() -> Iterator[Any]:
    """A custom op with a formula that autocast changes for small sizes alone."""
    with torch.library._scoped_library("test_guards", "DEF") as library:
        library.define("sin(Tensor x) -> Tensor")
        library.impl("sin", torch.sin, "CPU")
        torch.library.register_fake("test_guards::sin", torch.empty_like, lib=library)

        def backward(context: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = context.saved_tensors
            small = torch.is_autocast_enabled("cpu") and g.shape[0] < 6
            return g * x.cos() * 2 if small else g * x.cos()

        torch.library.register_autograd(
            "test_guards::sin",
            backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )
        yield torch.ops.test_guards.sin


def compiled_for_any_size(op: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(
        lambda x: op(x), backend="smart_autocast", options={"inner": "aot_eager"}, dynamic=True
    )


def test_a_state_that_changes_nothing_for_one_size_may_for_another(
    doubling_small_sizes_under_autocast: Any,
) -> None:
    compiled = compiled_for_any_size(doubling_small_sizes_under_autocast)
    large, small = (torch.randn(n, 4, requires_grad=True) for n in (8, 3))
    with torch.autocast(**BF16):
        compiled(large).sum().backward()
        assert large.grad is not None
        assert torch.equal(large.grad, large.detach().cos())
        with pytest.raises(BackwardError, match="was compiled for"):
            compiled(small).sum().backward()
    compiled(small).sum().backward()
    assert small.grad is not None
    assert torch.equal(small.grad, small.detach().cos())


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="Dynamo fails on compiled autograd under autocast (seen on 2.11)",
)
def test_compiled_autograd_gets_no_backward_that_only_serves_some_sizes(
    doubling_small_sizes_under_autocast: Any,
) -> None:
    compiled = compiled_for_any_size(doubling_small_sizes_under_autocast)
    large = torch.randn(8, 4, requires_grad=True)
    captured = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    with captured, torch.autocast(**BF16):
        loss = compiled(large).sum()
        with pytest.raises(BackwardError, match="compiled autograd does not check"):
            loss.backward()
