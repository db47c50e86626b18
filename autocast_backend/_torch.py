"""The one home of PyTorch's private APIs.

Every other module of the package stays on public names. Each function here says why the private
name is needed; all were tried on torch 2.13.0, and none of them is known to differ on 2.11 to 2.15
unless its docstring says so. Imports stand inside the functions because `torch._dynamo` and
`torch._inductor` take seconds to load and the smart cast ops must not pay for them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

__all__ = ["enter_autocast", "exit_autocast"]


# --- autocast ------------------------------------------------------------------------------------


def autocast_device_types() -> tuple[str, ...]:
    """Every device type autocast knows: no public call lists them."""
    return tuple(torch._C._autocast_supported_devices())


def autocast_registrations(device_type: str) -> list[str]:
    """The dispatcher's own list of ops with an autocast kernel, as `aten::name.overload`."""
    return torch._C._dispatch_get_registrations_for_dispatch_key(_autocast_key(device_type))


def disable_autocast() -> contextlib.AbstractContextManager[None]:
    """Switch autocast off for every device type at once: about a microsecond, against one
    `torch.autocast(device_type, enabled=False)` per device type."""
    return torch._C._DisableAutocast()


def any_autocast_enabled() -> bool:
    """Whether autocast is on for any device type: one call of 40 ns, against one for each."""
    return torch._C._is_any_autocast_enabled()


def has_autocast_kernel(op: torch._ops.OpOverload, device_types: Iterable[str]) -> bool:
    """Whether autocast does something of its own for `op`: PyTorch's rules, registered ones too."""
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _autocast_key(d))
        for d in device_types
    )


def _autocast_key(device_type: str) -> str:
    """The dispatch key of autocast; "privateuseone" and the names given to it share one."""
    named = ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "ipu", "hpu", "xla")
    return f"Autocast{device_type.upper() if device_type in named else 'PrivateUse1'}"


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


def fake_inputs(inputs: Iterable[Any]) -> list[Any]:
    """The fake tensors AOTAutograd will trace a graph's real inputs with: same mode, same symbolic
    sizes. They can be kept when the real ones must not be."""
    from torch._guards import TracingContext
    from torch._subclasses import FakeTensorMode

    tracing = TracingContext.try_get()
    mode = tracing.fake_mode if tracing and tracing.fake_mode else FakeTensorMode()
    contexts = tracing.tensor_to_context if tracing else {}

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or fake_mode_of([value]) is not None:
            return value
        context = contexts.get(value)
        if context is None:
            return mode.from_tensor(value, static_shapes=True)
        return mode.from_tensor(
            value, symbolic_context=context, source=context.tensor_source, trace=False
        )

    return [fake(value) for value in inputs]


def fake_like(fake: Any, real: Any) -> Any:
    """`fake` with the strides of `real`, which a compiled forward may have chosen itself; where
    there is no fake, one of `real`'s sizes."""
    if not isinstance(real, torch.Tensor):
        return real if fake is None else fake
    if fake is None:
        from torch._guards import TracingContext

        return TracingContext.get().fake_mode.from_tensor(real, static_shapes=True)
    if any(isinstance(size, torch.SymInt) for size in fake.shape) or (
        fake.stride() == real.stride()
    ):
        return fake
    return fake.as_strided(fake.shape, real.stride())


def symbol_of(size: Any) -> Any | None:
    """The symbol of a dynamic size, as it was before anything was assumed about it; None for a
    number or an expression."""
    expression = size.node._expr if isinstance(size, torch.SymInt) else None
    return expression if getattr(expression, "is_Symbol", False) else None


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

# --- AOTAutograd ---------------------------------------------------------------------------------


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """The lock under which Dynamo compiles. Reentrant."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def backward_pass_autocast_config() -> Any:
    """`torch._functorch.config.backward_pass_autocast`, documented but private by its module; None
    where it has its default value."""
    from torch._functorch import config

    value = config.backward_pass_autocast
    return None if value == "same_as_forward" else value


def backward_traced_off() -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd traces the backward under what is on, which is nothing, and its cache key has the
    default in it, whatever the user has set."""
    from torch._functorch import config

    return config.patch(backward_pass_autocast="same_as_forward")


