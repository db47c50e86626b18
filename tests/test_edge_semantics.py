"""Corners of autocast, one test each: the compiled call does what eager autocast does there.

On the CPU by bits, outputs and gradients, against the oracle (`backend="eager"`). On CUDA by
dtypes, on fake tensors, against real CUDA autocast on them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from autocast_backend.regions import RegionError
from autocast_backend.state import AutocastState
from tests.aot.harness import plain
from tests.aot.test_subclasses import Wrapped
from tests.conformance.one_call import call_under, compare, lowered
from tests.support import (
    BF16,
    FP16,
    assert_same_bits,
    autocast_put_right,
    needs_torch,
    targets,
    tensors,
    train_step,
)

CUDA_FP16 = {"device_type": "cuda", "dtype": torch.float16}
Function = Callable[..., Any]
traces_what_sets_autocast = needs_torch(
    2, 13, because="Dynamo does not trace what sets autocast's state"
)


RAISED = ("Unexpected floating ScalarType", "to have the same dtype")
"""What the errors compared here say; the rest of a message tells who raised it."""


def randn(*shape: int, **arguments: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + 7), **arguments)


def outcome(
    function: Function, inputs: tuple[Any, ...], around: list[dict], **compile_arguments: Any
) -> list[Any]:
    """Outputs and the gradients of all inputs that can have one; or the error, where it raises."""
    torch._dynamo.reset()
    given = [
        t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
        for t in inputs
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast_put_right())  # a region where the oracle raises stays open
        for region in around:
            stack.enter_context(torch.autocast(**region))
        try:
            outputs = torch.compile(function, fullgraph=True, **compile_arguments)(*given)
        except (RuntimeError, TypeError) as error:
            return [word for word in RAISED if word in str(error)]
    losses = [t.float().square().mean() for t in tensors(outputs) if t.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    grads = [t.grad for t in given if isinstance(t, torch.Tensor)]
    return [*plain(outputs), *plain(grads)]


def check(
    function: Function,
    *inputs: Any,
    around: list[dict] | None = None,
    lowered: bool = True,
    bracketed: int = 0,
) -> list[Any]:
    """Compare with the oracle, and return what both gave. The counts say that something was
    compared: a call that autocast changes, and no bracket to hide in."""
    counters.clear()
    options = {"inner": "aot_eager"}
    actual = outcome(function, inputs, around or [], backend="smart_autocast", options=options)
    counted = counters["smart_autocast"]
    assert (counted["lowered"] > 0) == lowered, dict(counted)
    assert counted["bracketed"] == bracketed, dict(counted)
    expected = outcome(function, inputs, around or [], backend="eager")
    assert_same_bits(actual, expected)
    return expected


def matmul_and_more(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    return y, torch.cat([y, y + 1]), F.mse_loss(y, w), (y * w).softmax(-1), F.linear(y, w)


def test_cache_enabled_false() -> None:
    """Each use of the weight has a cast of its own: the two gradients add up in float32."""

    def function(x: torch.Tensor, w: torch.Tensor, cached: bool) -> torch.Tensor:
        with torch.autocast(**BF16, cache_enabled=cached):
            return (x @ w).sin() @ w

    x, w = randn(8, 8), randn(8, 8).requires_grad_()
    on, off = (check(function, x, w, cached) for cached in (True, False))
    assert torch.equal(on[0], off[0])
    assert not torch.equal(on[2], off[2])


def test_nested_regions_of_different_dtypes() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(**BF16):
            a = x @ w
            with torch.autocast(**FP16):
                b = a @ v
                with torch.autocast("cpu"):  # the dtype in force: float16
                    c = b @ v
                with torch.autocast("cpu", enabled=False):
                    d = c.float() @ w
            return a, b, c, d, d @ w

    out = check(function, randn(8, 8), randn(8, 8).requires_grad_(), randn(8, 8).requires_grad_())
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert [t.dtype for t in out[:5]] == [bf16, fp16, fp16, fp32, bf16]


def test_a_weight_in_nested_regions_of_different_dtypes() -> None:
    """Eager's weight cache does not look at dtypes: the inner region finds the outer cast, and
    the product raises. A compiled one gets the cast it asks for, stock's too."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(**BF16):
            a = x @ w
            with torch.autocast(**FP16):
                return a, a @ w

    inputs = randn(8, 8), randn(8, 8).requires_grad_()
    assert outcome(function, inputs, [], backend="eager") == [RAISED[1]]
    options = {"inner": "aot_eager"}
    ours = outcome(function, inputs, [], backend="smart_autocast", options=options)
    assert_same_bits(ours, outcome(function, inputs, [], backend="aot_eager"))
    assert [t.dtype for t in ours[:2]] == [torch.bfloat16, torch.float16]


