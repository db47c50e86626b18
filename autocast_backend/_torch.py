"""The one home of PyTorch's private APIs.

Every other module of the package stays on public names. Each function here says why the private
name is needed; all were tried on torch 2.13.0, and none of them is known to differ on 2.11 to 2.15
unless its docstring says so. Imports stand inside the functions because `torch._dynamo` and
`torch._inductor` take seconds to load and the smart cast ops must not pay for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["enter_autocast", "exit_autocast"]


# --- autocast ------------------------------------------------------------------------------------


def autocast_device_types() -> tuple[str, ...]:
    """Every device type autocast knows: no public call lists them."""
    return tuple(torch._C._autocast_supported_devices())


def autocast_registrations(device_type: str) -> list[str]:
    """The dispatcher's own list of ops with an autocast kernel, as `aten::name.overload`."""
    key = {"cuda": "CUDA", "cpu": "CPU", "xpu": "XPU", "mps": "MPS"}[device_type]
    return torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{key}")


def disable_autocast() -> contextlib.AbstractContextManager[None]:
    """Switch autocast off for every device type at once: about a microsecond, against one
    `torch.autocast(device_type, enabled=False)` per device type."""
    return torch._C._DisableAutocast()


def bystander_device_types() -> list[str]:
    """Device types that autocast knows and that no tensor of a PyTorch build lives on."""
    return [d for d in ("ipu", "maia", "hpu") if d in autocast_device_types()]


# --- Dynamo --------------------------------------------------------------------------------------


def pass_through_error() -> type[Exception]:
    """The base class of errors that Dynamo hands to the user unchanged; any other class raised by a
    backend arrives wrapped in `BackendCompilerFailed`, which `except ValueError` does not catch."""
    from torch._dynamo.exc import ShortenTraceback

    return ShortenTraceback


def lookup_backend(name: str) -> Callable[..., Any]:
    """The registered Dynamo backend `name`; there is no public lookup."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def backend_names() -> list[str]:
    """Every registered backend, debugging ones (`aot_eager`, `eager`) included."""
    from torch._dynamo.backends.registry import list_backends

    return list_backends(exclude_tags=())


def counters() -> Any:
    """Dynamo's counters: what `torch.compile` did, by subsystem. Ours is `smart_autocast`."""
    from torch._dynamo.utils import counters

    return counters


def timed(stage: str) -> contextlib.AbstractContextManager[Any]:
    """Record a stage in `torch._dynamo.utils.compile_times()`."""
    from torch._dynamo.utils import dynamo_timed

    return dynamo_timed(f"smart_autocast.{stage}")


# --- fake tensors --------------------------------------------------------------------------------


def fake_mode_of(values: Iterable[Any]) -> Any | None:
    """The FakeTensorMode of the first fake tensor among `values`, wrapper subclasses included.

    Not `detect_fake_mode`: while a backend runs, the tracing context holds a second fake mode, and
    the example values of Dynamo's graph do not belong to it.
    """
    from torch._subclasses.fake_tensor import maybe_get_fake_mode
    from torch.utils import _pytree as pytree

    for value in values:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and (mode := maybe_get_fake_mode(leaf)) is not None:
                return mode
    return None


@contextlib.contextmanager
def observing(fake_mode: Any) -> Iterator[None]:
    """Run ops on fake tensors without leaving a trace in the compilation: no guard is added and the
    unbacked symbols of data-dependent ops are forgotten."""
    with contextlib.ExitStack() as stack:
        shape_env = fake_mode.shape_env
        if shape_env is not None:
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(fake_mode)
        yield


def is_functorch_transform(target: Any) -> int:
    """+1 where a graph node enters a `torch.func` transform, -1 where it leaves one, else 0.

    Between the two, example values are wrappers of a transform level that no longer exists.
    """
    name = getattr(target, "__name__", "")
    if name.endswith("_increment_nesting"):
        return 1
    return -1 if name.endswith("_decrement_nesting") else 0


def is_higher_order_op(target: Any) -> bool:
    """Whether a node's target takes subgraphs (`torch.ops.higher_order.*`)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_set_grad_enabled(target: Any) -> bool:
    """Dynamo writes `torch.no_grad()` as calls of this private function."""
    return target is torch._C._set_grad_enabled


# --- AOTAutograd and Inductor --------------------------------------------------------------------


def backward_pass_autocast_config() -> Any:
    """`torch._functorch.config.backward_pass_autocast`, documented but private by its module."""
    from torch._functorch import config

    return config.backward_pass_autocast


def patch_backward_pass_autocast(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Set what AOTAutograd assumes about autocast while it traces a backward."""
    from torch._functorch import config

    return config.patch(backward_pass_autocast=value)


def inductor_mode_options(mode: str | None = None) -> dict[str, Any]:
    """What `torch.compile(mode=...)` means as Inductor config patches; all modes for None."""
    import torch._inductor

    return torch._inductor.list_mode_options(mode) if mode else torch._inductor.list_mode_options()


def inductor_config_names() -> frozenset[str]:
    """Every name that an Inductor config patch may set."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def compile_cache_dir() -> str | None:
    """The folder of torch.compile's caches on disk; None where they are switched off."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    off = torch.compiler.config.force_disable_caches or not config.fx_graph_cache
    return None if off else cache_dir()


def symbol_key(symbol: Any) -> str:
    """A SymInt, SymFloat or SymBool as its expression and the value it had when it was traced; the
    hint, because which kernel an op picks may hang on it."""
    return f"{symbol.node.expr}={symbol.node._hint}"