@dataclass
class TrainingGraph:
    """What AOTAutograd knows of one training graph when forward and backward are compiled, or
    loaded from its cache, and about to become a `torch.autograd.Function`.

    Attributes:
        compiled_backward: the compiled backward, where there is one already: loaded from the cache,
            or compiled early because of dynamic shapes.
        compile_backward: compiles a backward graph for its list of fake inputs, as the inner
            compiler does; None on a cache hit.
        backward_module: the backward graph, as partitioned.
        placeholders: fake inputs of the backward graph with the strides the compiled forward gives
            them; None on a cache hit.
        contexts: enters what the backward must be compiled in.
    """

    compiled_backward: Callable[..., Any] | None
    compile_backward: Callable[..., Any] | None
    backward_module: Callable[[], fx.GraphModule]
    placeholders: list[Any] | None
    contexts: Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def training_graphs(change: Callable[[TrainingGraph], None]) -> Iterator[None]:
    """Call `change` with every training graph AOTAutograd finishes meanwhile; what it assigns to
    `compiled_backward` and `compile_backward` takes effect.

    Fresh compilations and cache hits of every inner compiler that uses AOTAutograd come through
    `AOTDispatchAutograd.post_compile`, and nothing else sees the compiled backward of a cache hit.
    A wrapper around the inner compiler's backward would not survive into the next process.
    """
    import torch._dynamo  # torch._functorch._aot_autograd cannot be imported before it
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    original = AOTDispatchAutograd.post_compile
    signature = inspect.signature(original)
    thread = threading.get_ident()

    def post_compile(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        if "spec" in bound.arguments:
            spec = holder = bound.arguments["spec"]
        else:  # torch 2.11: the fields are arguments, and the compiler stands in the configuration
            spec = SimpleNamespace(**bound.arguments)
            holder = spec.aot_config
        graph = _training_graph(spec, getattr(holder, "bw_compiler", None))
        change(graph)
        spec.compiled_bw_func = graph.compiled_backward
        if graph.compile_backward is not None:
            holder.bw_compiler = graph.compile_backward
        if "spec" not in bound.arguments:
            bound.arguments["compiled_bw_func"] = graph.compiled_backward
        return original(*bound.args, **bound.kwargs)

    AOTDispatchAutograd.post_compile = staticmethod(post_compile)
    try:
        yield
    finally:
        AOTDispatchAutograd.post_compile = staticmethod(original)


def _training_graph(spec: Any, compile_backward: Callable[..., Any] | None) -> TrainingGraph:
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import CompileContext, TracingContext, compile_context, tracing

    lazy = spec.lazy_backward_info
    fresh = hasattr(lazy, "bw_module")
    here = TracingContext.try_get()
    saved = getattr(lazy, "saved_context", None) or here
    compiling = getattr(lazy, "saved_compile_context", None) or CompileContext.try_get()

    @contextlib.contextmanager
    def contexts() -> Iterator[None]:
        context = saved
        if not fresh and saved is not None:
            context = TracingContext(saved.fake_mode)
            context.fw_metadata = spec.fw_metadata
        with tracing(context), compile_context(compiling), get_metrics_context():
            yield

    return TrainingGraph(
        compiled_backward=spec.compiled_bw_func,
        compile_backward=compile_backward,
        backward_module=(lambda: lazy.bw_module) if fresh else lazy.bw_module_fn,
        placeholders=lazy.placeholder_list if fresh else None,
        contexts=contexts,
    )


def compile_configs() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The compilers' configuration of this moment, to be entered again later: patches are local to
    a `with` block and to a thread, and a backward may run outside of both."""
    from torch._functorch import config as functorch

    modules = [functorch, sys.modules.get("torch._inductor.config")]
    before = [(module, module.get_config_copy()) for module in modules if module is not None]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, values in before:
                now = module.get_config_copy()
                changed = {k: v for k, v in values.items() if k in now and now[k] != v}
                stack.enter_context(module.patch(changed))
            yield

    return again


class _Captured(Exception):
    """Stops AOTAutograd once it has traced the joint graph."""


def trace_joint_graph(
    compile_graph: Callable[..., Any],
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    backward_autocast: list[dict[str, Any]],
) -> tuple[fx.GraphModule, Callable[..., Any] | None]:
    """The joint graph AOTAutograd traces for `graph_module` when the backward runs inside these
    `torch.autocast` contexts, and the inner compiler's backward compiler.

    Args:
        compile_graph: an inner compiler that uses AOTAutograd, called with its own decompositions
            and settings and stopped before it partitions.
        graph_module: taken over by the compiler: give it a copy.
        inputs: fake inputs.
        backward_autocast: what the backward is traced under; empty for "off".
    """
    from torch._dynamo.backends import common
    from torch._functorch import config
    from torch._guards import TracingContext, tracing

    users_pass, original = config.joint_custom_pass, common.aot_module_simplified
    joint: list[fx.GraphModule] = []
    compilers: list[Any] = []

    def capture(graph: fx.GraphModule, joint_inputs: Any) -> fx.GraphModule:
        joint.append(users_pass(graph, joint_inputs) if callable(users_pass) else graph)
        raise _Captured

    def aot_module_simplified(*args: Any, **kwargs: Any) -> Any:
        compilers.append(kwargs.get("bw_compiler"))
        return original(*args, **kwargs)

    patches = config.patch(
        backward_pass_autocast=backward_autocast,
        joint_custom_pass=capture,
        enable_autograd_cache=False,
    )
    counted = dict(counters()["aot_autograd"])
    common.aot_module_simplified = aot_module_simplified
    try:
        with tracing(TracingContext(fake_mode_of(inputs))), patches, torch.enable_grad():
            compile_graph(graph_module, inputs)
    except _Captured:
        pass
    finally:
        common.aot_module_simplified = original
        counters()["aot_autograd"].clear()
        counters()["aot_autograd"].update(counted)
    if not joint:
        raise RuntimeError("the inner compiler traced no joint graph when it was called again")
    return joint[0], compilers[0] if compilers else None


# --- Inductor ------------------------------------------------------------------------------------


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
