"""The dispatcher: kernels of our own for the keys of autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.node import has_side_effect

_library = torch.library.Library("smart_autocast", "IMPL")


def register_autograd_kernel(
    op: str, function: Callable[..., Any], *, mutates: bool = False
) -> None:
    """Make `function(below, *arguments)` what autograd calls for `op`, "name" or "name.overload".

    `below(*arguments)` is the op without autograd. `torch.library.register_autograd` is not this:
    it makes one node of a call, for all of its tensors. With `mutates`, `function` also stands in
    for ADInplaceOrView, the key under which versions of mutated tensors are counted; autograd's
    keys are not visited in inference mode, that one is.
    """
    name, _, overload = op.partition(".")
    target = getattr(getattr(torch.ops.smart_autocast, name), overload or "default")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        def below(*args: Any, **kwargs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                remaining = keyset & torch._C._after_autograd_keyset
                if mutates:
                    remaining = keyset & torch._C._after_ADInplaceOrView_keyset
                return target.redispatch(remaining, *args, **kwargs)

        return function(below, *args, **kwargs)

    for key in ("Autograd", "ADInplaceOrView") if mutates else ("Autograd",):
        _library.impl(op, kernel, key, with_keyset=True)


def any_requires_grad(*values: Any) -> bool:
    """Whether a tensor among the arguments, or in a list or tuple among them, requires grad."""
    # It looks into lists, but not into tuples (2.13).
    return torch._C._any_requires_grad(*[list(v) if isinstance(v, tuple) else v for v in values])


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_AUTOGRAD_KEYS = torch._C.DispatchKeySet(_AUTOGRAD)
_AUTOGRAD_KEYS |= torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def without_autograd() -> contextlib.AbstractContextManager[None]:
    """Ops called inside go past the kernels above, which as Python functions cost 4 us and 0.1 us a
    tensor. Only where `may_skip_autograd`, and where nothing requires grad; versions of mutated
    tensors are left alone."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD_KEYS)


@has_side_effect
def pass_autograd_keys() -> bool:
    """Have ops called from here on pass the keys of autograd, where something excludes these: only
    there are composites taken apart, and autocast acts on what they call. Also as a node of a
    graph. Returns whether they were excluded."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, False)
    return excluded


@has_side_effect
def put_back_autograd_keys(excluded: bool) -> None:
    """The end of `pass_autograd_keys`, given what that returned. (What excludes keys puts them back
    itself, where this is not reached because of an error.)"""
    torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, excluded)


def may_skip_autograd() -> bool:
    """Not while anything traces the call, nor where tensors do not tell whether they are
    differentiated."""
    return not (is_transformed() or torch.compiler.is_compiling())


def is_transformed() -> bool:
    """Whether this runs in forward-mode AD or inside of a `torch.func` transform: tensors that are
    differentiated there need not require grad."""
    # Graphs of Dynamo open levels that `forward_ad` does not count, but those of transforms alone.
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def any_tangent(*values: Any) -> bool:
    """Whether a tensor among the arguments, or in a list or tuple among them, is a dual one of
    forward-mode AD."""
    return is_transformed() and any(
        torch._VF._unpack_dual(tensor, level=0)[1] is not None
        for value in values
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
    )


def is_traced_by_jit() -> bool:
    """Whether `torch.jit.trace` records: it drops what an op writes to a list of tensors."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]