def _without_dtype(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return x @ x


def _without_dtype_in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(_without_dtype, x, use_reentrant=False)  # type: ignore[no-any-return]


def _switched_on_by_hand(x: torch.Tensor) -> torch.Tensor:
    torch.set_autocast_enabled("cpu", True)
    y = x @ x
    torch.set_autocast_enabled("cpu", False)
    return y


def _by_option(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (_without_dtype, {}),
        (_without_dtype_in_a_checkpoint, {}),
        pytest.param(_switched_on_by_hand, {}, marks=traces_what_sets_autocast),
        (_by_option, {"autocast": {"device_type": "cpu"}}),
    ],
)
def test_a_dtype_that_has_changed_since_is_an_error(function: Function, options: dict) -> None:
    """The region takes the dtype in force, which Dynamo does not ask for while autocast is off."""
    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend="smart_autocast", options={"inner": "aot_eager", **options}
    )
    x = randn(4, 4)
    before = compiled(x)
    assert before.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.float16, enabled=False):
        with pytest.raises(RegionError, match=r"a dtype to every torch\.autocast"):
            compiled(x)
        torch._dynamo.reset()
        assert compiled(x).dtype is torch.float16
    torch._dynamo.reset()
    assert torch.equal(compiled(x), before)


def test_a_dtype_that_autocast_did_not_support_has_changed_since() -> None:
    """With it the region is off."""
    torch._dynamo.reset()
    compiled = torch.compile(
        _without_dtype, backend="smart_autocast", options={"inner": "aot_eager"}
    )
    x = randn(4, 4)
    torch.set_autocast_dtype("cpu", torch.float32)
    try:
        with pytest.warns(UserWarning, match="not supported"):
            expected = _without_dtype(x)
        assert_same_bits(compiled(x), expected)
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    with pytest.raises(RegionError, match=r"compiled for torch\.float32"):
        compiled(x)


