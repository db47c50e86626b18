"""The ops that must be registered, and a check that a native library has exactly these.

The maths and the dtype contract of each are the comment at its schema in ``csrc/ops/<op>.cpp``.
"""

from __future__ import annotations

import torch

from .._native import REBUILD, KernelTierError
from .._torch.ops import schema_of

SCHEMAS: dict[str, str] = {
    "autocast_to_fp16": "(Tensor(a) self, *, str? device_type=None) -> Tensor(a)",
    "autocast_to_bf16": "(Tensor(a) self, *, str? device_type=None) -> Tensor(a)",
    "autocast_to_reduced_precision": (
        "(Tensor(a) self, ScalarType dtype, *, str? device_type=None) -> Tensor(a)"
    ),
    "autocast_to_full_precision": "(Tensor(a) self, *, str? device_type=None) -> Tensor(a)",
    "promote": "(Tensor(a)[] tensors, *, str? device_type=None) -> Tensor(a)[]",
    "full_precision_dtype": (
        "(Tensor self, ScalarType? dtype=None, *, str? device_type=None) -> ScalarType?"
    ),
    "cast": "(Tensor self, ScalarType dtype) -> Tensor",
    "cast_each": "(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
    "cast_with_stats": "(Tensor tensor, ScalarType dtype) -> (Tensor, Tensor)",
    "multi_cast": "(Tensor[] tensors, ScalarType dtype) -> Tensor[]",
    "multi_cast.out": "(Tensor[] tensors, ScalarType dtype, *, Tensor(a!)[] out) -> ()",
    "stochastic_cast": (
        "(Tensor[] tensors, ScalarType dtype, SymInt seed, SymInt offset) -> Tensor[]"
    ),
    "unscale_cast": "(Tensor[] grads, Tensor scale, ScalarType dtype) -> (Tensor[], Tensor)",
    "unscale_cast.out": (
        "(Tensor[] grads, Tensor scale, ScalarType dtype, *, Tensor(a!)[] out) -> Tensor"
    ),
}


def check_registered() -> None:
    """Compares what is registered with SCHEMAS.

    Raises:
        KernelTierError: an op is missing or has another schema: the native library was built from
            other sources than this Python code (an editable install after an update, mostly).
    """
    for qualified, schema in SCHEMAS.items():
        expected = f"smart_autocast::{qualified}{schema}"
        name, _, overload = qualified.partition(".")
        packet = getattr(torch.ops.smart_autocast, name, None)
        op = getattr(packet, overload or "default", None)
        found = "no such op" if op is None else schema_of(op)
        if found != expected:
            raise KernelTierError(
                f"the native library is not of this version of the sources: expected {expected}, "
                f"found {found}; {REBUILD}"
            )
