"""Fake tensors and symbolic sizes."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher

from .flags import Flag
from .hooks import saved_tensor_hooks_off
from .kernels import kernels_opened


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


def new_fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def makes_fake_tensors() -> bool:
    """Whether a FakeTensorMode is on: what ops return then has no memory."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def observing(fake_mode: Any) -> Iterator[None]:
    """Run ops on fake tensors without leaving a trace in the compilation: no guard is added and the
    unbacked symbols of data-dependent ops are forgotten. Nor does a user's hook see them. What
    autocast does inside of kernels is to be seen."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernels_opened())
        shape_env = fake_mode.shape_env
        if shape_env is not None:
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(saved_tensor_hooks_off())
        stack.enter_context(fake_mode)
        yield


def guards_suppressed(fake_mode: Any | None) -> contextlib.AbstractContextManager[Any]:
    """Ask about symbolic sizes without assuming anything from then on."""
    env = None if fake_mode is None else fake_mode.shape_env
    return contextlib.nullcontext() if env is None else env.suppress_guards()


@contextlib.contextmanager
def running(fake_mode: Any) -> Iterator[None]:
    """As `observing`, with the decompositions that Dynamo runs ops with: kernels of C++ do not take
    sizes that are symbols."""
    with observing(fake_mode), enable_python_dispatcher():
        yield


def with_python_kernels() -> contextlib.AbstractContextManager[Any]:
    """Run ops by the Python kernels that PyTorch has of some for traces, as AOTAutograd does."""
    return enable_python_dispatcher()


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Try an op that may not take its arguments: fake tensors log every refusal as an error, with
    its traceback, before they raise it. What other threads log is let through."""
    _filter_log()
    with _unlogged.raised():
        yield


_unlogged = Flag()


@functools.cache
def _filter_log() -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(lambda _: not _unlogged.on)


def like(traced: Any, value: Any) -> Any:
    """A tensor of `traced`'s sizes, and `value`'s dtype and device; other values as traced."""
    if not isinstance(value, torch.Tensor):
        return traced
    return torch.empty_strided(
        traced.size(), traced.stride(), dtype=value.dtype, device=value.device
    )


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

    with mode:  # DTensor asks for it, to see whether sizes may be symbols
        return [fake(value) for value in inputs]


@contextlib.contextmanager
def numbers_as_first_traced(inputs: Iterable[Any]) -> Iterator[None]:
    """Trace a graph of these fake inputs once more as it was traced first. Of Python numbers that
    change from call to call PyTorch makes tensors where it can, and constants elsewhere, for this
    graph: once it has written it (`tensorify_python_scalars`). Dynamo guards on these. Constants
    everywhere would be another graph, and one that PyTorch wants Dynamo to capture anew."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type
    from torch.utils._sympy.value_ranges import ValueRanges

    mode = fake_mode_of(inputs)
    env = None if mode is None else mode.shape_env
    if env is None:
        yield
        return
    known = [guard.expr for guard in env.guards]
    constants = {s: v for s, v in env.replacements.items() if symbol_is_type(s, SymT.FLOAT)}
    ranges = {symbol: env.var_to_range[symbol] for symbol in constants}
    for symbol in constants:
        del env.replacements[symbol]
        env.var_to_range[symbol] = ValueRanges.unknown()
    _forget_replaced(env)
    try:
        yield
    finally:
        env.replacements.update(constants)
        env.var_to_range.update(ranges)
        _forget_replaced(env)
        # What has been guarded on before is written down once more.
        new = [guard for guard in env.guards[len(known) :] if guard.expr not in known]
        env.guards[len(known) :] = [g for g in new if g.expr.xreplace(constants) != True]  # noqa: E712


def sizes_as_first_traced(
    inputs: Iterable[Any],
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is assumed of symbolic sizes at this moment, to be entered again later, for another
    trace: where more is known of a size, `x[:]` may be x, and no call of the graph."""
    mode = fake_mode_of(inputs)
    env = None if mode is None else mode.shape_env
    if env is None:
        return contextlib.nullcontext
    guards, (replaced, ranges) = len(env.guards), _of_sizes(env)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        since, (replaced_now, ranges_now) = env.guards[guards:], _of_sizes(env)
        for symbol in replaced_now:
            del env.replacements[symbol]
        env.replacements.update(replaced)
        env.var_to_range.update(ranges)
        del env.guards[guards:]
        _forget_replaced(env)
        try:
            yield
        finally:
            env.replacements.update(replaced_now)
            env.var_to_range.update((s, r & env.var_to_range[s]) for s, r in ranges_now.items())
            known = {guard.expr for guard in since}
            env.guards[guards:] = since + [g for g in env.guards[guards:] if g.expr not in known]
            _forget_replaced(env)

    return again


