"""Random programs with random nested regions, dtypes, graph breaks and checkpoints: equal to eager
autocast.

    make test ARGS="tests/conformance/test_programs.py --programs 20000"

tries more of them, and others each time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from autocast_backend import lower_autocast
from autocast_backend.export import lower_with_report, module
from autocast_backend.lowering.other_dtypes import DTYPES
from autocast_backend.state import AutocastState
from tests.conformance.programs import (
    CALLS,
    Dtypes,
    Piece,
    Player,
    Program,
    Writer,
    make_inputs,
    programs,
)
from tests.support import TORCH, assert_same_bits, autocast_put_right

IN_CI = 120
COMPILED_IN_CI = 16
CHECKPOINTED_IN_CI = 16
LITE_IN_CI = 5
EXPORTED_IN_CI = 25


def autocast(region: tuple[tuple[str, Any], ...]) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(**dict(region)) if region else contextlib.nullcontext()


def results(
    run: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]],
    program: Program,
    dtypes: Dtypes = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The outputs of one run, and the gradients of all inputs and weights."""
    values = make_inputs(dtypes)
    outputs = run(values)
    losses = [t.float().square().mean() for t in outputs if t.requires_grad]
    if losses:
        with autocast(program.backward):
            torch.stack(losses).sum().backward()
    return outputs, [t.grad for t in values.values()]


