"""A weight that several calls read: eager autocast casts it once, and the gradients of all of them
add up in the lower precision. So do ours, in brackets and transforms too; and not where eager's
cache has no part in it. Bits of outputs and gradients tell."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._higher_order_ops import invoke_quant_packed
from torch._higher_order_ops.foreach_map import foreach_map
from torch.func import grad, vmap

from autocast_backend import explain, lower_autocast
from autocast_backend.lowering.given import finding_casts
from tests.support import BF16, FP16, assert_same_bits, capture, targets, tensors
from tests.weights.support import data, ours

Function = Callable[..., Any]
AOT_EAGER = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}


@torch._dynamo.allow_in_graph
def hidden(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One node for Dynamo. Autocast acts on a value made inside, so it stays in a bracket."""
    return F.mse_loss(x @ w, x)


def results(function: Function, cache_enabled: bool = True, **arguments: Any) -> list[Any]:
    """Outputs and the gradient of the weight, in a region, or with the option `autocast`."""

    def region(x: torch.Tensor, w: torch.Tensor) -> Any:
        if "autocast" in arguments.get("options", ()):
            return function(x, w)
        with torch.autocast(**BF16, cache_enabled=cache_enabled):
            return function(x, w)

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(8, 8, generator=generator) for _ in range(2))
    outputs = tensors(torch.compile(region, fullgraph=True, **arguments)(x, w.requires_grad_()))
    torch.stack([t.float().square().mean() for t in outputs]).sum().backward()
    return [*outputs, w.grad]


def check(function: Function, bracketed: int, cached: bool = True) -> None:
    """Equal to eager, with and without its cache, which gives other gradients where the cache has a
    part in it."""
    expected = {cache: results(function, cache, backend="eager") for cache in (True, False)}
    differ = not torch.equal(expected[True][-1], expected[False][-1])
    assert differ == cached, "a case that shows nothing"
    for cache_enabled in (True, False):
        counters.clear()
        actual = results(function, cache_enabled, **AOT_EAGER)
        assert counters["smart_autocast"]["bracketed"] == bracketed
        assert_same_bits(actual, expected[cache_enabled], f"cache_enabled={cache_enabled}")


class Product(torch.autograd.Function):
    """In its forward autograd does not record."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def two_functions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Product.apply(x, w).sin() * Product.apply(x * 2, w)


def test_each_autograd_function_casts_for_itself() -> None:
    """What it gets is what its backward has gradients for: no cast can be handed to it."""
    check(two_functions, bracketed=0, cached=False)


def two_brackets(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return hidden(x, w) + hidden(x * 2, w).sin()


def a_bracket_and_a_lowered_call(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hidden(x, w), x.sin() @ w


def a_lowered_call_and_a_bracket(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sin() @ w, hidden(x, w)


def brackets_of_nested_regions(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = hidden(x, w)
    with torch.autocast("cpu", enabled=False):
        b = x.cos()
        with torch.autocast(**BF16):
            c = hidden(b, w)
    with torch.autocast(**BF16):
        return a, c, hidden(x * 2, w)


def regions_of_several_device_types(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("xpu", dtype=torch.bfloat16):
        a = hidden(x, w)
        with torch.autocast("xpu", dtype=torch.float16):
            b = hidden(x * 2, w)
    return a, b, x.sin() @ w


@pytest.mark.parametrize(
    ("function", "bracketed"),
    [
        (two_brackets, 2),
        (a_bracket_and_a_lowered_call, 1),
        (a_lowered_call_and_a_bracket, 1),
        (brackets_of_nested_regions, 3),
        (regions_of_several_device_types, 2),
    ],
)
def test_brackets(function: Function, bracketed: int) -> None:
    check(function, bracketed)


def keywords_that_say_nothing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(torch.mm(x, w, out=None).relu(), w, out=None)


def test_a_keyword_that_says_nothing() -> None:
    check(keywords_that_say_nothing, bracketed=0)


def views_of_arguments(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.linalg.multi_dot((w, x, w, x[0])), x @ w


def test_a_composite_that_casts_views_of_its_arguments() -> None:
    """It makes a matrix of the vector, and casts that: the vector is cast before."""
    check(views_of_arguments, 0)


def two_spans(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return vmap(lambda v: v @ w)(x) + vmap(lambda v: (v @ w).sin())(x * 2)


def a_span_and_a_call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return vmap(lambda v: (v @ w).sin())(x) + x.sin() @ w


def a_bracketed_span_and_a_call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return vmap(lambda v: F.mse_loss(F.pad((v @ w)[None], (1, 1), "reflect")[0, 1:-1], v))(x) * (
        x.sin() @ w
    )


def a_span_that_writes_and_a_call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return vmap(lambda v: (v.clone().add_(1) @ w).sin())(x) + x.sin() @ w


def a_span_that_writes_to_its_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = x.sin()
    return vmap(lambda v: (v.mul_(2) @ w).sin())(z) * (z @ w)


def two_spans_with_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    f = vmap(lambda v: (w[0] * v).sin() + (v @ w))
    return f(x) + f(x.cos())


def two_bracketed_spans_with_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What `vmap` makes of `addmm` scales the vector as it is."""
    f = vmap(lambda v: torch.addmm(w[0], v.expand(8, 8), w).sum(0))
    return f(x) + f(x.cos())


