"""Upstream issues about autocast and backward passes that Inductor compiles, as in
test_upstream_issues.py."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.backward.support import EAGER, STOCK, ours, same_bits
from tests.support import assert_same_bits

CUDA = [pytest.mark.gpu, pytest.mark.slow]


def compilers(device: str) -> list[dict[str, Any]]:
    """Ours; and stock where the issues were seen: on GPUs."""
    return [ours("inductor"), *([{"backend": "inductor"}] if device == "cuda" else [])]


def attention(
    device: str,
    dtype: torch.dtype,
    query: tuple[int, ...],
    key: tuple[int, ...],
    masked: bool,
    **compile_arguments: Any,
) -> list[Any]:
    """The math kernel under autocast, backward outside of it: the result and the gradients."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*shape, generator=generator).to(device).requires_grad_()
        for shape in (query, key, key)
    )
    size = query[-2]
    mask = torch.ones(size, size, dtype=torch.bool, device=device).tril() if masked else None
    grouped = query[1] != key[1]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    with torch.autocast(device, dtype), sdpa_kernel(SDPBackend.MATH):
        y = torch.compile(function, **compile_arguments)(q, k, v)
    y.float().square().sum().backward()
    return [y, q.grad, k.grad, v.grad]


def assert_near(actual: list[Any], expected: list[Any]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        # A few roundings to bfloat16 (2^-9 each), next to the largest value of each tensor.
        assert (a.float() - e.float()).abs().max() <= 2**-6 * e.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shapes",
    [((1, 2, 8, 16), (1, 2, 8, 16), False), ((1, 4, 7, 8), (1, 2, 7, 8), True)],
    ids=["133974", "159469"],
)
def test_the_math_kernels_gradients(dtype: torch.dtype, shapes: Any) -> None:
    """The attention of both issues below. With nothing but AOTAutograd, stock's gradients differ
    from eager's: their backward is outside of autocast, stock's as if inside."""
    stock, eager, mine = (
        attention("cpu", dtype, *shapes, **arguments) for arguments in (STOCK, EAGER, ours())
    )
    assert_same_bits(stock[0], eager[0])
    assert not same_bits(stock, eager)
    assert_same_bits(mine, eager)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_133974_the_math_kernel_through_inductor(device: str) -> None:
    """PyTorch #133974: a pass removed a cast as needless because a bmm, run under autocast, seemed
    to be in float16. Stock does not crash any more on 2.13."""
    shape = (1, 2, 8, 16) if device == "cpu" else (1, 16, 1024, 64)
    expected = attention(device, torch.float16, shape, shape, False, **EAGER)
    for arguments in compilers(device):
        assert_near(attention(device, torch.float16, shape, shape, False, **arguments), expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_159469_grouped_queries_of_an_odd_length(device: str) -> None:
    """PyTorch #159469: NaNs, because padding a bmm under autocast changed its dtype and nobody else
    was told. Inductor pads only on GPUs. Stock is right on 2.13."""
    small, large = ((1, 4, 7, 8), (1, 2, 7, 8)), ((2, 32, 549, 64), (2, 8, 549, 64))
    shapes = small if device == "cpu" else large
    expected = attention(device, torch.bfloat16, *shapes, True, **EAGER)
    for arguments in compilers(device):
        actual = attention(device, torch.bfloat16, *shapes, True, **arguments)
        assert all(t.isfinite().all() for t in actual)
        assert_near(actual, expected)


PROGRAM = """
import sys
import torch
from torch import nn
from torch._inductor.lowering import make_fallback

make_fallback(torch.ops.aten.mm)
device = sys.argv[1]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        y = self.a(x)
        with torch.autocast(device, enabled=False):
            return self.b(y.float())

def train(model, x):
    with torch.autocast(device, torch.bfloat16):
        loss = model(x).square().sum()
        loss.backward()

for backend in ("eager", "smart_autocast", "inductor"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().to(device)
    x = torch.linspace(-1, 1, 40).view(5, 8).to(device)
    torch.compile(train, backend=backend, dynamic=True)(model, x)
    print([model.a.weight.grad.flatten().tolist()], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_194329_a_dynamic_backward_inside_the_region(device: str) -> None:
    """PyTorch #194329: with dynamic shapes the backward is compiled when the forward is, with
    autocast off around it, and then runs inside the region: a kernel called through the dispatcher
    returns another dtype than its buffer has. In the issue that is aten.sum on CUDA, here aten.mm.
    Stock reads memory that is not its own, so it gets a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, device],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("[[")]
    assert len(lines) >= 2, found.stderr
    eager, mine, *stock = (torch.tensor(_numbers(line)) for line in lines)
    assert_near([mine], [eager])
    assert not stock or not torch.allclose(stock[0], eager, rtol=0.1, atol=0.1)


def _numbers(line: str) -> Any:
    return ast.literal_eval(line.replace("nan", "0").replace("inf", "0"))


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_zeros_of_forward_mode_have_memory(dtype: torch.dtype | None) -> None:
    """Forward-mode AD gives a weight that has no tangent ATen's zero tensor. Inductor's kernels
    read from its address, 0, and ATen's products raise, with stock, too."""

    def with_tangent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, tangent = torch.func.jvp(lambda x: F.linear(x.relu(), w, w[0] * 3), (x,), (x / 2,))
        return y + tangent

    def gradients(function: Any) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        w = torch.linspace(-1, 2, 64).view(8, 8).sin().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(x, w)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            y.float().square().sum().backward()
        return [y, x.grad, w.grad]  # type: ignore[list-item]

    torch._dynamo.reset()
    expected = gradients(with_tangent)
    assert_near(gradients(torch.compile(with_tangent, **ours("inductor"))), expected)
    op_by_op = torch.compile(with_tangent, backend="smart_autocast", mode="lite")
    for actual, bits in zip(gradients(op_by_op), expected, strict=True):
        assert_same_bits(actual, bits)
