"""What bad options get: an error before anything compiles, as the class a user would catch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from autocast_backend import smart_autocast
from autocast_backend.options import Options, parse_options
from tests.support import BF16


def compile_with(options: Any = None, mode: str | None = None) -> Any:
    torch._dynamo.reset()
    arguments: dict[str, Any] = {"options": options} if options else {}
    if mode:
        arguments["mode"] = mode
    return torch.compile(torch.sin, backend="smart_autocast", **arguments)(torch.ones(2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"iner": "aot_eager"}, r"unknown option 'iner'; expected 'inner'"),
        (
            {"max_autotune": True},
            r"an option of their own: {\"inductor\": {'max_autotune': \.\.\.}}",
        ),
        ({"policies": {"ops": {}}}, r"'policies': unknown key 'ops'"),
        (
            {"weight_cache": "scop"},
            r"'weight_cache': .*'scop'; expected one of 'scope', 'version', 'off'",
        ),
        (
            {"backward_pass_autocast": "of"},
            r"'backward_pass_autocast': .*'of'; expected one of 'auto', 'same_as_forward', 'off'",
        ),
        (
            {"backward_pass_autocast": {"device_type": "gpu"}},
            r"'backward_pass_autocast': device_ty",
        ),
        (
            {"on_backward_autocast_mismatch": "err"},
            r"unknown value 'err'; expected one of 'warn', 'error', 'do_nothing'",
        ),
        ({"inner": "aot_eger"}, r"no backend is called 'aot_eger'; expected .*'aot_eager'"),
        ({"inner": "smart_autocast"}, r"another backend than 'smart_autocast'"),
        ({"inner": smart_autocast}, r"another backend than 'smart_autocast'"),
        ({"validate": "strictly"}, r"'strictly'; expected one of 'strict', 'dtype', 'off'"),
        ({"autocast": {"device_type": "gpu"}}, r"'autocast': device_type: expected one of"),
        ({"autocast": {"dtype": torch.float16}}, r"'autocast': \"device_type\" is missing"),
        ({"autocast": {"device_type": "cpu", "dtype": torch.float64}}, r"got torch.float64"),
        ({"autocast": [BF16, {"device": "cpu"}]}, r"unknown torch.autocast argument 'device'"),
        ({"autocast": {"device_type": "cpu", 1: 2, "x": 3}}, r"unknown torch.autocast argument 1"),
        ({"inductor": {"max_autotun": True}}, r"unknown Inductor config .*'max_autotune'"),
        ({"inductor": {1: 2}}, r"unknown Inductor config '1'; expected one of .* more\)"),
        ({"inner": "aot_eager", "inductor": {"cpp_wrapper": True}}, r"needs inner='inductor'"),
    ],
)
def test_an_impossible_value_is_a_value_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compile_with(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inner": 3}, r"'inner': expected the name of a backend or a callable; got 3"),
        ("aot_eager", r"options: expected a dict, such as .*; got 'aot_eager'"),
        ({"validate": False}, r"'validate': expected one of 'strict', 'dtype', 'off'; got False"),
        ({"autocast": "cpu"}, r"'autocast': expected None, a dict"),
        ({"autocast": ["cpu"]}, r"dict of torch.autocast arguments"),
        ({"autocast": {"device_type": "cpu", "enabled": "yes"}}, r"enabled: expected a bool"),
        ({"inductor": ["max_autotune"]}, r"'inductor': expected a dict"),
        ({"inductor": {"max_autotune": "yes"}}, r"'max_autotune': .* type bool; got 'yes'"),
        ({"inner": lambda graph, inputs: None}, r"'inner': expected a callable .* returned None"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error(options: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        compile_with(options)


def test_mode() -> None:
    with pytest.raises(
        ValueError, match=r"unknown mode 'max-autotun'; expected one of .*'max-autotune'"
    ):
        compile_with(mode="max-autotun")
    with pytest.raises(TypeError, match=r"mode: expected one of 'default', .*; got 3"):
        compile_with(mode=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mode='max-autotune' needs inner='inductor'"):
        parse_options({"inner": "aot_eager"}, "max-autotune")
    patches = parse_options({"inductor": {"max_autotune": False}}, "max-autotune").inductor
    assert patches["max_autotune"] is False  # the option wins over the mode
    assert patches["coordinate_descent_tuning"] is True


def test_nothing_is_compiled_before_the_options_are_checked() -> None:
    def never(*_: Any) -> None:
        raise AssertionError("compiled")

    with pytest.raises(ValueError, match="unknown option"):
        compile_with({"inner": never, "unknown": 1})


def test_a_graph_is_not_left_to_python_without_the_options_that_change_it() -> None:
    """Dynamo takes errors of fake tensors in a backend for a graph break."""

    def inner(*_: Any) -> Any:
        raise torch._subclasses.fake_tensor.DataDependentOutputException(torch.ops.aten.item)

    for given in ({"autocast": BF16}, {"policies": {"op": {"aten::sin": "fp32"}}}):
        words = re.escape(f"without the options {list(given)}")
        with pytest.raises(RuntimeError, match=words):
            compile_with({"inner": inner, **given})
    assert torch.equal(compile_with({"inner": inner}), torch.ones(2).sin())


def test_every_option_is_documented_where_it_is_declared() -> None:
    import ast
    import inspect

    body = ast.parse(inspect.getsource(Options)).body[0].body[1:]  # type: ignore[attr-defined]
    for declared, doc in zip(body[::2], body[1::2], strict=True):
        assert isinstance(declared, ast.AnnAssign)
        assert isinstance(doc, ast.Expr)