def run_pieces(pieces: list[Piece], program: Program) -> Callable[..., list[torch.Tensor]]:
    def run(values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        seen = dict(values)
        for piece in pieces:
            outputs = piece.module(*(seen[name] for name in piece.inputs))
            seen.update(zip(piece.outputs, outputs, strict=True))
        return [seen[name] for name in program.outputs]

    return run


def under(region: tuple[tuple[str, Any], ...], run: Callable[..., Any]) -> Callable[..., Any]:
    def inside(values: dict[str, torch.Tensor]) -> Any:
        with autocast(region):
            return run(values)

    return inside


def count(option: int | None, default: int) -> settings:
    """So many examples: the same every time, or new ones where a number was asked for."""
    return settings(
        max_examples=option or default,
        derandomize=option is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
def test_lowered_programs(pytestconfig: pytest.Config, record_property: Any) -> None:
    """Each program as the graphs Dynamo would make of it, lowered and run, against the same graphs
    under real autocast: outputs and gradients, bit for bit."""
    wanted = pytestconfig.getoption("--programs")
    tried: Counter[str] = Counter()
    errors: Counter[str] = Counter()

    @count(wanted, IN_CI)
    @given(programs())
    def check(program: Program) -> None:
        try:
            with autocast_put_right():
                pieces = Writer(program).pieces
                expected = results(under(program.around, run_pieces(pieces, program)), program)
        except RuntimeError as error:
            tried["raise in eager"] += 1
            errors[str(error)[:100]] += 1
            reject()
        ambient = AutocastState.of([dict(program.around)] if program.around else [])
        lowered = [
            Piece(lower_autocast(p.module, ambient=ambient), p.inputs, p.outputs) for p in pieces
        ]
        assert_same_bits(results(run_pieces(lowered, program), program), expected)
        tried["equal"] += 1
        tried["with graph breaks"] += len(pieces) > 1
        tried["with nested regions"] += "        with " in program.source()
        calls = [n.target for p in lowered for n in p.module.graph.nodes if n.op == "call_function"]
        tried["with smart casts"] += any("smart_autocast" in str(target) for target in calls)
        tried["with brackets"] += any("_enter_autocast" in str(target) for target in calls)

    check()
    record_property("programs", dict(tried))
    print(dict(tried), errors.most_common(5))
    assert tried["equal"] >= (wanted or IN_CI)
    for kind in ("with graph breaks", "with nested regions", "with smart casts"):
        assert tried[kind] > tried["equal"] // 4, tried
    assert 0 < tried["with brackets"] < tried["equal"] // 2
    # Before torch 2.13 some losses have no gradient for mixed dtypes.
    assert tried["raise in eager"] < tried["equal"] // (20 if TORCH >= (2, 13) else 4)


def compiled(program: Program, **arguments: Any) -> Callable[..., Any]:
    """A program from its source code, compiled if there are arguments for that."""
    torch._dynamo.reset()
    scope: dict[str, Any] = {"CALLS": CALLS, "call": Player(), "torch": torch}
    scope["checkpoint"] = functools.partial(checkpoint, use_reentrant=False)
    exec(program.source(), scope)
    function = torch.compile(scope["program"], **arguments) if arguments else scope["program"]
    return under(program.around, lambda values: list(function(**values)))


@pytest.mark.slow
def test_compiled_programs(pytestconfig: pytest.Config) -> None:
    """Programs as source code, through Dynamo with its own graph breaks, against the same graphs
    under real autocast.

    AOTAutograd adds up three and more gradients of one tensor in an order of its own, with every
    backend, so bits are compared where the lowered graphs run as they are.
    """
    wanted = pytestconfig.getoption("--programs")
    graphs: Counter[str] = Counter()

    @count(wanted and wanted // 50, COMPILED_IN_CI)
    @given(programs())
    def check(program: Program) -> None:
        try:
            with autocast_put_right():
                expected = results(compiled(program, backend="eager"), program)
        except RuntimeError:
            reject()
        torch._dynamo.utils.counters.clear()
        arguments: dict[str, Any] = {"backend": "smart_autocast", "options": {"inner": "eager"}}
        assert_same_bits(results(compiled(program, **arguments), program), expected)
        graphs["programs"] += 1
        graphs.update(torch._dynamo.utils.counters["smart_autocast"])

    check()
    print(dict(graphs))
    assert graphs["programs"] >= (wanted // 50 if wanted else COMPILED_IN_CI)
    assert graphs["graphs"] > graphs["programs"] // 2
    assert graphs["lowered"] > graphs["programs"] // 2


class Exportable(nn.Module):
    """A program with what is around it, but for what `torch.export` does not have: graph breaks and
    regions without a weight cache."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        steps = [
            replace(s, region=self._cached(s.region)) for s in program.steps if s.kind != "break"
        ]
        program = replace(program, steps=tuple(steps), around=self._cached(program.around))
        self.run = compiled(program)

    @staticmethod
    def _cached(region: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        return tuple({**dict(region), "cache_enabled": None}.items()) if region else region

    def forward(self, **values: torch.Tensor) -> list[torch.Tensor]:
        return self.run(values)


_DTYPES = st.tuples(*[st.sampled_from([None, *DTYPES]) for _ in make_inputs()])


@pytest.mark.slow
def test_exported_programs(pytestconfig: pytest.Config) -> None:
    """Programs as `torch.export` writes them, lowered, and run with other dtypes than they were
    exported with, against the same programs under real autocast.

    Their gradients are eager mode's, too: `torch.export` has a weight cast at each use, which adds
    them up in another way.
    """
    wanted = pytestconfig.getoption("--programs")
    tried: Counter[str] = Counter()

    @count(wanted and wanted // 10, EXPORTED_IN_CI)
    @given(programs(), _DTYPES, st.lists(_DTYPES, min_size=2, max_size=2))
    def check(program: Program, first: Dtypes, others: list[Dtypes]) -> None:
        model = Exportable(program)
        try:
            with autocast_put_right():
                expected = results(lambda values: model(**values), program, first)
                exported = torch.export.export(model, (), make_inputs(first))
        except RuntimeError:
            tried["raise in eager"] += 1
            reject()
        lowered, report = lower_with_report(exported)
        theirs, ours = module(exported), module(lowered)
        for dtypes in (first, *others):
            try:
                real = results(lambda values: theirs(**values), program, dtypes)
            except RuntimeError:  # eager mode does not mix these
                continue
            actual = results(lambda values: ours(**values), program, dtypes)
            assert_same_bits(actual[0], real[0], str(dtypes))
            if dtypes is not first:
                tried["with other dtypes"] += 1
                continue
            try:
                assert_same_bits(actual[1], real[1])
            except AssertionError:
                assert_same_bits(actual, expected)
        tried["equal"] += 1
        tried["lowered"] += report.lowered > 0
        tried["with brackets"] += bool(report.bracketed)

    check()
    print(dict(tried))
    assert tried["equal"] >= (wanted // 10 if wanted else EXPORTED_IN_CI)
    assert tried["with other dtypes"] > tried["equal"] // 2
    assert tried["lowered"] > tried["equal"] // 2
    assert wanted or tried["with brackets"]  # a few programs of chance may have none
    assert tried["with brackets"] < tried["equal"] // 2
    assert tried["raise in eager"] < tried["equal"] // 4


@pytest.mark.slow
def test_programs_with_checkpoints(pytestconfig: pytest.Config) -> None:
    """Checkpoints, in regions, around them, and in each other. Against eager mode itself: the
    oracle raises where a second checkpoint finds a cast in the cache that its backward has to
    make."""
    wanted = pytestconfig.getoption("--programs")
    tried: Counter[str] = Counter()

    @count(wanted and wanted // 50, CHECKPOINTED_IN_CI)
    @given(programs(checkpoints=True))
    def check(program: Program) -> None:
        checkpoints = [s.name for s in program.steps if s.kind == "end"]
        if not checkpoints:
            reject()
        try:
            with autocast_put_right():
                expected = results(compiled(program), program)
        except RuntimeError:
            tried["raise in eager"] += 1
            reject()
        torch._dynamo.utils.counters.clear()
        arguments: dict[str, Any] = {"backend": "smart_autocast", "options": {"inner": "eager"}}
        assert_same_bits(results(compiled(program, **arguments), program), expected)
        tried["equal"] += 1
        tried["with several"] += len(checkpoints) > 1
        tried.update(torch._dynamo.utils.counters["smart_autocast"])

    check()
    print(dict(tried))
    assert tried["equal"] >= (wanted // 50 if wanted else CHECKPOINTED_IN_CI)
    assert tried["with several"] > tried["equal"] // 4
    assert tried["casts"] > tried["equal"]
    assert tried["raise in eager"] <= tried["equal"] // 4


@pytest.mark.slow
def test_programs_in_inductors_lite_mode(pytestconfig: pytest.Config) -> None:
    """Through Inductor to the bit: in this mode it fuses nothing, so what it makes of a graph has
    the numbers of the graph run op by op."""
    wanted = pytestconfig.getoption("--programs")
    graphs: Counter[str] = Counter()

    @count(wanted and wanted // 50, LITE_IN_CI)
    @given(programs(checkpoints=True))
    def check(program: Program) -> None:
        arguments: dict[str, Any] = {"backend": "smart_autocast"}
        try:
            with autocast_put_right():
                op_by_op = compiled(program, options={"inner": "aot_eager"}, **arguments)
                expected = results(op_by_op, program)
        except RuntimeError:
            reject()
        torch._dynamo.utils.counters.clear()
        assert_same_bits(results(compiled(program, mode="lite", **arguments), program), expected)
        graphs["programs"] += 1
        graphs.update(torch._dynamo.utils.counters["smart_autocast"])

    check()
    print(dict(graphs))
    assert graphs["programs"] >= (wanted // 50 if wanted else LITE_IN_CI)
    assert graphs["lowered"] > graphs["programs"] // 2
