"""Custom ops without an autocast rule, whose kernels call ops that have one."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._higher_order_ops.foreach_map import foreach_map
from torch._higher_order_ops.map import map as hop_map

from autocast_backend import AutocastState, CustomOpWarning, custom_ops
from tests.support import BF16, FP16, Product, assert_same_bits, needs_torch, targets

OURS = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}


def in_region(function: Callable[..., Any]) -> Callable[..., Any]:
    def region(*args: Any) -> Any:
        with torch.autocast(**BF16):
            return function(*args)

    return region


@pytest.fixture
def product() -> Iterator[Any]:
    """A custom op whose kernel calls `mm`."""

    @torch.library.custom_op("smart_autocast_tests::product", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).float()

    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1], dtype=torch.float32))
    product.register_autograd(
        lambda ctx, grad: (grad @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    yield product
    product._lib._destroy()


@pytest.mark.parametrize("packet", [False, True])
def test_a_custom_op_is_a_known_difference(product: Any, packet: bool) -> None:
    """Eager autocast acts on what the kernel of a custom op calls. Compiled, by ours or by stock,
    it is called with autocast off. A rule of its own says what is meant (docs/coverage.md)."""
    region = in_region(torch.ops.smart_autocast_tests.product if packet else product)
    x, w = torch.randn(4, 16), torch.randn(16, 4)

    def compiled(**compiler: Any) -> torch.Tensor:
        torch._dynamo.reset()
        result: torch.Tensor = torch.compile(region, **compiler)(x, w)
        return result

    with pytest.warns(CustomOpWarning, match="product calls aten::matmul.*register_autocast"):
        ours = compiled(**OURS)
    assert_same_bits(ours, compiled(backend="aot_eager"))
    assert not torch.equal(ours, region(x, w))
    product.register_autocast("cpu", torch.bfloat16)
    with warnings.catch_warnings(action="error", category=CustomOpWarning):
        assert_same_bits(compiled(**OURS), region(x, w))


@needs_torch(2, 13, because="the ops of a definition are not kept")
def test_a_custom_op_that_was_defined_again_is_watched(product: Any) -> None:
    """PyTorch makes another object of it then, when Python frees the first definition."""
    torch._dynamo.reset()
    first = torch.ops.smart_autocast_tests.product.default
    torch.library._clear_torch_ops_cache(product._lib._op_defs)
    with pytest.warns(CustomOpWarning, match="product calls aten::matmul"):
        torch.compile(in_region(product), **OURS)(torch.randn(4, 4), torch.randn(4, 4))
    assert torch.ops.smart_autocast_tests.product.default is not first


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_custom_op_is_watched_when_a_graph_first_runs(product: Any, mode: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: product(x, w).sin(), **OURS)
    x, w = torch.randn(4, 16), torch.randn(16, 4).requires_grad_(mode is contextlib.nullcontext)
    with mode(), torch.autocast(**BF16):
        with pytest.warns(CustomOpWarning) as warned:
            first = compiled(x, w)
        with warnings.catch_warnings(action="error", category=CustomOpWarning):
            second = compiled(x, w)
    assert [warning.category for warning in warned].count(CustomOpWarning) == 1
    assert_same_bits(second, first)


def twice(region: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: region(x, w) + region(x, w)


HIGHER_ORDER: dict[str, Callable[..., Any]] = {
    "cond": lambda body: lambda x, w: torch.cond(x.sum() < torch.inf, body, torch.add, (x, w)),
    "map": lambda body: lambda x, w: hop_map(body, x[None], w)[0],
    "foreach_map": lambda body: lambda x, w: foreach_map(body, [x], [w])[0],
    "invoke_subgraph": lambda body: twice(torch.compiler.nested_compile_region(body)),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_a_custom_op_is_watched_in_bodies_of_higher_order_ops(
    product: Any, name: str, inside: bool
) -> None:
    """They have no rule for the mode that watches."""

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (product(x, w) if inside else torch.mul(x, w)).sin()

    call = HIGHER_ORDER[name](body)
    torch._dynamo.reset()
    compiled = torch.compile(
        in_region(lambda x, w: product(call(x, w), w) if not inside else call(x, w)), **OURS
    )
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.warns(CustomOpWarning) as warned:
        first = compiled(x, w)
    assert [warning.category for warning in warned].count(CustomOpWarning) == 1
    with warnings.catch_warnings(action="error", category=CustomOpWarning):
        assert_same_bits(compiled(x, w), first)
    times = 2 if name == "invoke_subgraph" else 1
    expected = (x @ w).sin() * times if inside else (x * w).sin() * times @ w
    torch.testing.assert_close(first, expected)


@pytest.fixture
def calling_product(product: Any) -> Iterator[dict[str, Callable[..., Any]]]:
    """Ways to call `product` that the graph does not show."""

    @torch.library.custom_op("smart_autocast_tests::nested", mutates_args=())
    def nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.smart_autocast_tests.product(x, w) + 1

    nested.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))

    @torch.library.custom_op("smart_autocast_tests::written", mutates_args=("out",))
    def written(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x @ w)

    def mutates(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        written(x, w, out)
        return out

    yield {"by_another_op": nested, "into_an_argument": mutates}
    for op in (nested, written):
        op._lib._destroy()


@pytest.mark.parametrize("way", ["by_another_op", "into_an_argument"])
def test_a_custom_op_is_watched_however_it_is_called(
    calling_product: dict[str, Callable[..., Any]], way: str
) -> None:
    torch._dynamo.reset()
    function = calling_product[way]
    compiled = torch.compile(in_region(lambda x, w: function(x, w)), **OURS)
    with pytest.warns(CustomOpWarning, match="matmul"):
        compiled(torch.randn(4, 4), torch.randn(4, 4))


def test_a_custom_op_in_a_branch_is_watched_when_the_branch_is_taken(product: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        in_region(lambda x, w: torch.cond(x.sum() > 0, product, torch.add, (x, w))), **OURS
    )
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with warnings.catch_warnings(action="error", category=CustomOpWarning):
        compiled(-x, w)
    with pytest.warns(CustomOpWarning, match="product calls aten::matmul"):
        compiled(x, w)


def test_a_custom_op_in_a_backward_is_watched_under_the_state_that_it_meets(product: Any) -> None:
    class Negate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return -x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return product(grad, *ctx.saved_tensors), None

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: Negate.apply(x, w), **OURS)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with warnings.catch_warnings(action="error", category=CustomOpWarning):
        compiled(x, w).sum().backward()
    with torch.autocast(**BF16), pytest.warns(CustomOpWarning, match="calls aten::matmul"):
        compiled(x, w).sum().backward()


def of_the_lower_precision(product: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**BF16):
        return product(x.bfloat16(), w.bfloat16())


def outside_of_regions(product: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**BF16):
        y = x.sin() @ w
    return product(x, w) + y


def of_whole_numbers(product: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**BF16):
        return product(x.long(), w.long())


@pytest.mark.parametrize("call", [of_the_lower_precision, outside_of_regions, of_whole_numbers])
def test_a_custom_op_that_autocast_does_not_change(product: Any, call: Any) -> None:
    torch._dynamo.reset()
    x, w = torch.randn(4, 16), torch.randn(16, 4)
    with warnings.catch_warnings(action="error", category=CustomOpWarning):
        actual = torch.compile(functools.partial(call, product), **OURS)(x, w)
    assert_same_bits(actual, call(product, x, w))


def test_functions_that_dynamo_does_not_trace_read_weights_of_their_own() -> None:
    """Under autocast, the cast of such a weight on fake tensors is none that a trace may find."""
    hidden = torch.nn.Linear(4, 4)

    @torch._dynamo.nonstrict_trace
    def layer(x: torch.Tensor) -> torch.Tensor:
        return hidden(x.sin())

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return layer(x @ w) + x @ w

    compiled = torch.compile(function, **OURS)
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(2):
        with torch.no_grad(), torch.autocast(**BF16):
            actual = [compiled(x, w) for _ in range(2)] + [hidden(x)]
        with torch.no_grad(), torch.autocast(**BF16):
            expected = [function(x, w) for _ in range(2)] + [hidden(x)]
            hidden.weight.mul_(2)
        assert_same_bits(actual, expected)


def test_two_threads_may_watch_the_first_run(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acts, both = custom_ops._acts, threading.Barrier(2)

    def acts_in_both(*args: Any) -> bool:
        both.wait(timeout=60)
        return acts(*args)

    monkeypatch.setattr(custom_ops, "_acts", acts_in_both)
    op = torch.ops.smart_autocast_tests.product.default
    watched = custom_ops.first_run_watched(op, {op: AutocastState.of(BF16)})
    with pytest.warns(CustomOpWarning) as told, ThreadPoolExecutor(2) as threads:
        results = list(threads.map(watched, [torch.eye(4)] * 2, [torch.eye(4)] * 2))
    assert_same_bits(results, [torch.eye(4)] * 2)
    assert len(told) == 1


@needs_torch(2, 12, because="a leaf function under autocast raises with gradients")
@pytest.mark.parametrize("region", [BF16, FP16])
def test_leaf_functions_are_called_under_autocast(region: dict[str, Any]) -> None:
    """PyTorch calls them with autocast off where nothing is recorded, and in the dtype that the
    thread has where something is."""
    leaf_function = torch._dynamo.decorators.leaf_function

    @leaf_function
    def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x @ w + x @ w).sin(),)

    @product.register_fake
    def fake(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ w,)

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(**region):
            y = product(x, w)[0]
            with torch.autocast("cpu", enabled=False):
                return y, product(x, w)[0]

    def train(function: Callable[..., Any]) -> list[torch.Tensor]:
        x, w = (torch.arange(16.0).view(4, 4).div(7).requires_grad_() for _ in range(2))
        outputs = function(x, w)
        grads = torch.autograd.grad(sum(y.float().sum() for y in outputs), (x, w))
        return [*(y.detach() for y in outputs), *grads]

    torch._dynamo.reset()
    compiled = torch.compile(function, **OURS)
    x = torch.arange(16.0).view(4, 4).div(7)
    expected = function(x, x)
    assert [y.dtype for y in expected] == [region["dtype"], torch.float32]
    assert_same_bits(compiled(x, x), expected)
    assert_same_bits(train(compiled), train(function))
    around = [torch.autocast(**BF16)(f) for f in (torch.compile(product, **OURS), product)]
    assert_same_bits(*(f(x, x)[0] for f in around))


@pytest.fixture
def triton_op() -> Iterator[Any]:
    """An op that is the calls of its body once it is traced, with a backward in float32."""

    @torch.library.triton_op("smart_autocast_tests::traced", mutates_args=())
    def traced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin()

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = (t.float() for t in ctx.saved_tensors)
        with torch.autocast("cpu", enabled=False):
            grad = grad.float() * (x @ w).cos()
            return (grad @ w.t()).to(ctx.saved_tensors[0].dtype), x.t() @ grad

    traced.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    yield traced
    traced._lib._destroy()


def test_a_triton_op_with_a_kernel_has_the_dtype_of_eager_mode() -> None:
    """Nobody can observe the kernel, so the op stays in a bracket."""
    triton = pytest.importorskip("triton")

    @triton.jit
    def copy(x: Any, out: Any) -> None:
        pass

    @torch.library.triton_op("smart_autocast_tests::copied", mutates_args=())
    def copied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        out = torch.empty_like(y)
        torch.library.wrap_triton(copy)[(1,)](y, out)
        return out

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return copied(x, w)

    graphs = []

    def never_run(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph_module)
        return lambda *_: (torch.empty(0),)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="smart_autocast", options={"inner": never_run})
    try:
        compiled(torch.randn(4, 8), torch.randn(8, 4))
        (call,) = [n for n in graphs[0].graph.nodes if "copied" in str(n.target)]
        assert call.meta["example_value"].dtype is torch.bfloat16
        assert targets(graphs[0]).count("_enter_autocast") == 1
    finally:
        copied._lib._destroy()


@pytest.mark.parametrize("validate", ["strict", "dtype"])
@pytest.mark.parametrize("around", [BF16, FP16, None])
def test_triton_ops_are_traced_under_autocast(
    triton_op: Any, validate: str, around: dict[str, Any] | None
) -> None:
    """Stock traces their bodies with autocast off."""

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with contextlib.nullcontext() if around else torch.autocast(**BF16):
            y = triton_op(x, w)
            z = torch.cat([torch.ops.smart_autocast_tests.traced(y, v), x @ v])
        with torch.autocast("cpu", enabled=False):
            return y, z, triton_op(z.float(), x)

    def train(function: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [torch.randn(8, 8, generator=rng).requires_grad_() for _ in range(3)]
        with torch.autocast(**around or {**BF16, "enabled": False}):
            outputs = function(leaves[0] * 1, leaves[1], leaves[2] * 1)
        grads = torch.autograd.grad(sum(y.float().sum() for y in outputs), leaves)
        return [*(y.detach() for y in outputs), *grads]

    torch._dynamo.reset()
    options = {"inner": "aot_eager", "validate": validate}
    compiled = torch.compile(function, backend="smart_autocast", options=options)
    expected, actual = [], []
    for grad in (True, False):
        for f, results in ((function, expected), (compiled, actual)):
            rng = torch.Generator().manual_seed(0)
            if grad:
                results += train(f)
            else:
                x = torch.randn(8, 8, generator=rng)
                with torch.no_grad(), torch.autocast(**around or {**BF16, "enabled": False}):
                    results += f(x, x, x)
    low = (around or BF16)["dtype"]
    assert [t.dtype for t in expected[:3]] == [low, low, torch.float32]
    assert_same_bits(actual, expected)


@torch._dynamo.allow_in_graph
def hidden(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Product.apply(x, w)


@torch._dynamo.allow_in_graph
def mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # as an op is called that has a policy
    return Product.apply(x, w)


@pytest.fixture
def with_an_autograd_kernel() -> Iterator[None]:
    """A custom op that differentiates itself, as those written in C++ often do."""
    library = torch.library.Library("smart_autocast_tests", "FRAGMENT")
    library.define("differentiated(Tensor x, Tensor w) -> Tensor")
    library.impl("differentiated", Product.apply, "Autograd")
    library.impl("differentiated", torch.mm, "CPU")
    library.impl("differentiated", torch.mm, "Meta")
    yield
    library._destroy()


def differentiated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.smart_autocast_tests.differentiated(x, w)


@pytest.mark.usefixtures("with_an_autograd_kernel")
@pytest.mark.parametrize("function", [hidden, mm, differentiated])
@pytest.mark.parametrize("validate", ["strict", "dtype"])
@pytest.mark.parametrize("ambient", [True, False])
def test_a_backward_gets_what_its_forward_got(function: Any, validate: str, ambient: bool) -> None:
    """A cast before the call would give the same forward, and a backward of the cast tensors."""

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if ambient else torch.autocast(**BF16):
            return function(x.sin(), w.sin())

    def train(function: Callable[..., Any]) -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(0)
        x, w = (torch.randn(8, 8, generator=rng).requires_grad_() for _ in range(2))
        with torch.autocast(**BF16, enabled=ambient):
            y = function(x, w)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, w))]

    torch._dynamo.reset()
    options = {"inner": "aot_eager", "validate": validate}
    compiled = torch.compile(region, backend="smart_autocast", options=options)
    assert_same_bits(train(compiled), train(region))
