"""Equal to eager autocast: dtypes and bits of outputs, gradients and buffers, module by module.

With `inner="aot_eager"` nothing but our lowering and AOTAutograd stands between a model and the
oracle, so bits must agree. Inductor reorders sums and fuses roundings away: there results are
close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import (
    BF16,
    FP16,
    Product,
    assert_same_bits,
    needs_torch,
    tensors,
    train_step,
)

AOT_EAGER = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}


class Layers(nn.Module):
    """Three linear layers and a norm for the small models below to use as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)


class Nested(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                z = self.b(y.float())
                with torch.autocast("cpu", enabled=True):  # the dtype in force: bfloat16
                    u = self.c(z)
            with torch.autocast(**FP16):
                v = self.c(x) if not torch.is_grad_enabled() else self.norm(y.float())
            return y, z, u, v, self.a(self.norm(z))


class Checkpointed(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = checkpoint(lambda v: F.gelu(self.b(self.a(v))), x, use_reentrant=False)
            return self.c(y)


class RegionInsideCheckpoint(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(v: torch.Tensor) -> torch.Tensor:
            with torch.autocast(**BF16):
                v = self.a(v)
            return self.b(v.float())

        return self.c(checkpoint(body, x, use_reentrant=False))


class CustomFunction(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return Product.apply(self.a(x).float(), self.b.weight).sin()


class InPlaceAndViews(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            y = self.a(x)
            y.add_(1)
            view = y[:2]
            view.mul_(2)
            turned = y.t().clone().t_()
            table = torch.zeros(4, 8)
            table[1:3] = x[:2]
            table = torch.addmm(table, x, self.b.weight)
            return {"linear": self.c(y), "views": (view, turned), "table": table}


class Dropout(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return self.b(F.dropout(self.a(x), 0.3))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = F.relu(self.norm(self.up(self.conv(x))))
            return self.head(y.mean((2, 3)))


class NoGrad(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            with torch.no_grad():
                target = self.a(x)
            return self.a(x) + self.b(target)


class GraphBreak(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = self.a(x)
            torch._dynamo.graph_break()
            return self.b(y)


class SharedWeight(Layers):
    """Reused by policy ops, reached through views, and by calls that cannot be lowered."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            y = self.a(self.a(x))
            cell = torch.rnn_tanh_cell(x, y.float(), self.a.weight, self.a.weight)
            rest = torch.inner(x, self.a.weight) + torch.tensordot(x, self.a.weight, 1)
            return y, cell, rest + x @ self.a.weight.t(), F.pad(y[None], (1, 1), "reflect")


class Losses(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            y = self.a(x)
            labels = torch.arange(4) % 8
            return (
                F.cross_entropy(y, labels),
                F.mse_loss(y, x),
                F.smooth_l1_loss(y, x),
                F.mse_loss(y, x[:1].expand(4, 8)),
                F.binary_cross_entropy_with_logits(y, x.sigmoid()),
                F.nll_loss(y.log_softmax(-1), labels),
                y.prod(),
                torch.cdist(y, x),
            )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            x = self.embedding(tokens)
            y, _ = self.attention(x, x, x, need_weights=False)
            q = self.norm(x + y).unflatten(-1, (2, 4)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True), torch.cat([x, y])


class Composites(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(**BF16):
            w = self.a.weight
            return (
                torch.einsum("ij,kj->ik", x, w),
                torch.stack([x @ w, x]),
                torch.baddbmm(x[None], x[None], w[None]),
                torch.linalg.inv(w @ w.t() + torch.eye(8)),
                torch.fft.fft(x @ w).real,
                x**2 + 2**x,
                torch.linalg.multi_dot([x, w, w]),
                torch.linalg.matrix_power(w, 3),
            )


def _x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(7))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    **{
        module.__name__: (module, _x)
        for module in (
            Nested,
            Checkpointed,
            RegionInsideCheckpoint,
            InPlaceAndViews,
            Dropout,
            NoGrad,
            GraphBreak,
            SharedWeight,
            Losses,
            Composites,
        )
    },
    "Convolutional": (Convolutional, lambda: torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)),
    "Attention": (Attention, lambda: torch.arange(12).view(2, 6) % 10),
}


@pytest.mark.parametrize("name", MODULES)
def test_bits_of_outputs_gradients_and_buffers(name: str) -> None:
    make, make_input = MODULES[name]
    expected = train_step(make, (make_input(),), backend="eager")
    actual = train_step(make, (make_input(),), **AOT_EAGER)
    for what, values in expected.items():
        assert_same_bits(actual[what], values, f"{name} {what}")


@pytest.mark.parametrize("validate", ["dtype", "off"])
def test_bits_with_less_validation(validate: str) -> None:
    """ "off" believes the policy table and so is only good for calls of policy ops themselves."""
    make, make_input = MODULES["Attention" if validate == "dtype" else "Checkpointed"]
    expected = train_step(make, (make_input(),), backend="eager")
    options = {"inner": "aot_eager", "validate": validate}
    actual = train_step(make, (make_input(),), backend="smart_autocast", options=options)
    for what, values in expected.items():
        assert_same_bits(actual[what], values, what)


class Ambient(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(F.gelu(self.a(x)))
        return y, self.a(self.b(y)), torch.cat([y, x])


@pytest.mark.parametrize("region", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("grad", ["train", "no_grad", "inference_mode"])
def test_bits_under_ambient_autocast(region: dict, grad: str) -> None:
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

    def outputs(**compile_arguments: Any) -> tuple[Any, Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Ambient()
        compiled = torch.compile(model, **compile_arguments)
        with torch.autocast(**region), modes.get(grad, torch.enable_grad)():
            out = compiled(_x())
        if grad == "train":
            sum(t.float().sum() for t in out).backward()
        return out, [p.grad for p in model.parameters()]

    assert_same_bits(outputs(**AOT_EAGER), outputs(backend="eager"), grad)


def test_dynamic_shapes() -> None:
    def run(**compile_arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Nested()
        compiled = torch.compile(model, dynamic=True, **compile_arguments)
        results = []
        for n in (3, 5, 9):
            model.zero_grad()
            out = compiled(_x().repeat(3, 1)[:n])
            sum(t.float().sum() for t in out).backward()
            results.append((out, [p.grad.clone() for p in model.parameters()]))
        return results

    counts = torch._dynamo.utils.counters["stats"]
    expected = run(backend="eager")
    counts.clear()
    assert_same_bits(run(**AOT_EAGER), expected)
    assert counts["unique_graphs"] == 1


@pytest.mark.parametrize(
    "make", [Ambient, Checkpointed, InPlaceAndViews, CustomFunction, NoGrad, SharedWeight]
)
def test_the_option_autocast_is_a_region_around_everything(make: Callable[[], nn.Module]) -> None:
    """Without a context manager anywhere: the same bits as inside one, gradients included."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast(**FP16):
                return self.model(x)

    expected = train_step(Inside, (_x(),), backend="eager")
    options = {"inner": "aot_eager", "autocast": FP16}
    actual = train_step(make, (_x(),), backend="smart_autocast", options=options)
    for what, values in expected.items():
        assert_same_bits(actual[what], values, what)


def test_the_option_autocast_and_values_read_from_tensors() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = n.item()
        torch._check(k >= 1)
        return (x @ x) * k

    torch._dynamo.reset()
    options = {"inner": "aot_eager", "autocast": BF16}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(
            function, backend="smart_autocast", fullgraph=True, options=options
        )
        x = torch.eye(4)
        assert_same_bits(compiled(x, torch.tensor(3)), (x * 3).bfloat16())


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"autocast": BF16}, torch.bfloat16),
        ({"autocast": BF16, "policies": {"op": {"aten::softmax": "fp32"}}}, torch.float32),
    ],
    ids=["autocast", "policies"],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_options_that_change_results_and_numbers_that_change(
    options: dict[str, Any], dtype: torch.dtype, dynamic: bool | None
) -> None:
    """A float that is an input of the graph is read by `item()`, which raises on a copy of it; at
    that error Dynamo left the graph to Python, without these options."""

    def function(x: torch.Tensor, k: float) -> torch.Tensor:
        return torch.softmax((x @ x) * k, -1)

    x = torch.randn(4, 4)
    torch._dynamo.reset()
    options = {"inner": "aot_eager", **options}
    compiled = torch.compile(function, backend="smart_autocast", dynamic=dynamic, options=options)
    for k in (0.3, 0.5, 0.7):
        low = x.bfloat16()
        expected = torch.softmax(((low @ low) * k).to(dtype), -1)
        assert_same_bits(compiled(x, k), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Convolutional", "Attention", "Checkpointed", "InPlaceAndViews"])
def test_close_with_inductor(name: str) -> None:
    make, make_input = MODULES[name]
    expected = train_step(make, (make_input(),), backend="eager")
    actual = train_step(make, (make_input(),), backend="smart_autocast")
    for what, values in expected.items():
        for a, e in zip(tensors(actual[what]), tensors(values), strict=True):
            assert a.dtype == e.dtype, what
            # Two roundings to bfloat16 (2^-8 each) that eager makes and a fused kernel does not.
            torch.testing.assert_close(a, e, rtol=2**-6, atol=2**-6)


def a_checkpoint_and_more(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda x, w: (x @ w).sin(), x, w, use_reentrant=False)
    return y.sin() + x.cos() @ w


def two_checkpoints(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda x, w: (x @ w).sin(), x, w, use_reentrant=False)
    return y * checkpoint(lambda x, w: (x @ w).cos(), x, w, use_reentrant=False)


def a_checkpoint_in_a_checkpoint(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x, w: (x @ w) * w.detach(), x.cos(), w, use_reentrant=False)

    return checkpoint(body, x, w, use_reentrant=False) + x.sin() @ w


def on_all_levels(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = checkpoint(two_checkpoints, x, w, use_reentrant=False)
    return y * checkpoint(lambda x, w: two_checkpoints(x, w) @ w, x, w, use_reentrant=False)


@torch.compiler.nested_compile_region
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin()


def a_nested_region_in_a_checkpoint(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: product(x, w), x, use_reentrant=False) + product(x.cos(), w)


@pytest.mark.parametrize(
    ("function", "casts"),
    [
        pytest.param(
            *(a_nested_region_in_a_checkpoint, 3),
            marks=needs_torch(2, 13, because="its body is not found"),
        ),
        (a_checkpoint_and_more, 3),
        (two_checkpoints, 2),
        (a_checkpoint_in_a_checkpoint, 3),
        (on_all_levels, 3),
    ],
)
@pytest.mark.parametrize("region", [False, True], ids=["ambient", "region"])
def test_a_weight_that_checkpoints_share(function: Any, casts: int, region: bool) -> None:
    """Eager's cache has one cast of each leaf for all of them. Compared with plain eager mode: for
    two checkpoints the oracle raises, because it computes the second one again without the cached
    cast."""

    def inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return function(x, w)

    def gradients(**compile_arguments: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        called = inside if region else function
        if compile_arguments:
            called = torch.compile(called, **compile_arguments)
        with torch.autocast(**BF16, enabled=not region):
            out = called(x, w)
        return torch.autograd.grad(out.float().square().sum(), (x, w))

    counted = torch._dynamo.utils.counters["smart_autocast"]
    counted.clear()
    ours = gradients(backend="smart_autocast", options={"inner": "aot_eager"})
    assert counted["casts"] == casts
    assert_same_bits(ours, gradients())
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(gradients(backend="aot_eager"), gradients())


def test_a_weight_in_reentrant_checkpoints() -> None:
    """Each of them casts it again in a backward of its own, so its gradients add up in float32.
    Compared with plain eager mode: the oracle's checkpoints are not reentrant."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x, w: (x @ w).sin(), x, w, use_reentrant=True)
        return checkpoint(lambda y, w: (y @ w).cos(), y, w, use_reentrant=True)

    def gradients(**compile_arguments: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        called = torch.compile(function, **compile_arguments) if compile_arguments else function
        with torch.autocast(**BF16):
            out = called(x, w)
        out.float().square().sum().backward()  # such checkpoints refuse torch.autograd.grad
        return x.grad, w.grad

    ours = gradients(backend="smart_autocast", options={"inner": "aot_eager"})
    assert_same_bits(ours, gradients())


def a_region_and_a_checkpoint(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**BF16):
        y = x @ w
    return y.float() + checkpoint(_with_its_own_region, x, w, use_reentrant=False)


def two_checkpoints_with_regions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = checkpoint(_with_its_own_region, x, w, use_reentrant=False)
    return y + checkpoint(_with_its_own_region, x.cos(), w, use_reentrant=False)


def _with_its_own_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(**BF16):
        return (x @ w).sin()


@pytest.mark.parametrize("function", [a_region_and_a_checkpoint, two_checkpoints_with_regions])
def test_a_weight_in_regions_inside_of_checkpoints(function: Any) -> None:
    """Each of the regions has a cast of its own, as eager's cache is cleared at its end."""

    def gradients(**compile_arguments: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        out = torch.compile(function, **compile_arguments)(x, w)
        return torch.autograd.grad(out.square().sum(), (x, w))

    ours = gradients(backend="smart_autocast", options={"inner": "aot_eager"})
    assert_same_bits(ours, gradients(backend="eager"))