def _of_sizes(env: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What a shape environment has in the place of sizes, and their ranges."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return (
        {s: value for s, value in env.replacements.items() if symbol_is_type(s, SymT.SIZE)},
        {s: range for s, range in env.var_to_range.items() if symbol_is_type(s, SymT.SIZE)},
    )


@contextlib.contextmanager
def assumptions_noted() -> Iterator[None]:
    """Have what is assumed about sizes become guards of their shape environments. While compiled
    autograd captures, there are no new ones on its thread, of no environment."""
    from torch.fx.experimental.symbolic_shapes import TLS

    before = getattr(TLS, "suppress_guards", False)
    TLS.suppress_guards = False
    try:
        yield
    finally:
        TLS.suppress_guards = before


def _forget_replaced(env: Any) -> None:
    """Have a shape environment look up again what it has replaced in expressions."""
    if hasattr(env, "_replacements_version_counter"):  # since torch 2.12 or 2.13
        env._replacements_version_counter += 1
    env._update_version_counter()
    for method in vars(type(env)).values():
        if hasattr(method, "cache_clear"):  # that of a question which makes a number of a symbol
            method.cache_clear()


def fake_like(fake: Any, real: Any) -> Any:
    """`fake` with the strides of `real`, which a compiled forward may have chosen itself; where
    there is no fake, one of `real`'s sizes."""
    if not isinstance(real, torch.Tensor):
        return real if fake is None else fake
    if fake is None:
        from torch._guards import TracingContext

        mode = TracingContext.get().fake_mode
        assert mode is not None, "a backward is compiled in the context of its forward"
        return mode.from_tensor(real, static_shapes=True)
    if not any(isinstance(size, torch.SymInt) for size in fake.shape):
        same = fake.stride() == real.stride()
        return fake if same else fake.as_strided(fake.shape, real.stride())
    # Of dynamic sizes the strides are other numbers at each call: the order of the dimensions is
    # what a compiled forward chooses (channels last, say).
    hints = [n.node.hint if isinstance(n, torch.SymInt) else n for n in fake.stride()]
    order = _from_outermost(real.stride())
    if None in hints or order == _from_outermost(hints):
        return fake
    strides = zip(real.shape, real.stride(), _dense_strides(real.shape, order), strict=True)
    dense = all(size == 1 or stride == wanted for size, stride, wanted in strides)
    return fake.as_strided(fake.shape, _dense_strides(fake.shape, order)) if dense else fake


def _from_outermost(strides: Sequence[int]) -> list[int]:
    """The dimensions of a tensor in the order of its memory."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def _dense_strides(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a tensor without gaps, with its dimensions in this order."""
    strides: list[Any] = [1] * len(shape)
    elements: Any = 1
    for dim in reversed(order):
        strides[dim] = elements
        elements = elements * shape[dim]
    return strides


def symbol_of(size: Any) -> Any | None:
    """The symbol of a dynamic size, as it was before anything was assumed about it; None for a
    number or an expression."""
    expression = size.node._expr if isinstance(size, torch.SymInt) else None
    return expression if getattr(expression, "is_Symbol", False) else None


def size_expression(value: Any) -> Any | None:
    """The expression of an integer that hangs on dynamic sizes of inputs alone; None for others."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    if not isinstance(value, torch.SymInt):
        return None
    symbols = value.node.expr.free_symbols
    known = symbols and all(symbol_is_type(symbol, SymT.SIZE) for symbol in symbols)
    return value.node.expr if known else None


def number_now(value: Any) -> int | float | None:
    """The number that a dynamic one has been made, where it is for good; None for others."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat)) or not value.node.expr.is_number:
        return None
    number: int | float = value.node.pytype(value.node.expr)
    return number


def is_size(value: Any) -> bool:
    """Whether a value is a number, or hangs on dynamic sizes of inputs alone."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return all(symbol_is_type(s, SymT.SIZE) for s in value.node.expr.free_symbols)
    return isinstance(value, (bool, int, float))


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes is known to hold for all of them; to ask adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def is_a_number_now(symbol: str, beside: torch.SymInt) -> bool:
    """Whether a dynamic size of the graph that `beside` is of has been made a number of since."""
    replaced = beside.node.shape_env.replacements
    return any(str(old) == symbol and new.is_number for old, new in replaced.items())


def symbol_key(symbol: Any) -> str:
    """A SymInt, SymFloat or SymBool as its expression and the value it had when it was traced; the
    hint, because which kernel an op picks may hang on it."""
    return f"{symbol.node.expr}={symbol.node._hint}"
