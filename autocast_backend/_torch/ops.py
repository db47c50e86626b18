"""Ops as the dispatcher knows them. `torch.ops` is public, the types of what it holds are not, nor
is what they say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "arguments_of",
    "chooses_attention",
    "is_dispatched",
    "op_name_of",
    "overloads_of",
    "schema_of",
]


def is_dispatched(target: Any) -> TypeGuard[OpOverload | OpOverloadPacket]:
    """Whether a node's target is an op of the dispatcher, with or without its overload."""
    return isinstance(target, (OpOverload, OpOverloadPacket))


def op_name_of(target: OpOverload | OpOverloadPacket) -> tuple[str, str]:
    """The name of an op, `aten::add`, and its overload: "" for the default one, or for all."""
    if isinstance(target, OpOverload):
        return target._schema.name, target._schema.overload_name
    return target._qualified_op_name, ""


def overloads_of(target: Any) -> tuple[OpOverload, ...]:
    """The ops that a node's target may call: of one without its overload, all that it has."""
    if isinstance(target, OpOverloadPacket):
        return tuple(getattr(target, name) for name in target.overloads())
    return (target,) if isinstance(target, OpOverload) else ()


def chooses_attention(target: Any) -> bool:
    """Whether a call chooses one of PyTorch's kernels for attention while it is traced."""
    name = getattr(target, "__name__", "") if callable(target) else ""
    return name.startswith(_ATTENTION)


_ATTENTION = (
    "scaled_dot_product_attention",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "multi_head_attention_forward",
)


def schema_of(op: OpOverload) -> str:
    """The schema of an op as it is written."""
    return str(op._schema)


def arguments_of(op: OpOverload) -> Sequence[Any]:
    """The arguments in the schema of an op: `name`, `kwarg_only`, `default_value`."""
    return op._schema.arguments
