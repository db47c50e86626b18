"""One call under real autocast and lowered, and what both do below autograd.

On the CPU with real tensors; for other device types inside a FakeTensorMode, where autocast casts
as it does on the device, and without gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autocast_backend.lowering import recipes
from autocast_backend.reports.report import Report
from autocast_backend.state import AutocastState
from tests.support import (
    LOW_PRECISION_LSTM,
    assert_same_bits,
    graph_of,
    lower_with_report,
    tensors,
)

_CAST = torch.ops.aten._to_copy.default

PINNED = Version(torch.__version__).release[:2] == (2, 13) and not torch.backends.cuda.is_built()
"""Whether this is the build of torch that numbers and exceptions were written down for. On others
an op may have lost or gained what it takes to run without its device."""

NO_DEVICE = (
    "not compiled with|not linked with|Could not run|unexpected device type|CUDA|NVIDIA"
    "|could not create a primitive"
)
"""What eager says of a kernel that needs a device, a processor or a build of torch for it."""

NO_KERNEL = () if LOW_PRECISION_LSTM else (("cpu", "mkldnn_rnn_layer"),)
"""Ops that this processor has no kernel for in a lower precision."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, tuple[torch.dtype, ...]]] = []
        self.casts: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _CAST:
            self.casts[id(args[0])] = kwargs["dtype"]
        elif func.namespace == "aten" and func is not torch.ops.aten.promote_types.default:
            self.ops.append((str(func), tuple(t.dtype for t in tensors((args, kwargs)))))
        return func(*args, **kwargs)


@dataclass
class Outcome:
    """What a call did.

    Attributes:
        error: the message of what it raised; None where it did not.
        values: the tensors it returned.
        ops: each op below autograd but casts, with the dtypes it got.
        casts: `id` of each tensor that was cast, and to what.
    """

    error: str | None = None
    values: list[torch.Tensor] = field(default_factory=list)
    ops: list[tuple[str, tuple[torch.dtype, ...]]] = field(default_factory=list)
    casts: dict[int, torch.dtype] = field(default_factory=dict)


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Run a call without gradients, and say what it did or raised."""
    recorder = _Recorder()
    torch.manual_seed(0)
    try:
        with torch.no_grad(), recorder:
            value = call(*args, **kwargs)
    except Exception as error:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(message, [], recorder.ops, recorder.casts)
    return Outcome(None, tensors(value), recorder.ops, recorder.casts)


def call_under(
    state: AutocastState, target: Callable[..., Any] | str, args: Any, kwargs: Any = None
) -> Outcome:
    """Make a call, of a method where `target` is a name, under an autocast state."""

    def call() -> Any:
        return recipes.run(target, tuple(args), kwargs or {})

    with state.applied():
        return outcome(call)


def lowered(
    target: Any, args: Any, kwargs: Any, state: AutocastState
) -> tuple[fx.GraphModule, Report]:
    """The graph of one call after lowering. Its example values are fake, as Dynamo leaves them."""
    with torch.no_grad():
        module = graph_of(target, args, kwargs, state)
        mode = FakeTensorMode()
        for node in module.graph.nodes:
            node.meta["example_value"] = pytree.tree_map_only(
                torch.Tensor,
                lambda t: t if isinstance(t, FakeTensor) else mode.from_tensor(t),
                node.meta.get("example_value"),
            )
        return module, lower_with_report(module, state)


def compare(actual: Outcome, expected: Outcome, bits: bool) -> None:
    """The same ops with the same dtypes, and results of the same dtypes or bits."""
    assert actual.error is None
    assert actual.ops == expected.ops
    assert [t.dtype for t in actual.values] == [t.dtype for t in expected.values]
    if bits:
        assert_same_bits(_resolved(actual.values), _resolved(expected.values))


def _resolved(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Without lazy conjugation, which comparing bits trips over."""
    return [t.resolve_conj().resolve_neg() for t in values]


def tensors_of(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Where tensors of this device type are real on the CPU, and fake elsewhere."""
    return contextlib.nullcontext() if device_type == "cpu" else FakeTensorMode()
