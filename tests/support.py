"""Shared helpers: one-node graphs, and comparing a compiled model with the oracle.

The oracle ("equal to eager autocast") is the same Dynamo graph run under real autocast:
`torch.compile(backend="eager")`. Some models take another path when they are traced at all; that
difference is not ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autocast_backend.lowering.context import Context
from autocast_backend.lowering.lower import lower
from autocast_backend.reports.report import Report
from autocast_backend.state import AutocastState, contexts_entered, put_right

TORCH = Version(torch.__version__).release[:2]


def needs_torch(*version: int, because: str) -> pytest.MarkDecorator:
    """Skip a test of something that PyTorch does from this version on."""
    return pytest.mark.skipif(version > TORCH, reason=f"before torch {version}, {because}")


DEVICE = "cpu"
"""Of random models and of what PyTorch lists; `--device` sets it, before they are imported."""

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}
FP16 = {"device_type": "cpu", "dtype": torch.float16}


def _has_low_precision_lstm() -> bool:
    try:
        with torch.no_grad(), torch.autocast(**BF16):
            nn.LSTM(1, 1)(torch.ones(1, 1, 1))
    except RuntimeError:
        return False
    return True


LOW_PRECISION_LSTM = _has_low_precision_lstm()
"""Whether `nn.LSTM` runs under autocast on this CPU: without AVX-512, oneDNN has no kernel for it,
and eager autocast raises."""


class Product(torch.autograd.Function):
    """`x @ w`, with a backward that computes in float32 whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad.float() @ w.t().float(), x.transpose(-1, -2).float() @ grad.float()


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a nest, in order."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def weighted_sum(outputs: Iterable[torch.Tensor]) -> torch.Tensor:
    """A loss with another gradient for each element, in the strides of the output: AOTAutograd
    copies gradients of other strides, as the expanded ones of a plain sum, for its backward."""

    def of(output: torch.Tensor) -> torch.Tensor:
        dense = (output if output.layout is torch.strided else output.to_dense()).float()
        weights = torch.linspace(0.5, 1.5, dense.numel(), device=dense.device)
        return (dense * torch.empty_like(dense).copy_(weights.view(dense.shape))).sum()

    return torch.stack([of(output) for output in outputs]).sum()


def assert_same_bits(actual: Any, expected: Any, what: str = "") -> None:
    """Same dtypes, and the same bits (NaNs included) in two nests of tensors or Nones."""
    flat_actual, flat_expected = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(flat_actual) == len(flat_expected), what
    for i, (a, e) in enumerate(zip(flat_actual, flat_expected, strict=True)):
        if not isinstance(e, torch.Tensor):
            assert a == e, f"{what}[{i}]"
            continue
        assert a.dtype == e.dtype, f"{what}[{i}]: {a.dtype} instead of {e.dtype}"
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True, msg=f"{what}[{i}] differs")


def train_step(
    make: Callable[[], nn.Module], inputs: tuple[Any, ...], **compile_arguments: Any
) -> dict[str, Any]:
    """Build a model, compile it, run it forward and backward: outputs, gradients and buffers.

    Every random number (weights, dropout) starts from the same seed.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(model, **compile_arguments)
    torch.manual_seed(1)
    outputs = compiled(*inputs)
    floating = [t for t in tensors(outputs) if t.is_floating_point() and t.requires_grad]
    if floating:
        torch.stack([t.float().square().mean() for t in floating]).sum().backward()
    return {
        "outputs": tensors(outputs),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
    }


@contextlib.contextmanager
def autocast_put_right() -> Iterator[None]:
    """For oracles that raise, or stop by an exception, inside a region of their graph."""
    before, entered = AutocastState.current(), contexts_entered()
    try:
        yield
    finally:
        put_right(before, entered)


def graph_of(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: AutocastState
) -> fx.GraphModule:
    """A graph of one call, as Dynamo would have traced it under `state`: example values included.

    `target` is a function, or the name of a method.
    """
    graph = fx.Graph()

    def node_for(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["example_value"] = value
            return node
        if isinstance(value, (list, tuple)):
            return type(value)(node_for(v) for v in value)
        return value

    op = "call_method" if isinstance(target, str) else "call_function"
    node = graph.create_node(
        op, target, node_for(args), {name: node_for(v) for name, v in kwargs.items()}
    )
    call = getattr(args[0], target) if isinstance(target, str) else target
    with state.applied():
        node.meta["example_value"] = call(
            *(args[1:] if isinstance(target, str) else args), **kwargs
        )
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph)


def lower_with_report(
    graph_module: fx.GraphModule, ambient: AutocastState, validate: str = "strict"
) -> Report:
    """Lower in place and return the report."""
    context = Context(ambient=ambient, validate=validate)
    lower(graph_module, context)
    return context.report


def capture(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """The one Dynamo graph of a call, as a backend gets it."""
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def targets(graph_module: fx.GraphModule) -> list[str]:
    """What the graph calls, in order, bodies of higher-order ops included."""
    return [
        getattr(n.target, "__name__", str(n.target))
        for module in graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for n in module.graph.nodes
        if n.op in ("call_function", "call_method")
    ]


class HalvesProducts(TorchFunctionMode):
    """Halves what `F.linear` and `torch.matmul` give."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function in (torch.matmul, nn.functional.linear) else result
