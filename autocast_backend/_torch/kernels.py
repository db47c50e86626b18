"""ATen kernels that call ops which autocast has a rule for.

    affine_grid_generator      autocast has no rule for it
        bmm                    which its kernel calls, and eager autocast runs in bfloat16

AOTAutograd captures such an op whole, below autograd, and what it captures runs with autocast off.
So while we observe and while we compile, these ops are opened: under autocast, and only there, they
become the calls that their own kernel makes, under that state. All who look below autograd - our
observer, AOTAutograd's tracing of forward and backward, fake tensors - then see the same as eager.

An op is opened between autocast and autograd, so its node in the autograd graph, and with it its
backward, is the one that eager has. `_trilinear`, say, is what the backward of `_trilinear` calls.

So are the ops that `torch.library.triton_op` makes. AOTAutograd puts the calls of their bodies in
their place, but by itself does so where autocast is off, whatever it was around the op.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import find_torch_dispatch_rule
from torch._library.triton import triton_ops_to_kernels
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .autocast import (
    autocast_device_types,
    autocast_key,
    disable_autocast,
    has_autocast_kernel,
    register_autocast_kernel,
)
from .ops import overloads_of

OPENED = {
    "_euclidean_dist": "matmul",
    "_native_multi_head_attention": "bmm",
    "_safe_softmax": "softmax.int",
    "_scaled_mm": "mm",
    "_transformer_encoder_layer_fwd": "addmm",
    "_trilinear": "bmm",
    "affine_grid_generator": "bmm",
    "ldexp.Tensor": "pow.Scalar",
    "linalg_pinv.atol_rtol_tensor": "matmul",
    "mvlgamma": "sum.dim_IntList",
}
"""Ops of ATen that autocast has no rule for, and the op inside of their kernel that it has one for,
on some device types. Left out is what every device type has a kernel of its own for
(`native_group_norm`)."""

_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

_here = threading.local()
_lock = threading.Lock()
_users = 0
_libraries: list[torch.library.Library] = []

Body = Callable[..., Any]
"""What stands for a call of an opened op."""


@contextlib.contextmanager
def kernels_opened() -> Iterator[None]:
    """Open the kernels of `OPENED`, and Triton ops, for what this thread does meanwhile.

    The dispatcher, which is one for all threads, has a kernel of ours for them under autocast then.
    Calls of other threads go on to PyTorch's. It is read without a lock: a kernel that came and
    went with each compilation would break calls of that op in other threads. So those of ATen's ops
    stay. A Triton op may be defined anew, so its kernel goes.
    """
    global _users
    _register_kernels()
    with _lock:
        if _users == 0:
            libraries: dict[str, torch.library.Library] = {}
            for op, device_type, body in _triton_ops():
                if not has_autocast_kernel(op, (device_type,)):  # a user's rule is left alone
                    if op.namespace not in libraries:
                        libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
                    kernel = _kernel(op, device_type, body)
                    key = autocast_key(device_type)
                    libraries[op.namespace].impl(op, kernel, key, with_keyset=True)
            _libraries.extend(libraries.values())
        _users += 1
    before = getattr(_here, "open", False), are_closed()
    _here.open = True
    try:
        yield
    finally:
        _here.open, _here.closed = before  # a graph may raise after its `close_kernels`
        with _lock:
            _users -= 1
            while _users == 0 and _libraries:
                _libraries.pop()._destroy()


@functools.cache
def _register_kernels() -> None:
    for op, device_type, body in _openable():
        if not has_autocast_kernel(op, (device_type,)):  # a user's rule is left alone
            register_autocast_kernel(op, device_type, _kernel(op, device_type, body))


_BY_AUTOCAST = ("Autocast", "Autograd", "CPU", "CUDA", "Composite")
"""How the dispatch keys begin whose kernels autocast may act on, or be."""
_OF_PYTORCH = frozenset(
    {
        "aten/_foreach_mm/CUDA",
        "aten/bmm/CUDA",
        "aten/linalg_polar.out/CUDA",
        "aten/linalg_polar/CUDA",
    }
)
"""What PyTorch itself gives its ops for these by `torch.library`."""


def has_kernels_of_users() -> bool:
    """Whether Python code gives ops of PyTorch's other autocast rules or kernels, by
    `torch.library`."""
    names = list(torch.library._impls)  # "aten/sin/AutocastCPU"
    return any(
        name.startswith("aten/")
        and name.rpartition("/")[2].startswith(_BY_AUTOCAST)
        and name not in _OF_PYTORCH
        for name in names
    )


@contextlib.contextmanager
def kernels_closed() -> Iterator[None]:
    """Open none for what this thread does meanwhile: under a dispatch mode, such as selective
    checkpoints have in eager mode, autocast does not act inside of them."""
    before = close_kernels()
    try:
        yield
    finally:
        put_back_kernels(before)


@has_side_effect
def close_kernels() -> bool:
    """`kernels_closed` from here on; also as a node of a graph. Returns whether it was before."""
    before = are_closed()
    _here.closed = True
    return before


@has_side_effect
def put_back_kernels(closed: bool) -> None:
    """The end of `close_kernels`, given what that returned."""
    _here.closed = closed


def are_closed() -> bool:
    """Whether this thread is inside of `kernels_closed`."""
    return getattr(_here, "closed", False)


def is_open() -> bool:
    """Whether this thread is inside of `kernels_opened`, and of no `kernels_closed`."""
    return getattr(_here, "open", False) and not are_closed()


def calls_others(op: OpOverload, device_types: Sequence[str]) -> bool:
    """Whether autocast acts inside of an op on one of these device types."""
    inner = OPENED.get(op.name().removeprefix("aten::"))
    return inner is not None and has_autocast_kernel(_op(inner), device_types)


@functools.cache
def _openable() -> tuple[tuple[OpOverload, str, Body], ...]:
    """The ops of `OPENED` that this version of torch has, each with the device types that have a
    kernel of it to open, and that kernel."""
    found: list[tuple[OpOverload, str, Body]] = []
    for name, inner in OPENED.items():
        op = _op(name)
        for device_type in autocast_device_types() if op is not None else ():
            acts = has_autocast_kernel(_op(inner), (device_type,))
            key = _key_of_kernel(op, device_type) if acts else None
            if key is not None:
                found.append((op, device_type, functools.partial(_run_kernel, op, key)))
    return tuple(found)


def _run_kernel(op: OpOverload, key: str, *args: Any, **kwargs: Any) -> Any:
    # Kernels loop over sizes, so they take numbers; those of a device, of the tensors, too.
    args, kwargs = pytree.tree_map_only(torch.SymInt, int, (args, kwargs))
    if key not in _COMPOSITE:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _with_numbers, (args, kwargs))
    return op._op_dk(torch._C._dispatch_key_parse(key), *args, **kwargs)


def _with_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without symbols for its sizes: a graph with it serves these sizes alone."""
    if not tensor._has_symbolic_sizes_strides:
        return tensor
    return tensor.as_strided([int(n) for n in tensor.shape], [int(n) for n in tensor.stride()])


