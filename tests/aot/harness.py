"""One function, three ways into autocast, two ways back: what the tests of this folder share.

A function is compiled once for each way into autocast. Its backward then runs outside autocast,
inside, and outside again, so that a backward that follows the wrong state, or sticks to the first
one, shows. The oracle is the same Dynamo graph under real autocast, `backend="eager"`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.support import BF16, assert_same_bits, tensors

AOT_EAGER: dict[str, Any] = {"backend": "smart_autocast", "options": {"inner": "aot_eager"}}
STOCK: dict[str, Any] = {"backend": "aot_eager"}
ORACLE: dict[str, Any] = {"backend": "eager"}

WAYS = ("off", "ambient", "region")
"""Where a forward meets autocast: nowhere, around the compiled call, inside of its graph."""

BACKWARDS = (False, True, False)
"""Whether autocast is on around the backwards of one compiled function."""

Function = Callable[..., Any]


def each_way(cases: Iterable[Any]) -> list[tuple[Any, str]]:
    """Each case outside of autocast, and in turn around and inside of the graph."""
    ways = itertools.cycle(("ambient", "region"))
    return [pair for case in cases for pair in ((case, "off"), (case, next(ways)))]


def autocast(enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast(**BF16, enabled=enabled)


def inside_region(function: Function) -> Function:
    """`function` with a region of its own."""

    def region(*args: Any) -> Any:
        with torch.autocast(**BF16):
            return function(*args)

    return region


def island(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product with autocast off, whose backward the state around `backward()` changes."""
    with torch.autocast("cpu", enabled=False):
        return x.float().cos() @ w.float().sin()


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product in the state in force and one in float32."""
    return (x @ w).sin() + island(x, w)


def leaves() -> list[torch.Tensor]:
    """Two square leaves that require grad, the same numbers every time."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2)]


@dataclass(frozen=True)
class Case:
    """A function of tensors made from `leaves()`.

    Attributes:
        function: what is compiled.
        arguments: makes its arguments from the leaves; mutated arguments must not be leaves.
        around: entered around the forward.
        fullgraph: whether Dynamo takes all of it.
    """

    function: Function
    arguments: Callable[..., Sequence[torch.Tensor]] = lambda x, w: (x, w)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    fullgraph: bool = True


def plain(value: Any) -> list[Any]:
    """The leaves of a nest; of tensor subclasses, the tensors they are made of."""
    flat: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            flat += [type(leaf).__name__, *plain([getattr(leaf, name) for name in names])]
        else:
            flat.append(leaf)
    return flat


def geometry(values: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """What mutations of metadata change, and what an output says of autograd."""
    return [
        (tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, t.is_leaf) for t in values
    ]


def aliases(values: Sequence[torch.Tensor]) -> list[tuple[int, int, str]]:
    """Which pairs are the same tensor, views of one base, or share memory alone."""
    return [
        (i, j, relation)
        for i, first in enumerate(values)
        for j, second in enumerate(values[:i])
        if (relation := _relation(first, second))
    ]


def _relation(first: torch.Tensor, second: torch.Tensor) -> str:
    if first is second:
        return "same"
    bases = [t if t._base is None else t._base for t in (first, second)]
    if bases[0] is bases[1]:
        return "one base"
    storages = [t.untyped_storage()._cdata for t in (first, second)]
    return "one storage" if storages[0] == storages[1] else ""


def loss_of(values: Any) -> torch.Tensor:
    """A loss in which every differentiable tensor has a gradient of its own."""
    roots = [t for t in tensors(values) if t.requires_grad and t.is_floating_point()]
    return sum((t.float().square().sum() * (i + 1) for i, t in enumerate(roots)), torch.zeros(()))


def backward_inside(loss: torch.Tensor, inside: bool, **arguments: Any) -> None:
    with autocast(inside):
        loss.backward(**arguments)


def run(compiled: Function, case: Case, way: str, inside: bool) -> dict[str, Any]:
    """One forward and one backward of an already compiled function."""
    given = leaves()
    arguments = list(case.arguments(*given))
    version = arguments[0]._version
    torch.manual_seed(1)
    with autocast(way == "ambient"), case.around():
        outputs = compiled(*arguments)
    seen = [*arguments, *tensors(outputs)]
    plain_seen = [t for t in seen if not is_traceable_wrapper_subclass(t)]
    result = {
        "outputs": [o.detach() if isinstance(o, torch.Tensor) else o for o in plain(outputs)],
        "inputs": [a.detach().clone() for a in plain(arguments) if isinstance(a, torch.Tensor)],
        "geometry": geometry(plain_seen),
        "aliases": aliases(plain_seen),
    }
    # Not of the other inputs: their gradients would be sums of three, in an order that depends on
    # where the graph ends.
    loss = loss_of([outputs, arguments[: arguments[0]._version > version]])
    if loss.requires_grad:
        backward_inside(loss, inside)
    return {**result, "gradients": plain([leaf.grad for leaf in given])}


def results(case: Case, way: str, **compile_arguments: Any) -> list[dict[str, Any]]:
    """Compile once, then run once for each of `BACKWARDS`."""
    torch._dynamo.reset()
    function = inside_region(case.function) if way == "region" else case.function
    compiled = torch.compile(function, **{"fullgraph": case.fullgraph, **compile_arguments})
    return [run(compiled, case, way, inside) for inside in BACKWARDS]


def differences(actual: Any, expected: Any) -> Iterator[str]:
    """Names of the results of two backends that are not the same bits."""
    for inside, got, wanted in zip(BACKWARDS, actual, expected, strict=True):
        for what, values in wanted.items():
            where = f"{what}, backward {'inside' if inside else 'outside'} autocast"
            try:
                assert_same_bits(got[what], values, where)
            except AssertionError as error:
                yield str(error).splitlines()[0]


def assert_like_the_oracle(case: Case, way: str, **compile_arguments: Any) -> None:
    """Bits, gradients, mutated inputs and alias relations, whatever the backward's state."""
    expected = results(case, way, **ORACLE)
    outside, inside, _ = expected
    assert not same_bits(inside["gradients"], outside["gradients"]), "a case that shows nothing"
    found = list(differences(results(case, way, **{**AOT_EAGER, **compile_arguments}), expected))
    assert not found, found


def same_bits(actual: Any, expected: Any) -> bool:
    try:
        assert_same_bits(actual, expected)
    except AssertionError:
        return False
    return True