def a_bracketed_span_of_calls_with_and_without_a_rule(
    x: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """On the CPU `mv` has none, and what `vmap` makes of it has."""
    return vmap(lambda v: torch.mv(w, v) + (w @ v).sin().sum())(x)


def a_gradient_and_a_call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return vmap(lambda v: (v @ w) * grad(lambda u: u.sin().sum())(v))(x) + x.sin() @ w


def reads_inside_of_a_gradient_and_beside_it(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The cache does not know the weight inside, and knows it beside."""
    f = grad(lambda v: (w @ v).sin().sum())
    return vmap(lambda v: f(v) + (w @ v) * (w @ v.cos()))(x) + x.sin() @ w


@pytest.mark.parametrize(
    ("function", "bracketed"),
    [
        (two_spans, 0),
        (two_spans_with_views, 0),
        (two_bracketed_spans_with_views, 16),
        (a_span_and_a_call, 0),
        (a_span_that_writes_and_a_call, 0),
        (a_span_that_writes_to_its_argument, 0),
        (a_bracketed_span_and_a_call, 9),
        (a_bracketed_span_of_calls_with_and_without_a_rule, 9),
        (a_gradient_and_a_call, 0),
        (reads_inside_of_a_gradient_and_beside_it, 0),
    ],
)
def test_spans_of_vmap(function: Function, bracketed: int) -> None:
    check(function, bracketed)


@pytest.mark.parametrize("function", [two_spans, a_span_and_a_call, a_gradient_and_a_call])
def test_the_cast_of_a_span_stands_where_eager_makes_it(function: Function) -> None:
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return function(x, w)

    graph = capture(region, torch.randn(8, 8), torch.randn(8, 8).requires_grad_())
    calls = targets(lower_autocast(graph))
    opening = calls.index("_vmap_increment_nesting")
    assert calls.index("autocast_to_bf16.default") > opening
    assert calls.count("autocast_to_bf16.default") == 3  # of the weight, and of x in both calls


@torch._dynamo.allow_in_graph
def reads_both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x @ w, x) + (w * x).sin().sum() + torch.einsum("ij,jk->ik", x, w).mean()


def a_weight_with_and_without_a_cast(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return reads_both(x, w), x.sin() @ w


def two_that_read_both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sin() @ w, reads_both(x, w), reads_both(x * 2, w).sin()


@torch._dynamo.allow_in_graph
def with_a_leaf_of_its_own(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = F.mse_loss(leaf @ leaf, x) * 4
    return F.mse_loss(x @ w, torch.autograd.grad(loss, leaf)[0])


def a_bracket_with_a_leaf(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return with_a_leaf_of_its_own(x, w), x.sin() @ w


@pytest.mark.parametrize(
    ("function", "bracketed"),
    [
        (a_weight_with_and_without_a_cast, 1),
        (two_that_read_both, 2),
        (a_bracket_with_a_leaf, 1),
    ],
)
def test_functions_that_read_a_weight_both_ways(function: Function, bracketed: int) -> None:
    """With a cast and without: the cast is one that others read too."""
    check(function, bracketed)


def test_such_a_function_is_not_kept() -> None:
    def run() -> weakref.ref[Any]:
        @torch._dynamo.allow_in_graph
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return F.linear(x, w) + w.sin().sum()

        results(lambda x, w: (function(x, w) + F.linear(x, w),), **AOT_EAGER)
        return weakref.ref(function)

    function = run()
    torch._dynamo.reset()
    gc.collect()
    assert function() is None


@pytest.mark.parametrize("function", [hidden, torch.mm, torch.nn.Linear(2, 2).forward, Counter])
def test_what_finds_casts_is_the_same_each_time(function: Any) -> None:
    """For functions that take attributes and those that take none: a bound method, a class."""
    assert finding_casts(function) is finding_casts(function)


def a_leaf_that_is_cast_twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return grad(lambda v: (v @ v).sin().sum())(x), x @ w


def test_a_leaf_of_a_transform() -> None:
    """Its span stays in a bracket, where eager's cache is on."""
    expected = {
        cache: results(a_leaf_that_is_cast_twice, cache, backend="eager") for cache in (True, False)
    }
    assert not torch.equal(expected[True][0], expected[False][0]), "a case that shows nothing"
    for cache_enabled, bits in expected.items():
        actual = results(a_leaf_that_is_cast_twice, cache_enabled, **AOT_EAGER)
        assert_same_bits(actual, bits, f"cache_enabled={cache_enabled}")


@torch._dynamo.allow_in_graph
def hands_it_to_a_composite(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.multi_head_attention_forward(
        x, x, x, 8, 2, torch.cat([x, x, x]), None, None, None, False, 0.0, w, None
    )[0]
    return F.mse_loss(y, x) + (w * x).sum()


def a_composite_inside(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hands_it_to_a_composite(x, w), x.sin() @ w


@torch._dynamo.allow_in_graph
def reads_it_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (w * x).sin().sum() + (w * 2).cos().sum()
    return F.mse_loss(x @ w, x) * y + (w * 3).exp().mean()


def a_late_cast(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return reads_it_first(x, w), x.sin() @ w


@torch._dynamo.allow_in_graph
def uncached_inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**BF16, cache_enabled=False):
        y = (x @ w).sin().sum()
    return F.mse_loss(x @ w, x) + y


def partly_cached(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return uncached_inside(x, w), x.sin() @ w


@pytest.mark.parametrize("function", [a_composite_inside, a_late_cast, partly_cached])
def test_what_cannot_share_a_cast_is_not_compiled(
    function: Function, caplog: pytest.LogCaptureFixture
) -> None:
    """A cast made before the bracket is not found inside, or comes too early: gradients are added
    up in the order of the calls."""
    expected = {cache: results(function, cache, backend="eager") for cache in (True, False)}
    counters.clear()
    assert_same_bits(results(function, **AOT_EAGER), expected[True])
    assert counters["smart_autocast"]["left_eager"] == 1
    assert "allow_in_graph hides" in caplog.text
    assert_same_bits(results(function, cache_enabled=False, **AOT_EAGER), expected[False])
    assert counters["smart_autocast"]["left_eager"] == 1  # no cast to share: compiled


@pytest.mark.parametrize("lifetime", ["scope", "version"])
def test_uncached_casts_of_a_weight_have_gradients_of_their_own(lifetime: str) -> None:
    """Each is added to the weight's in float32."""

    def uncached(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16, cache_enabled=False):
            return (x @ w).sin() @ w

    def gradient(**compile_arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        x, w = data(3, 8), data(8, 8).requires_grad_()
        with torch.autocast(**BF16):
            y = torch.compile(uncached, **compile_arguments)(x, w)
        (found,) = torch.autograd.grad(y.sum(), w)
        return found

    assert_same_bits(gradient(**ours(weight_cache=lifetime)), gradient(backend="eager"))


def a_computed_tensor_first(part: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return part(x, w * 2) + part(part(x, w), w)


def a_computed_tensor_last(part: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    m = w * 2
    return part(x, w) + part(x * 2, m) + part(x * 3, m)


def a_computed_tensor_at_the_end(part: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return part(part(x, w), w) + part(x, w * 2)


def a_view_first(part: Function, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return part(x, w.view(8, 8)) + part(x * 3, w) + part(x * 5, w)


@pytest.mark.parametrize("option", [False, True], ids=["region", "option"])
@pytest.mark.parametrize(
    "calls",
    [
        *(a_computed_tensor_first, a_computed_tensor_last, a_computed_tensor_at_the_end),
        a_view_first,
    ],
)
def test_a_nested_compile_region_of_weights_and_of_others(calls: Function, option: bool) -> None:
    """It is one body for Dynamo. Eager autocast caches the casts of weights alone."""

    def part(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(x.float() @ w)

    marked = torch.compiler.nested_compile_region(part)
    options = {"inner": "aot_eager", **({"autocast": BF16} if option else {})}
    actual = results(functools.partial(calls, marked), backend="smart_autocast", options=options)
    assert_same_bits(actual, results(functools.partial(calls, part), backend="eager"))


@pytest.mark.parametrize("backward", [None, BF16, FP16])
@pytest.mark.parametrize("op", ["foreach_map", "invoke_quant", "nested_compile_region"])
def test_bodies_of_a_graph_that_is_not_compiled(op: str, backward: dict[str, Any] | None) -> None:
    """PyTorch runs these ops in eager mode with gradients of a forward without autocast, and cannot
    run a region twice."""

    def part(v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (v @ u).sin()

    marked = torch.compiler.nested_compile_region(part)

    def parts(x: torch.Tensor, w: torch.Tensor) -> Any:
        if op == "foreach_map":
            return foreach_map(part, [x, x.cos()], [w, w])
        if op == "invoke_quant":
            return invoke_quant_packed(lambda v, u: (part(v, u),), x, w)
        return marked(x, w), marked(x.cos(), w)

    def plain(x: torch.Tensor, w: torch.Tensor) -> Any:
        return (part(x, w),) if op == "invoke_quant" else (part(x, w), part(x.cos(), w))

    def gradients(function: Function, **arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(8, 8, generator=generator) * 0.3 for _ in range(2))
        compiled = torch.compile(lambda x, w: [*a_late_cast(x, w), *function(x, w)], **arguments)
        with torch.autocast(**BF16):
            outputs = compiled(x.requires_grad_(), w.requires_grad_())
        loss = torch.stack([t.float().square().mean() for t in outputs[1:]]).sum()
        with torch.autocast(**(backward or BF16), enabled=backward is not None):
            return [*outputs, *torch.autograd.grad(loss, (x, w))]

    expected = gradients(plain, backend="eager")
    counters.clear()
    actual = gradients(parts, **AOT_EAGER)
    assert counters["smart_autocast"]["left_eager"] == 1
    assert_same_bits(actual, expected)


def test_a_given_backward_state_is_compiled() -> None:
    """The graph would run as in eager mode, whose backward has the state that it finds."""

    def gradient(backward: dict[str, Any] | None, **arguments: Any) -> torch.Tensor:
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(8, 8, generator=generator) for _ in range(2))
        compiled = torch.compile(a_late_cast, **arguments)
        with torch.autocast(**BF16):
            outputs = compiled(x, w.requires_grad_())
        loss = torch.stack([t.float().square().mean() for t in outputs]).sum()
        with torch.autocast(**(backward or FP16), enabled=backward is not None):
            return torch.autograd.grad(loss, w)[0]

    options = {
        "inner": "aot_eager",
        "backward_pass_autocast": "same_as_forward",
        "on_backward_autocast_mismatch": "do_nothing",
    }
    ours = [
        gradient(backward, backend="smart_autocast", options=options) for backward in (BF16, FP16)
    ]
    eagers = [gradient(backward, backend="eager") for backward in (BF16, FP16)]
    assert not torch.equal(*eagers), "a case that shows nothing"
    assert_same_bits(*ours)


def test_explain_says_what_is_not_compiled() -> None:
    x, w = torch.randn(8, 8), torch.randn(8, 8).requires_grad_()
    with torch.autocast(**BF16):
        text = str(explain(a_late_cast)(x, w))
    assert "not compiled because of reads_it_first" in text


def test_without_gradients_there_is_nothing_to_share() -> None:
    counters.clear()
    with torch.no_grad(), torch.autocast(**BF16):
        x, w = torch.randn(8, 8), torch.randn(8, 8).requires_grad_()
        torch._dynamo.reset()
        actual = torch.compile(a_composite_inside, **AOT_EAGER)(x, w)
        assert_same_bits(actual, a_composite_inside(x, w))
    assert counters["smart_autocast"]["bracketed"] == 1


def a_gradient_and_a_call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return grad(lambda v: (v @ w).sin().sum())(x) + x @ w


def a_call_and_a_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w + grad(lambda v: (v.cos() @ w).sin().sum())(x)


@pytest.mark.parametrize("function", [a_gradient_and_a_call, a_call_and_a_gradient])
def test_the_cache_does_not_know_a_weight_inside_a_gradient(function: Function) -> None:
    check(function, 0, cached=False)


@pytest.fixture(scope="module", autouse=True)
def product() -> Iterator[None]:
    """`smart_autocast_sharing::product`, a matrix product with a rule of its own for autocast."""

    @torch.library.custom_op("smart_autocast_sharing::product", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    product.register_fake(lambda x, w: x @ w)

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient

    product.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    product.register_autocast("cpu", torch.bfloat16)
    yield
    product._lib._destroy()


def a_custom_rule_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    op = torch.ops.smart_autocast_sharing.product
    return op(x, w).sin() + op(x * 2, w)


def a_custom_rule_and_a_call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.smart_autocast_sharing.product(x, w).sin() + x @ w


@torch._dynamo.allow_in_graph
def casts_itself(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16) @ w.to(torch.bfloat16)


def a_cast_of_the_users(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return casts_itself(x, w).sin() + x @ w


@pytest.mark.parametrize(
    "function", [a_custom_rule_twice, a_custom_rule_and_a_call, a_cast_of_the_users]
)
def test_casts_that_eager_does_not_cache(function: Function) -> None:
    """`torch.library.register_autocast` casts by `Tensor.to`, past the cache."""
    check(function, 0, cached=False)


@pytest.mark.parametrize(
    "function", [partly_cached, a_custom_rule_twice, a_custom_rule_and_a_call, a_cast_of_the_users]
)
def test_gradients_of_functions_that_cast_themselves_with_less_validation(
    function: Function,
) -> None:
    options = {"inner": "aot_eager", "validate": "dtype"}
    actual = results(function, backend="smart_autocast", options=options)
    assert_same_bits(actual, results(function, backend="eager"))
