"""Dynamo: backends, errors, counters, and what it compiles at this moment."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import fx

_F = TypeVar("_F", bound=Callable[..., Any])


def pass_through_error() -> type[Exception]:
    """The base class of errors that Dynamo hands to the user unchanged; any other class raised by a
    backend arrives wrapped in `BackendCompilerFailed`, which `except ValueError` does not catch."""
    from torch._dynamo.exc import ShortenTraceback

    return ShortenTraceback


def graph_break_errors() -> tuple[type[Exception], ...]:
    """What a backend raises where Dynamo does not fail, but leaves the graph's code to Python."""
    from torch._dynamo.exc import exceptions_allowed_to_be_fallback

    return exceptions_allowed_to_be_fallback


def dynamo_error() -> type[Exception]:
    """What higher-order ops raise that cannot be traced, of all of Dynamo's errors."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def lookup_backend(name: str) -> Callable[..., Any]:
    """The registered Dynamo backend `name`; there is no public lookup. Inductor is imported, which
    it would be by its first call: `traces.py` looks at its partitioner."""
    from torch._dynamo.backends.registry import lookup_backend

    if name == "inductor":
        importlib.import_module("torch._inductor.compile_fx")
    return lookup_backend(name)


def backend_names() -> list[str]:
    """Every registered backend, debugging ones (`aot_eager`, `eager`) included."""
    from torch._dynamo.backends.registry import list_backends

    return list_backends(exclude_tags=())


def counters() -> Any:
    """Dynamo's counters: what `torch.compile` did, by subsystem. Ours is `smart_autocast`."""
    from torch._dynamo.utils import counters

    return counters


def uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A module that `Module.compile` has compiled as it is without: `torch.compile` unwraps only
    what it has returned itself."""
    if getattr(fn, "_compiled_call_impl", None) is not None:
        return fn._call_impl  # type: ignore[attr-defined]
    return fn


def never_traced(fn: _F) -> _F:
    """Have Dynamo leave a function alone, and what it calls. Where a compiled function calls
    `loss.backward()`, Dynamo would compile each Python function the autograd engine comes to.

    `torch.compiler.disable` wraps the function for that, which every call pays for.
    """
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    code: CodeType = fn.__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def without_disable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compiler.disable` has wrapped: a backend's code comes wrapped, and once more from
    Dynamo, which unwraps what it was given but cannot look into a function of ours around it."""
    while (
        getattr(fn, "_torchdynamo_disable", False)
        and getattr(fn, "_torchdynamo_wrapper_id", None) == id(fn)  # not copied by functools.wraps
    ):
        fn = fn._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return fn


def timed(stage: str) -> contextlib.AbstractContextManager[Any]:
    """Record a stage in `torch._dynamo.utils.compile_times()`."""
    from torch._dynamo.utils import dynamo_timed

    return dynamo_timed(f"smart_autocast.{stage}")


def compile_lock() -> contextlib.AbstractContextManager[Any]:
    """The lock under which Dynamo compiles. Reentrant."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@contextlib.contextmanager
def compile_session() -> Iterator[None]:
    """For what is compiled outside of Dynamo's own compilation: its lock, and what it tells other
    threads meanwhile. Compiled functions that they call would take the trace of a graph for
    `torch.fx.symbolic_trace`, and raise."""
    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    with compile_lock(), session():
        yield


def compiled_frame() -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The local and global variables of the function Dynamo compiles at this moment, where a
    backend is called by Dynamo. A graph's nodes name modules by the variable they were reached
    through; nothing public leads from there to the modules themselves."""
    output = _output_graph()
    return None if output is None else (dict(output.local_scope), dict(output.global_scope))


def inputs_of_dynamo() -> tuple[list[fx.Node], list[Any]]:
    """The inputs of the whole graph that Dynamo compiles at this moment, and their values; none
    where a backend is not called by Dynamo."""
    output = _output_graph()
    return ([], []) if output is None else (output.placeholders, output.example_inputs())


def _output_graph() -> Any | None:
    """What Dynamo has of the graph that it compiles at this moment on this thread; None where it
    compiles none."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def left_to_python(module: torch.nn.Module) -> str | None:
    """Why Dynamo does not compile the calls of a module, if it says so beforehand."""
    if isinstance(module, torch.nn.RNNBase) and not torch._dynamo.config.allow_rnn:
        return "torch._dynamo.config.allow_rnn is False"
    if getattr(module.forward, "_torchdynamo_disable", False):
        return "of torch.compiler.disable"
    return None


def keep_out_of_packages(graph_module: fx.GraphModule) -> None:
    """Have every process compile a graph again, with `torch._dynamo.config.caching_precompile` too.

    A package holds what AOTAutograd compiled, and calls no backend when it is loaded. What a
    backend has put around that is lost: a loaded backward could not follow its state.

    Raises:
        NotImplementedError: inside of `torch.compile(...).aot_compile`, which makes nothing else.
    """
    if vars(graph_module).pop("_backend_id", None) is None:  # the name AOTAutograd records it by
        return
    output = _output_graph()
    if output is None:
        raise NotImplementedError(
            "aot_compile writes a compiled graph to a file without what lets its backward follow "
            "the autocast state it meets. Call the compiled function instead: compile caches on "
            "disk, also in torch.compiler.save_cache_artifacts, work with smart_autocast"
        )
    output.bypass_package(
        "smart_autocast compiles in each process: its backwards follow the autocast state they "
        "meet, which a package does not keep. Compile caches on disk work as ever"
    )
