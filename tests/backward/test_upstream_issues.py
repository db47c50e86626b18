"""Upstream issues about autocast and compiled backward passes.

Each test first shows what stock does on the installed torch (written on 2.13), wrong or by now
right, then compares this backend with eager. What only a GPU shows is marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.backward.support import EAGER, STOCK, ours, same_bits
from tests.support import assert_same_bits

EVERYWHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def autocast(device: str, dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> torch.autocast:
    return torch.autocast(device, dtype, **arguments)


def random(device: str, *shape: int, **arguments: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device=device, **arguments).requires_grad_()


class Overflowing(nn.Module):
    """The model of #153044."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(4, 4))
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.ones
        with torch.autocast(x.device.type, enabled=False):
            return self.linear(y.float())


def overflowing_gradient(device: str, backward: bool, **compile_arguments: Any) -> float:
    """A gradient of 4 * 16384 = 65536, which float16 does not have."""
    torch._dynamo.reset()
    model = Overflowing().to(device)
    compiled = torch.compile(model, **compile_arguments)
    with autocast(device, torch.float16):
        loss = (compiled(torch.ones(1, 4, device=device)) * 16384).sum()
    with autocast(device, torch.float16, enabled=backward):
        loss.backward()
    assert model.linear.weight.grad is not None
    return model.linear.weight.grad[0, 0].item()


@EVERYWHERE
def test_153044_an_island_of_float32_does_not_overflow(device: str) -> None:
    """PyTorch #153044: backward outside of autocast, computed as if inside."""
    assert overflowing_gradient(device, False, **STOCK) == float("inf")
    assert overflowing_gradient(device, False, **EAGER) == 65536
    assert overflowing_gradient(device, False, **ours()) == 65536


@EVERYWHERE
def test_177199_off_as_the_default_is_only_right_outside(device: str) -> None:
    """PyTorch #177199 would make "off" the default: right for a backward outside of autocast, but
    inside it eager overflows and stock then does not."""
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        stock = [overflowing_gradient(device, backward, **STOCK) for backward in (False, True)]
    assert stock == [65536, 65536]
    for arguments in (EAGER, ours()):
        found = [overflowing_gradient(device, backward, **arguments) for backward in (False, True)]
        assert found == [65536, float("inf")]


