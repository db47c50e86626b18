"""Outputs that are inputs, views of inputs, views of intermediates, and views of one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.aot.harness import (
    AOT_EAGER,
    ORACLE,
    STOCK,
    WAYS,
    Case,
    assert_like_the_oracle,
    each_way,
    island,
    leaves,
    loss_of,
    mixed,
    results,
)
from tests.support import assert_same_bits

Several = tuple[torch.Tensor, ...]


def returns_an_input(x: torch.Tensor, w: torch.Tensor) -> Several:
    return w, mixed(x, w).detach(), island(x, w)


def returns_an_input_twice(x: torch.Tensor, w: torch.Tensor) -> Several:
    return x, x, island(x.detach(), w)


def returns_a_view_of_an_input(x: torch.Tensor, w: torch.Tensor) -> Several:
    return x.t(), island(x, w)


def returns_a_view_of_a_mutated_input(x: torch.Tensor, w: torch.Tensor) -> Several:
    x.mul_(3)
    return x[1:3], mixed(x.detach(), w)


def returns_a_view_taken_before_the_mutation(x: torch.Tensor, w: torch.Tensor) -> Several:
    view = x[1:3]
    x.mul_(3)
    return view, mixed(x, w)


def returns_an_intermediate_and_its_views(x: torch.Tensor, w: torch.Tensor) -> Several:
    y = mixed(x, w)
    return y, y.t(), y.view(-1)


def returns_views_of_one_base(x: torch.Tensor, w: torch.Tensor) -> Several:
    y = mixed(x, w)
    return y[:2], y[2:], y.t()


def returns_a_detached_alias(x: torch.Tensor, w: torch.Tensor) -> Several:
    y = mixed(x, w)
    return y, y.detach(), y.view(2, 8).detach()


def returns_a_detached_view(x: torch.Tensor, w: torch.Tensor) -> Several:
    turned = mixed(x, w).t()
    return turned.detach(), turned


def returns_detached_rows(x: torch.Tensor, w: torch.Tensor) -> Several:
    y = mixed(x, w)
    rows = y[1:]
    return rows, rows.detach(), y.view(2, 8)


def returns_a_view_and_its_bits(x: torch.Tensor, w: torch.Tensor) -> Several:
    turned = mixed(x, w).t()
    return turned, turned.detach().view(torch.int32)


def returns_views_made_without_autograd(x: torch.Tensor, w: torch.Tensor) -> Several:
    """They claim to require grad, and no gradient goes through them."""
    y = mixed(x, w)
    with torch.no_grad():
        turned, first, flat = y.t(), y[:2], y.view(-1)
    return y, turned, first, flat, y.view(2, 8), turned.sin()


def returns_a_view_of_an_input_made_without_autograd(x: torch.Tensor, w: torch.Tensor) -> Several:
    with torch.no_grad():
        turned = w.t()
    return mixed(x, w), turned


def returns_an_intermediate_twice(x: torch.Tensor, w: torch.Tensor) -> Several:
    y = mixed(x, w)
    return y, y


def returns_a_cast(x: torch.Tensor, w: torch.Tensor) -> Several:
    """A cast that is none returns its argument."""
    y = mixed(x, w)
    return y, y.to(torch.float32), (x @ w).to(torch.bfloat16)


def returns_an_expanded_product(x: torch.Tensor, w: torch.Tensor) -> Several:
    y = mixed(x, w)
    return y.expand(3, 4, 4), y.as_strided((2, 2), (4, 1), 1)


def returns_what_a_region_reads(x: torch.Tensor, w: torch.Tensor) -> Several:
    """The softmax reads `y` in float32: in the region, another tensor than the output."""
    y = x @ w
    return y, y.t().softmax(-1), island(y, w)


CASES = {
    case.function.__name__: case
    for case in (
        Case(returns_an_input),
        Case(returns_an_input_twice),
        Case(returns_a_view_of_an_input),
        Case(returns_a_view_of_a_mutated_input, lambda x, w: (x * 1, w)),
        Case(returns_a_view_taken_before_the_mutation, lambda x, w: (x * 1, w)),
        Case(returns_an_intermediate_and_its_views),
        Case(returns_views_of_one_base),
        Case(returns_a_detached_alias),
        Case(returns_a_detached_view),
        Case(returns_detached_rows),
        Case(returns_a_view_and_its_bits),
        Case(returns_views_made_without_autograd),
        Case(returns_a_view_of_an_input_made_without_autograd),
        Case(returns_an_intermediate_twice),
        Case(returns_a_cast),
        Case(returns_an_expanded_product),
        Case(returns_what_a_region_reads),
    )
}


@pytest.mark.parametrize(("name", "way"), each_way(CASES))
def test_bits_and_alias_relations(name: str, way: str) -> None:
    assert_like_the_oracle(CASES[name], way)


def returns_chunks(x: torch.Tensor, w: torch.Tensor) -> Several:
    return mixed(x, w).chunk(2, -1)


@pytest.mark.parametrize("way", WAYS)
def test_views_of_one_op(way: str) -> None:
    """AOTAutograd, on purpose, does not give them one base again; ours are as stock's."""
    ours, stock, oracle = (
        results(Case(returns_chunks), way, **arguments) for arguments in (AOT_EAGER, STOCK, ORACLE)
    )
    for i, of_oracle in enumerate(oracle):
        assert ours[i]["aliases"] == stock[i]["aliases"] == [(3, 2, "one storage")]
        for what in ("outputs", "geometry", "gradients"):
            assert_same_bits(ours[i][what], of_oracle[what], what)


