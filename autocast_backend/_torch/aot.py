"""The training graphs that AOTAutograd makes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import fx

from .dynamo import compile_session, timed
from .fake_tensors import fake_mode_of
from .flags import compiling_as_now
from .hooks import unpacking_noted
from .joint_graphs import metadata_kept
from .modes import outside_of_inference_mode, outside_of_modes
from .patches import replaced


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
        for_compiled_autograd: makes the backward graph that compiled autograd copies into its own
            graph, instead of calling the compiled backward; None leaves it as it is.
        state_for_compiled_autograd: what else that graph depends on: compiled autograd uses a
            capture again only where it is equal.
    """

    compiled_backward: Callable[..., Any] | None
    compile_backward: Callable[..., Any] | None
    backward_module: Callable[[], fx.GraphModule]
    placeholders: list[Any] | None
    contexts: Callable[[], contextlib.AbstractContextManager[Any]]
    for_compiled_autograd: Callable[[fx.GraphModule], fx.GraphModule] | None = None
    state_for_compiled_autograd: Callable[[], Hashable] | None = None


@contextlib.contextmanager
def training_graphs(change: Callable[[TrainingGraph], None]) -> Iterator[None]:
    """Call `change` with every training graph AOTAutograd finishes meanwhile; what it assigns to
    `compiled_backward`, `compile_backward`, `for_compiled_autograd` and
    `state_for_compiled_autograd` takes effect.

    Fresh compilations and cache hits of every inner compiler that uses AOTAutograd come through
    `AOTDispatchAutograd.post_compile`, and nothing else sees the compiled backward of a cache hit.
    A wrapper around the inner compiler's backward would not survive into the next process.
    """
    importlib.import_module("torch._dynamo")  # the next import needs it, on a fresh start
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    original = AOTDispatchAutograd.post_compile
    signature = inspect.signature(original)
    thread = threading.get_ident()

    def post_compile(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        # torch 2.11: the fields are arguments
        spec = bound.arguments.get("spec") or SimpleNamespace(**bound.arguments)
        if not spec.aot_config.enable_log:  # what Inductor has for a pattern that it found
            return original(*args, **kwargs)
        # torch before 2.13: the compiler stands in the configuration
        holder = spec if hasattr(spec, "bw_compiler") else spec.aot_config
        graph = _training_graph(spec, holder.bw_compiler)
        change(graph)
        spec.compiled_bw_func = graph.compiled_backward
        if graph.compile_backward is not None:
            holder.bw_compiler = graph.compile_backward
        if graph.for_compiled_autograd is not None:
            spec.lazy_backward_info = _when_captured(
                spec.lazy_backward_info, graph.for_compiled_autograd
            )
        if "spec" not in bound.arguments:
            bound.arguments.update(vars(spec))
        with _capturing_each_state(graph.state_for_compiled_autograd):
            return original(*bound.args, **bound.kwargs)

    with (
        replaced(AOTDispatchAutograd, "post_compile", staticmethod(post_compile)),
        unpacking_noted(),
        metadata_kept(),
    ):
        yield


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
        compile_backward=compile_backward and compiling_as_now(compile_backward),
        backward_module=(lambda: lazy.bw_module) if fresh else lambda: lazy.bw_module_fn(),
        placeholders=lazy.placeholder_list if fresh else None,
        contexts=contexts,
    )


def _when_captured(lazy: Any, change: Callable[[fx.GraphModule], fx.GraphModule]) -> Any:
    """AOTAutograd's record of a backward graph, that shows compiled autograd a changed one."""
    from torch._dynamo import compiled_autograd

    if not hasattr(lazy, "bw_module"):
        return type(lazy)(lambda: change(lazy.bw_module_fn()))

    class Shown(type(lazy)):  # type: ignore[misc]
        @property
        def bw_module(self) -> fx.GraphModule:
            module = self.__dict__["bw_module"]
            return change(module) if compiled_autograd.compiled_autograd_enabled else module

    shown = object.__new__(Shown)
    shown.__dict__.update(lazy.__dict__)
    return shown


@contextlib.contextmanager
def _capturing_each_state(state: Callable[[], Hashable] | None) -> Iterator[None]:
    """Have compiled autograd capture the region that is finished meanwhile once for each `state`.
    Its cache knows a region by a number; here each state has one of its own.

    torch 2.11 has no such place: a capture is used again, and refuses to run (captured.py)."""
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.autograd.function import AUTOGRAD_FUNCTION_COUNTER

    factory = getattr(runtime_wrappers, "_AOTDispatchAutogradFunctionFactory", None)
    if factory is None or state is None:
        yield
        return
    original = factory.build
    numbers: dict[Hashable, int] = defaultdict(lambda: next(AUTOGRAD_FUNCTION_COUNTER))

    def build(self: Any) -> Any:
        function = original(self)
        key = function._compiled_autograd_key  # (number, *symbolic integers)
        function._compiled_autograd_key = lambda context: (numbers[state()], *key(context)[1:])
        return function

    with replaced(factory, "build", build):
        yield


@contextlib.contextmanager
def compiling_again(inputs: Sequence[Any]) -> Iterator[None]:
    """The contexts a compiler needs outside of Dynamo's compilation, for fake inputs."""
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import TracingContext, tracing

    with (
        compile_session(),
        outside_of_modes(),
        outside_of_inference_mode(),
        tracing(TracingContext(fake_mode_of(inputs))),
        get_metrics_context(),
        timed("compile_again"),  # AOTAutogradCache loads nothing outside of such a block
    ):
        yield