def test_a_dtype_that_has_changed_since_and_nobody_reads() -> None:
    def explicit(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu"):
            y = x @ x
        with torch.autocast("cpu", enabled=False):
            return y.float() @ x

    x = randn(4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(explicit, backend="smart_autocast", options={"inner": "aot_eager"})
    before = compiled(x)
    with torch.autocast("cpu", torch.float16, enabled=False):
        assert torch.equal(compiled(x), before)


def test_nested_regions_of_different_device_types() -> None:
    """On the CPU, a region of another device type changes nothing, nor does switching it off."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(**BF16):
            with torch.autocast("xpu", enabled=False):
                a = x @ w
            with torch.autocast("cpu", enabled=False), torch.autocast("xpu", dtype=torch.bfloat16):
                b = x @ w
            return a, b

    out = check(function, randn(8, 8), randn(8, 8).requires_grad_())
    assert [t.dtype for t in out[:2]] == [torch.bfloat16, torch.float32]


def test_fp16_autocast_on_the_cpu() -> None:
    out = check(matmul_and_more, randn(8, 8), randn(8, 8).requires_grad_(), around=[FP16])
    assert out[0].dtype is torch.float16


@pytest.mark.parametrize(
    ("region", "given"),
    [(FP16, torch.bfloat16), (BF16, torch.float16)],
    ids=["bf16 under fp16", "fp16 under bf16"],
)
def test_inputs_in_the_other_lower_precision(region: dict, given: torch.dtype) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ w, F.mse_loss(x, w), x.softmax(-1), x + w

    x, w = randn(8, 8).to(given), randn(8, 8).requires_grad_()
    assert check(function, x, w, around=[region])[0].dtype is region["dtype"]


def test_promoting_the_two_lower_precisions_raises_as_in_eager() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y])

    x, y = randn(4, 4).to(torch.float16), randn(4, 4).to(torch.bfloat16)
    assert check(function, x, y, around=[BF16], lowered=False) == [RAISED[0]]


def test_float64_inputs_are_left_alone() -> None:
    x, w = randn(8, 8, dtype=torch.float64), randn(8, 8, dtype=torch.float64).requires_grad_()
    assert check(matmul_and_more, x, w, around=[BF16])[0].dtype is torch.float64


@needs_torch(2, 13, because="mse_loss has no gradient for mixed dtypes")
def test_float64_mixed_with_float32() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.stack([x, y]), F.mse_loss(x, y), x * y

    x, y = randn(8, 8, dtype=torch.float64), randn(8, 8).requires_grad_()
    assert check(function, x, y, around=[BF16])[0].dtype is torch.float64


def test_complex_inputs_are_left_alone() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.view_as_complex(x @ y)
        return (z @ z.t()).abs(), torch.fft.fft(y).abs(), torch.cat([z, z]).real

    check(function, randn(2, 2).bfloat16(), randn(2, 2).requires_grad_(), around=[BF16])


def test_tensors_without_dimensions() -> None:
    def function(x: torch.Tensor, s: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        return (
            torch.stack([s, s.bfloat16()]),
            F.mse_loss(s, s * 2),
            torch.addmm(s, x, x),
            x @ x * s,
            s**n,
        )

    check(function, randn(8, 8), torch.tensor(3.5).requires_grad_(), 2, around=[BF16])


def test_empty_tensors() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return (
            y,
            torch.cat([y, w]),
            F.linear(x, w),
            y.sum(),
            F.mse_loss(y, w[:0] @ w, reduction="sum"),
        )

    check(function, randn(0, 8), randn(8, 8).requires_grad_(), around=[BF16])


def test_no_inner_dimension() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ w, torch.addmm(w.new_ones(8), x, w), F.linear(x, w.t())

    check(function, randn(8, 0), torch.empty(0, 8).requires_grad_(), around=[BF16])


def test_an_empty_list() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ x, x.new_empty(0)])

    check(function, randn(8, 8).requires_grad_(), around=[BF16])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_inputs(dtype: torch.dtype) -> None:
    """Autocast casts them like any other floating tensor."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, w), F.mse_loss(x, w), x @ w

    assert (
        check(function, randn(8, 8).to(dtype), randn(8, 8).requires_grad_(), around=[BF16])[0].dtype
        is torch.bfloat16
    )


def pair(t: torch.Tensor) -> TwoTensor:
    return TwoTensor(t, t * 2)


@pytest.mark.parametrize("region", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "make", [pair, lambda t: Wrapped(t, "label")], ids=["TwoTensor", "wrapper"]
)
def test_tensor_subclasses(make: Function, region: dict) -> None:
    """As inputs and as weights; both their parts are cast, in one cast of the whole."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.linear(x, w)
        return y, torch.cat([y, y.float()]), (y.sin() @ w).softmax(-1)

    x, w = randn(8, 8), randn(8, 8).requires_grad_()
    kind = type(make(x)).__name__
    assert kind in check(lambda a, b: function(make(a), b), x, w, around=[region])
    assert kind in check(lambda a, b: function(a, make(b)), x, w, around=[region])


@pytest.fixture
def _one_process(tmp_path: Any) -> Iterator[None]:
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_dtensor_on_one_process() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (1,))

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        b = DTensor.from_local(w, mesh, [Replicate()], run_check=False)
        y = F.linear(a, b)
        return F.linear(y.relu(), b).to_local()

    out = check(function, randn(8, 8), randn(8, 8).requires_grad_(), around=[BF16])
    assert out[0].dtype is torch.bfloat16


@pytest.mark.usefixtures("_one_process")
def test_a_dtensor_that_was_computed_of_dynamic_size() -> None:
    """Between layers that are compiled one by one, all with the code of the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).sin()

    def step(**compile_arguments: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(function, dynamic=True, **compile_arguments)
        results = []
        for size in (4, 6):
            x = distribute_tensor(randn(size, 8), mesh, [Shard(1)]).requires_grad_()
            with torch.autocast(**BF16):
                y = compiled(x * 2)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            results += [y.to_local(), gradient.to_local()]
        return results

    actual = step(backend="smart_autocast", options={"inner": "aot_eager"})
    assert_same_bits(actual, step(backend="eager"))


class TwoLayers(nn.Module):
    """The first weight is used twice; `change` makes the parameters something else."""

    def __init__(self, change: Function) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return self.down(self.up(self.up(x)).relu()).float()


def check_parameters(change: Function) -> list[torch.Tensor | None]:
    """Outputs and gradients of two layers, which stay what their parameters are; the gradients."""
    counters.clear()
    given, inputs = functools.partial(TwoLayers, change), (randn(8, 8),)
    options = {"inner": "aot_eager"}
    actual = train_step(given, inputs, backend="smart_autocast", options=options)
    assert (counters["smart_autocast"]["lowered"], counters["smart_autocast"]["bracketed"]) == (
        3,
        0,
    )
    expected = train_step(given, inputs, backend="eager")
    assert_same_bits(*(plain([r["outputs"], r["gradients"]]) for r in (actual, expected)))
    return expected["gradients"]


def test_parameters_that_are_tensor_subclasses() -> None:
    def change(module: TwoLayers) -> None:
        module.up.weight = nn.Parameter(pair(module.up.weight.detach()))

    assert isinstance(check_parameters(change)[0], TwoTensor)


@pytest.mark.usefixtures("_one_process")
def test_parameters_that_are_dtensors() -> None:
    """As tensor parallelism makes them: the first layer is split by rows, the second by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def change(module: TwoLayers) -> None:
        mesh = init_device_mesh("cpu", (1,))
        up = ColwiseParallel(output_layouts=Replicate())
        down = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(module, mesh, {"up": up, "down": down})

    assert all(isinstance(grad, DTensor) for grad in check_parameters(change))


def test_nested_jagged_tensors() -> None:
    layer = nn.Linear(8, 8)

    def function(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        return layer(layer(x).relu()).values()

    offsets = torch.tensor([0, 2, 3, 7])
    out = check(function, randn(7, 8).requires_grad_(), offsets, around=[BF16])
    assert out[0].dtype is torch.bfloat16


def test_is_autocast_enabled_read_inside_the_region() -> None:
    """Dynamo reads the state while it traces, from the region it is in."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**FP16):
            if torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("xpu"):
                x = (x @ x).to(torch.get_autocast_dtype("cpu")) + 1
            with torch.autocast("cpu", enabled=False):
                scale = 1 if torch.is_autocast_enabled("cpu") else 2
        return x * scale

    out = check(function, randn(8, 8).requires_grad_(), around=[BF16])
    assert out[0].dtype is torch.float16
    assert not torch.equal(out[0], out[0].new_zeros(8, 8))


@traces_what_sets_autocast
def test_a_context_written_by_hand() -> None:
    """Of the functions that `torch.autocast` is made of: they change the state for what follows,
    and clearing the cache ends the life of its casts."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.autocast_increment_nesting()
        y = (x @ w).sin() @ w
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])
        return y, x @ w

    out = check(function, randn(8, 8), randn(8, 8).requires_grad_())
    assert [t.dtype for t in out[:2]] == [torch.float16, torch.float32]


@traces_what_sets_autocast
def test_autocast_set_by_hand_inside_of_regions() -> None:
    """The end of a region sets its device type back, and no other."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("xpu", enabled=False):
            torch.set_autocast_enabled("cpu", True)
            with torch.autocast("cpu", enabled=False):
                a = x @ w
                torch.set_autocast_enabled("cpu", True)
                b = x @ w
                torch.set_autocast_enabled("cpu", False)
            c = x @ w
        d = x @ w
        torch.set_autocast_enabled("cpu", False)
        return a, b, c, d, x @ w

    out = check(function, randn(8, 8), randn(8, 8).requires_grad_())
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [t.dtype for t in out[:5]] == [fp32, bf16, bf16, bf16, fp32]


@traces_what_sets_autocast
def test_the_cache_switched_off_and_cleared_by_hand() -> None:
    def once(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin() @ w

    def switched_off(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.set_autocast_cache_enabled(False)
        y = once(x, w)
        torch.set_autocast_cache_enabled(True)
        return y

    def cleared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        torch.clear_autocast_cache()
        return y @ w

    x, w = randn(8, 8), randn(8, 8).requires_grad_()
    shared, *apart = (check(f, x, w, around=[BF16]) for f in (once, switched_off, cleared))
    for seen in apart:
        assert torch.equal(seen[0], shared[0])
        assert not torch.equal(seen[2], shared[2])


def test_a_graph_break_while_autocast_is_set_by_hand() -> None:
    """The code after it finds the state as the code before it has left it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = torch.get_autocast_dtype("cpu")
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        y = x @ w
        torch._dynamo.graph_break()
        z = y @ w
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", before)
        return y, z, y.float() @ w

    def run(**compile_arguments: Any) -> Any:
        torch._dynamo.reset()
        with autocast_put_right():  # Dynamo's own state at a graph break is not all of eager's
            return torch.compile(function, **compile_arguments)(randn(4, 4), randn(4, 4))

    ours = run(backend="smart_autocast", options={"inner": "aot_eager"})
    assert [t.dtype for t in ours] == [torch.float16, torch.float16, torch.float32]
    assert_same_bits(ours, run(backend="eager"))


def check_on_fake_cuda(state: AutocastState, target: Any, *args: Any, calls: list[str]) -> None:
    """One call on fake tensors of both device types: lowered, and the ops and dtypes of eager."""
    with FakeTensorMode():
        made = tuple(_fake(spec) for spec in args)
        expected = call_under(state, target, made)
        module, report = lowered(target, made, {}, state)
        assert report.bracketed == []
        assert targets(module) == calls
        compare(call_under(AutocastState.off(), module, tensors(made)), expected, bits=False)


def _fake(spec: tuple[str, torch.dtype, tuple[int, ...]]) -> torch.Tensor:
    device, dtype, shape = spec
    return torch.empty(shape, dtype=dtype, device=device)


CUDA = ("cuda", torch.float32, (4, 4))
CPU = ("cpu", torch.float32, (4, 4))
CPU_SCALAR = ("cpu", torch.float32, ())
TO_FP16, TO_BF16 = "autocast_to_fp16.default", "autocast_to_bf16.default"
TO_FP32 = "autocast_to_full_precision.default"


def test_a_kernel_on_the_autocast_key_of_cuda() -> None:
    """Its casts are found out by watching it; there is no row for it."""
    library = torch.library.Library("smart_autocast_edges", "FRAGMENT")
    library.define("product(Tensor x, Tensor w) -> Tensor")
    op = torch.ops.smart_autocast_edges.product.default

    def rule(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with AutocastState.off().applied():
            return op(x.to(torch.get_autocast_dtype("cuda")), w.float())

    library.impl("product", lambda x, w: x * w, "CompositeExplicitAutograd")
    library.impl("product", rule, "AutocastCUDA")
    try:
        half = ("cuda", torch.float16, (4, 4))
        calls = [TO_FP16, TO_FP32, "product.default"]
        check_on_fake_cuda(AutocastState.of(CUDA_FP16), op, CUDA, half, calls=calls)
    finally:
        library._destroy()


def test_scalars_on_the_cpu_mixed_with_cuda_tensors() -> None:
    """CUDA autocast casts CUDA tensors alone."""
    state = AutocastState.of(CUDA_FP16)
    half = ("cuda", torch.float16, (4, 4))
    check_on_fake_cuda(state, torch.pow, half, CPU_SCALAR, calls=[TO_FP32, "pow"])
    check_on_fake_cuda(
        state,
        torch.addcmul,
        half,
        CUDA,
        CPU_SCALAR,
        calls=["promote.default", *["getitem"] * 2, "addcmul"],
    )
    check_on_fake_cuda(state, torch.mul, CUDA, CPU_SCALAR, calls=["mul"])


def test_autocast_of_the_cpu_while_tensors_are_on_cuda() -> None:
    check_on_fake_cuda(AutocastState.of(BF16), torch.mm, CUDA, CUDA, calls=["mm"])


def test_autocast_of_cuda_while_tensors_are_on_the_cpu() -> None:
    check_on_fake_cuda(AutocastState.of(CUDA_FP16), torch.mm, CPU, CPU, calls=["mm"])
    check_on_fake_cuda(
        AutocastState.of(CUDA_FP16), torch.mm, CUDA, CUDA, calls=[TO_FP16, TO_FP16, "mm"]
    )


def test_autocast_of_both_while_tensors_are_on_one() -> None:
    both = AutocastState.of([BF16, CUDA_FP16])
    check_on_fake_cuda(both, torch.mm, CPU, CPU, calls=[TO_BF16, TO_BF16, "mm"])
    check_on_fake_cuda(both, torch.mm, CUDA, CUDA, calls=[TO_FP16, TO_FP16, "mm"])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", ["ambient", "region"])
def test_numpy_knows_no_autocast(way: str, grad: bool) -> None:
    """Dynamo computes NumPy's functions, methods and operators on tensors: stock in bfloat16. Small
    integers, because torch and NumPy add up in other orders."""

    @torch._dynamo.allow_in_graph
    def hidden(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # proved for the dtypes it gets
        return x @ w

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast(**BF16) if way == "region" else contextlib.nullcontext():
            a = x.detach().numpy()
            by_function = torch.from_numpy(np.matmul(a, a + 256))
            by_method = torch.from_numpy(a.dot(a + 256))
            by_operator = torch.from_numpy(a @ (a + 256))
            return torch.cat([by_function, x @ w]), hidden(by_method, w), by_operator

    def results(function: Callable[..., Any]) -> list[Any]:
        x, w = (torch.arange(16.0).view(4, 4).requires_grad_(grad) for _ in range(2))
        with torch.autocast(**BF16, enabled=way == "ambient"):
            outputs = function(x, w)
        if grad:
            (outputs[0].sum() + outputs[1].sum()).backward()
        return [*outputs, x.grad, w.grad]

    torch._dynamo.reset()
    options = {"inner": "aot_eager"}
    compiled = torch.compile(function, fullgraph=True, backend="smart_autocast", options=options)
    expected = results(function)
    assert [y.dtype for y in expected[:3]] == [torch.float32, torch.bfloat16, torch.float32]
    assert_same_bits(results(compiled), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_torchscript_casts_is_not_seen_but_told(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo traces the Python code of a scripted function, with each backend. TorchScript, which
    runs it in eager mode, has casts of its own under autocast: it divides in float32."""

    def half(x: torch.Tensor) -> torch.Tensor:
        return x / 2.0

    scripted = torch.jit.script(half)

    def function(x: torch.Tensor) -> torch.Tensor:
        return scripted(x)

    def compiled(function: Any, x: torch.Tensor, backend: str = "smart_autocast") -> Any:
        torch._dynamo.reset()
        caplog.clear()
        options = {"inner": "aot_eager"} if backend == "smart_autocast" else None
        return torch.compile(function, backend=backend, options=options)(x)

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "autocast_backend"]

    x = randn(4).bfloat16()
    apart = torch.compiler.disable(function)
    with torch.autocast(**BF16):
        assert function(x).dtype is torch.float32
        for backend in ("eager", "aot_eager", "smart_autocast"):
            result = compiled(function, x, backend)
            assert result.dtype is torch.bfloat16
            assert_same_bits(result, half(x))
        (warning,) = told()
        assert re.search(r"^half \(.*test_edge_semantics.py:\d+\) is .*torch.jit.script", warning)
        assert_same_bits(compiled(lambda x: apart(x * 2) * 2, x), apart(x * 2) * 2)  # as it says
        assert not told()
        compiled(function, x.float())
        assert not told()
        before = torch._C._jit_set_autocast_mode(False)
        try:
            compiled(function, x)
            assert not told()
        finally:
            torch._C._jit_set_autocast_mode(before)
    compiled(function, x)
    assert not told()