def views_of_a_view_made_without_autograd(w: torch.Tensor) -> Several:
    with torch.no_grad():
        flat = w.view(-1)
        first, second = w.chunk(2)
    return flat.view(2, 8), flat[1:], flat, first, second.t(), (w * w).sum(0)


@pytest.mark.parametrize("argument", ["leaf", "result", "leaf that is a view"])
def test_a_view_made_without_autograd_and_its_views_hand_on_no_gradient(argument: str) -> None:
    def run(compiled: Any) -> tuple[list[bool], torch.Tensor]:
        leaf, _ = leaves()
        if argument == "leaf that is a view":
            leaf = leaf.detach()[:].requires_grad_()
        outputs = compiled(leaf * 1 if argument == "result" else leaf)
        loss_of(outputs).backward()
        return [o.requires_grad for o in outputs], leaf.grad

    torch._dynamo.reset()
    expected = run(views_of_a_view_made_without_autograd)
    found = run(torch.compile(views_of_a_view_made_without_autograd, fullgraph=True, **AOT_EAGER))
    assert found[0] == expected[0]
    assert expected[0] == [argument != "leaf that is a view"] * 5 + [True]
    assert_same_bits(found[1], expected[1])


def test_the_relations_are_seen() -> None:
    """What the comparisons above rest on: pairs by the numbers of the tensors; 0 and 1 are the
    inputs."""
    found = {
        name: results(CASES[name], "off", **AOT_EAGER)[0]["aliases"]
        for name in ("returns_an_input", "returns_a_view_of_an_input", "returns_a_detached_alias")
    }
    assert found == {
        "returns_an_input": [(2, 1, "same")],
        "returns_a_view_of_an_input": [(2, 0, "one base")],
        "returns_a_detached_alias": [
            (3, 2, "one storage"),
            (4, 2, "one storage"),
            (4, 3, "one storage"),
        ],
    }


def test_writing_to_an_output_reaches_what_it_aliases() -> None:
    """An alias relation is a promise about later writes, so here is one."""

    def written(**compile_arguments: object) -> list[torch.Tensor]:
        torch._dynamo.reset()
        case = CASES["returns_an_intermediate_and_its_views"]
        compiled = torch.compile(case.function, fullgraph=True, **compile_arguments)
        with torch.no_grad():
            outputs = compiled(torch.eye(4), torch.full((4, 4), 2.0))
        outputs[1][0].fill_(7)
        return list(outputs)

    y, turned, flat = written(**AOT_EAGER)
    assert (y[:, 0] == 7).all()
    assert (flat[::4] == 7).all()
    assert_same_bits([y, turned, flat], written(**ORACLE))
