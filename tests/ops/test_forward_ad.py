"""Forward-mode AD and `torch.func`: the casts have `Tensor.to`'s derivatives there, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from autocast_backend import cast_with_stats, multi_cast, promote, unscale_cast
from tests.ops.smart_cast_suite import assert_same, sample

ops = torch.ops.smart_autocast
bf16, f32 = torch.bfloat16, torch.float32
LARGE = 2**22  # one such tensor is cast by a kernel of ours

DERIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "one of a list": lambda x: multi_cast([x.cos(), x, x, x, x, x], bf16)[1],
    "a large one": lambda x: multi_cast([x.expand(LARGE, *x.shape)], bf16)[0][0],
    "the op": lambda x: ops.multi_cast.default([x, x.double()], bf16)[0],
    "with statistics": lambda x: cast_with_stats(x, bf16)[0],
    "the op with statistics": lambda x: ops.cast_with_stats.default(x, bf16)[0],
    "a smart cast": ops.autocast_to_bf16,
    "promoted": lambda x: promote([x, x.half()])[1].bfloat16(),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "multi_cast: argument 'out' takes no derivatives": lambda x: multi_cast(
        [x], bf16, out=[torch.empty_like(x, dtype=bf16)]
    ),
    "unscale_cast: it has no derivative": lambda x: unscale_cast([x], torch.ones(1)),
    "unscale_cast: it has no derivative, ": lambda x: unscale_cast(
        [x], torch.ones(1), out=[torch.empty_like(x)]
    ),
    "stochastic_cast: it has no derivative": lambda x: multi_cast(
        [x], bf16, rounding="stochastic", seed=0
    ),
}
derived = pytest.mark.parametrize("cast", DERIVED.values(), ids=DERIVED)


def of_dual(cast: Callable[[Tensor], Tensor], tensor: Tensor, tangent: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        result = cast(forward_ad.make_dual(tensor, tangent))
        return forward_ad.unpack_dual(result).tangent


def of_jvp(cast: Callable[[Tensor], Tensor], tensor: Tensor, tangent: Tensor) -> Tensor:
    return torch.func.jvp(cast, (tensor,), (tangent,))[1]


def of_compiled(cast: Callable[[Tensor], Tensor], tensor: Tensor, tangent: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(of_jvp, backend="eager", fullgraph=True)(cast, tensor, tangent)


@derived
@pytest.mark.parametrize("tangent_of", [of_dual, of_jvp, of_compiled])
def test_tangents_are_cast_too(
    cast: Callable[[Tensor], Tensor], tangent_of: Callable[..., Tensor]
) -> None:
    tensor, tangent = sample(f32, 3), sample(f32, 3).flip(0)
    assert_same(tangent_of(cast, tensor, tangent), tangent.bfloat16())


@derived
def test_transforms_of_transforms(cast: Callable[[Tensor], Tensor]) -> None:
    def cube(x: Tensor, cast: Callable[[Tensor], Tensor]) -> Tensor:
        return cast(x).float().pow(3).sum()

    rows = sample(f32, 2, 3)
    for transform in (
        lambda f: torch.vmap(torch.func.grad(f), (0, None)),
        lambda f: torch.vmap(torch.func.hessian(f), (0, None)),
    ):
        wanted = transform(cube)(rows, Tensor.bfloat16)
        assert torch.equal(transform(cube)(rows, cast), wanted)


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("tangent_of", [of_dual, of_jvp])
def test_ops_without_derivatives_refuse_tangents(
    message: str, tangent_of: Callable[..., Tensor]
) -> None:
    with pytest.raises(RuntimeError, match=message):
        tangent_of(REFUSED[message], sample(f32, 3), sample(f32, 3))


def test_what_has_no_tangent_is_taken_beside_what_has() -> None:
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(3), torch.ones(3))
        for call in REFUSED.values():
            call(torch.ones(3))