@EVERYWHERE
def test_179804_backward_of_a_disabled_region_inside_the_compiled_function(device: str) -> None:
    """PyTorch #179804: the region is the whole compiled function, autocast stands around it."""

    def gradients(**compile_arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        weight = random(device, 64, 64)
        x = random(device, 4, 64, dtype=torch.bfloat16)

        def function(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, enabled=False):
                return x.float() @ weight.T

        with autocast(device):
            y = torch.compile(function, **compile_arguments)(x)
        (y * random(device, 4, 64).detach()).sum().backward()
        return [y, x.grad, weight.grad]

    stock, eager, mine = gradients(**STOCK), gradients(**EAGER), gradients(**ours())
    assert_same_bits(stock[0], eager[0])
    assert not same_bits(stock, eager)
    assert_same_bits(mine, eager)


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_132715_backward_of_index_put_promotes(device: str, dtype: torch.dtype) -> None:
    """PyTorch #132715: autocast promotes the arguments of index_put, on CUDA, and raises where they
    have a lower precision that is not its own. Once it had the wrong one in a backward there, for
    the dtype did not reach autograd's threads. On 2.11 and 2.13 it does, and stock is right, but
    where eager raises: stock does not know the state of the backward."""
    index = torch.arange(60, device=device).view(3, 4, 5) % 3

    def gradients(**compile_arguments: Any) -> list[Any]:
        torch._dynamo.reset()
        x = random(device, 3, 4, 5, dtype=torch.bfloat16)
        value = random(device, 1, dtype=torch.bfloat16)
        put = torch.compile(
            lambda x, value: torch.index_put(x, [index], value), **compile_arguments
        )
        with autocast(device):
            y = put(x, value)
        with autocast(device, dtype):
            (y * torch.arange(5, device=device)).mean().backward()
        return [y, x.grad, value.grad]

    if device == "cuda" and dtype == torch.float16:
        for arguments in (EAGER, ours()):
            with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
                gradients(**arguments)
        return
    eager = gradients(**EAGER)
    assert eager[0].dtype == torch.bfloat16
    assert eager[2].item() > 0
    assert_same_bits(gradients(**STOCK), eager)
    assert_same_bits(gradients(**ours()), eager)


@EVERYWHERE
def test_141896_checkpoint_after_no_grad(device: str) -> None:
    """PyTorch #141896: a cast that autocast has cached is used by the forward of a checkpoint and
    is not there when backward computes it again. Eager mode is right; the Dynamo graph, run by
    torch.compile(backend="eager"), fails on 2.13 (not on 2.11). Right is what the model without a
    checkpoint gives."""

    def gradients(compiled: Callable[..., Any], reentrant: bool | None = False) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)

        def function(x: torch.Tensor) -> torch.Tensor:
            with autocast(device):
                with torch.no_grad():
                    model(x)
                if reentrant is None:
                    return model(x).float()
                return checkpoint(model, x, use_reentrant=reentrant).float()

        compiled(function)(random(device, 2, 8)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
        with pytest.raises(RuntimeError, match="not found in storage"):
            gradients(lambda f: torch.compile(f, **EAGER))
    expected = gradients(lambda f: f, reentrant=None)
    assert_same_bits(gradients(lambda f: torch.compile(f, **STOCK)), expected)
    assert_same_bits(gradients(lambda f: torch.compile(f, **ours())), expected)


def saved_casts(outputs: Iterable[torch.Tensor], weight: torch.Tensor) -> int:
    """How many copies of `weight` in bfloat16 are kept for backward."""
    pending: list[Any] = [y.grad_fn for y in outputs]
    met, copies = set(), set()
    while pending:
        node = pending.pop()
        if node is None or node in met:
            continue
        met.add(node)
        pending += [following for following, _ in node.next_functions]
        names = [n for n in dir(node) if n.startswith("_saved") or n == "saved_tensors"]
        for value in (v for name in names for v in _listed(getattr(node, name))):
            if (
                isinstance(value, torch.Tensor)
                and value.dtype == torch.bfloat16
                and value.untyped_storage().nbytes() == 2 * weight.numel()
            ):
                copies.add(value.untyped_storage().data_ptr())
    return len(copies)


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def copies_in_one_graph(device: str, **compile_arguments: Any) -> int:
    torch._dynamo.reset()
    layer, x = nn.Linear(8, 8).to(device), random(device, 5, 2, 8)
    function = torch.compile(lambda x: [layer(row) for row in x.unbind()], **compile_arguments)
    with autocast(device):
        return saved_casts(function(x), layer.weight)


@EVERYWHERE
def test_133637_a_weight_used_five_times_is_saved_once(device: str) -> None:
    """PyTorch #133637: a cast for each use, each kept for backward. Where stock's partitioner
    merges equal nodes it is right on 2.13; without that, five."""
    with torch._functorch.config.patch(cse=False):
        assert copies_in_one_graph(device, **STOCK) == 5
        assert copies_in_one_graph(device, **EAGER) == 1
        assert copies_in_one_graph(device, **ours()) == 1
    assert copies_in_one_graph(device, **STOCK) == 1
    assert copies_in_one_graph(device, **ours()) == 1


@EVERYWHERE
def test_133637_five_calls_of_one_compiled_layer(device: str) -> None:
    """As the issue has it. Eager's cache lives until the outermost autocast ends; so does ours, and
    stock's graphs cast by themselves."""

    def copies(**compile_arguments: Any) -> int:
        torch._dynamo.reset()
        layer, x = nn.Linear(8, 8).to(device), random(device, 5, 2, 8)
        compiled = torch.compile(layer, **compile_arguments)
        with autocast(device):
            return saved_casts([compiled(row) for row in x.unbind()], layer.weight)

    assert copies(**EAGER) == 1
    assert copies(**STOCK) == 5
    assert copies(**ours()) == 1
    assert copies(**ours(weight_cache="off")) == 5