def _triton_ops() -> Iterator[tuple[OpOverload, str, Body]]:
    """The Triton ops there are at this moment, each with the device types of autocast."""
    for name in list(triton_ops_to_kernels):  # other threads may define some
        if name in OPDEFS and torch._C._dispatch_has_kernel(name):  # not unloaded since
            op = OPDEFS[name]._opoverload
            body = body_of_triton_op(op)
            assert body is not None
            for device_type in autocast_device_types():
                yield op, device_type, body


def body_of_triton_op(target: Any) -> Body | None:
    """What tracing makes of a `torch.library.triton_op`; None for all other targets."""
    op = next((op for op in overloads_of(target) if op.name() in triton_ops_to_kernels), None)
    if op is None:
        return None
    rule: Any = find_torch_dispatch_rule(op, FunctionalTensorMode)

    def body(*args: Any, **kwargs: Any) -> Any:
        return rule(contextlib.nullcontext(), op, (), args, kwargs)  # in the mode that is on

    return body


def _op(name: str) -> Any:
    """An op of ATen by its name; None in a version of torch without it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _key_of_kernel(op: OpOverload, device_type: str) -> str | None:
    """The key of the kernel that calls other ops for tensors of a device type; None without one."""
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    own = autocast_key(device_type).removeprefix("Autocast")
    if has(own):  # those of other devices have not been looked into
        emulated = op is not torch.ops.aten._scaled_mm.default or _scaled_mm_is_emulated()
        return own if device_type == "cpu" and emulated else None
    return next(filter(has, _COMPOSITE), None)


@functools.cache
def _scaled_mm_is_emulated() -> bool:
    """Whether `_scaled_mm` of this processor is made of other ops: asked of the kernel itself,
    because oneDNN's, which AMX has, reads memory that fake tensors do not have."""
    seen: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), Seen(), disable_autocast():  # type: ignore[no-untyped-call]
        one = torch.ones((), dtype=torch.float32, device="cpu")  # whatever the defaults are
        x = one.expand(16, 16).to(torch.float8_e4m3fn).contiguous()
        seen.clear()
        torch.ops.aten._scaled_mm.default._op_dk(torch._C.DispatchKey.CPU, x, x.t(), one, one)
    return any(func.namespace == "aten" and "mm" in func.name() for func in seen)


def _kernel(op: OpOverload, device_type: str, body: Body) -> Callable[..., Any]:
    """What the dispatcher calls for `op` where autocast is on for `device_type`."""
    autocast = torch._C._dispatch_key_parse(autocast_key(device_type))

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_open() and not keyset.has(torch._C.DispatchKey.PythonDispatcher):
            return op.redispatch(keyset.remove(autocast), *args, **kwargs)
        on = [d for d in autocast_device_types() if torch.is_autocast_enabled(d)]
        opening = _Opening(op, body, on) if is_open() else contextlib.nullcontext()
        # As PyTorch's own kernels for autocast do: past all of its keys, then from the top.
        with opening, disable_autocast():
            return op(*args, **kwargs)

    return kernel


class _Opening(TorchDispatchMode):
    """Makes the calls of an op's kernel in the place of the op, once autograd has seen it.

    Args:
        body: makes them.
        on: the device types that autocast is on for.
    """

    def __init__(self, op: OpOverload, body: Body, on: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._op = op
        self._body = body
        self._on = on

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is not self._op:
            return func(*args, **(kwargs or {}))
        try:
            for device_type in self._on:
                torch.set_autocast_enabled(device_type, True)
            made = self._body(*args, **(kwargs or {}))
            return pytree.tree_map_only(FunctionalTensor, _no_view, made)
        finally:
            for device_type in self._on:
                torch.set_autocast_enabled(device_type, False)


def _no_view(made: FunctionalTensor) -> FunctionalTensor:
    """What an op returns is a new tensor, also where its kernel returns a view of one it has made:
    AOTAutograd would make that view again, of a base that only knows the op's result."""
    if made.is_base_tensor():
        return made
    return FunctionalTensor.to_functional(made.from_functional())
