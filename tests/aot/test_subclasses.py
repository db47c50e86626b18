"""Tensor subclasses that AOTAutograd takes apart: as inputs, weights, outputs and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.aot.harness import (
    AOT_EAGER,
    Case,
    assert_like_the_oracle,
    each_way,
    geometry,
    mixed,
    results,
)


class Wrapped(torch.Tensor):
    """One tensor and a label, which every op hands on."""

    inner: torch.Tensor
    label: str

    @staticmethod
    def __new__(cls, inner: torch.Tensor, label: str) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    @torch.compiler.disable
    def __init__(self, inner: torch.Tensor, label: str) -> None:
        self.inner, self.label = inner, label

    def __repr__(self) -> str:
        return f"Wrapped({self.inner!r}, {self.label!r})"

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["inner"], self.label

    @staticmethod
    def __tensor_unflatten__(inner: dict, label: str, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inner"], label)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        label = next(v.label for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Wrapped))
        bare = pytree.tree_map_only(Wrapped, lambda v: v.inner, (args, kwargs))
        result = func(*bare[0], **bare[1])
        wrapped = pytree.tree_map_only(torch.Tensor, lambda t: Wrapped(t, label), result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def doubled(t: torch.Tensor) -> TwoTensor:
    return TwoTensor(t, t * 2)


def two_tensor_input(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    return doubled(x), w


def two_tensor_weight(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    return x, doubled(w)


def mutated_two_tensor(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    return TwoTensor(x.detach().clone(), x.detach() * 2), w


def wrapped(x: torch.Tensor, w: torch.Tensor) -> Sequence[torch.Tensor]:
    return Wrapped(x, "activation"), w


def writes_it(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return mixed(x, w)


def returns_views(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.t(), mixed(x, w).t()


def mixes_kinds(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs with and without the subclass."""
    return mixed(x, w), x + w


CASES = {
    "two_tensor_input": Case(mixed, two_tensor_input),
    "two_tensor_weight": Case(mixes_kinds, two_tensor_weight),
    "two_tensor_views": Case(returns_views, two_tensor_input),
    "two_tensor_mutated": Case(writes_it, mutated_two_tensor),
    "wrapped": Case(mixes_kinds, wrapped),
    "wrapped_views": Case(returns_views, wrapped),
}


@pytest.mark.parametrize(("name", "way"), each_way(CASES))
def test_bits_of_subclasses(name: str, way: str) -> None:
    assert_like_the_oracle(CASES[name], way)


def test_subclasses_come_out_as_what_they_are() -> None:
    """The comparison above takes them apart; here is what it finds."""
    outputs = results(CASES["two_tensor_weight"], "ambient", **AOT_EAGER)[0]["outputs"]
    kinds = [o if isinstance(o, str) else o.dtype for o in outputs]
    pair = ["TwoTensor", torch.float32, torch.float32]
    assert kinds == pair * 2
    (x, w) = wrapped(torch.eye(4), torch.eye(4))
    torch._dynamo.reset()
    product = torch.compile(lambda a, b: a @ b, **AOT_EAGER)(x, w)
    assert isinstance(product, Wrapped)
    assert product.label == "activation"
    assert geometry([product]) == geometry([x])
