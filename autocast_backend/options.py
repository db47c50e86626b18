"""The options of `torch.compile(backend="smart_autocast", options={...})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ._torch.configs import (
    backward_pass_autocast_config,
    inductor_config_names,
    inductor_config_type,
    inductor_mode_options,
)
from ._torch.dynamo import backend_names, pass_through_error
from .policies.overrides import Overrides, parse_overrides
from .spelling import nearest, one_of
from .state import check_autocast_arguments

_PassThrough = pass_through_error()

_VALIDATE = ("strict", "dtype", "off")
_WEIGHT_CACHE = ("scope", "version", "off")
_BACKWARD = ("auto", "same_as_forward", "off")
_ON_MISMATCH = ("warn", "error", "do_nothing")


class OptionValueError(_PassThrough, ValueError):  # type: ignore[misc,valid-type]
    """An unknown option, or a value an option does not take. Reaches the user as a `ValueError`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)  # type: ignore[call-arg]


class OptionTypeError(_PassThrough, TypeError):  # type: ignore[misc,valid-type]
    """A value of the wrong type. Reaches the user as a `TypeError`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)  # type: ignore[call-arg]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a graph is compiled. Each field is documented where it is declared."""

    inner: str | Callable[..., Any] = "inductor"
    """Who compiles the lowered graph: "inductor", "aot_eager", any registered backend, or a
    callable `(graph_module, example_inputs) -> callable`."""

    autocast: tuple[Mapping[str, Any], ...] = ()
    """Arguments of `torch.autocast` (a dict, or a list of them): treat the whole graph as such a
    region, with no context manager in the code."""

    backward_pass_autocast: str | tuple[Mapping[str, Any], ...] = "auto"
    """The autocast state the backward pass is computed for. "auto": the state it really runs in,
    whatever that is, as in eager mode. "same_as_forward": the state around the forward; "off"; or
    arguments of `torch.autocast` (a dict, or a list of them). Where it is not given,
    `torch._functorch.config.backward_pass_autocast` counts, unless that has its default value."""

    on_backward_autocast_mismatch: str = "warn"
    """What happens when `backward_pass_autocast` is not "auto", a backward runs under another state
    and would have been another computation there: "warn", "error" or "do_nothing"."""

    policies: Overrides = field(default_factory=Overrides)
    """Overrides of autocast's policies, by op and by module: `{"op": {"aten::softmax":
    "lower_precision_fp"}, "module": {"blocks.*.router": "fp32", "lm_head": "off"}}`. They change
    results, of the calls they name alone: see docs/policies.md."""

    weight_cache: str = "scope"
    """How long the cast of a weight lives. "scope": as in eager mode, until the outermost autocast
    context exits, shared by all graphs that read the weight; a weight that changes meanwhile is
    cast again. "version": until the weight changes, across contexts; see docs/weights.md for what
    it cannot see. "off": every graph makes its casts itself, at every call, as in stock
    `torch.compile`."""

    validate: str = "strict"
    """How each lowered call is proved equal to eager autocast while it compiles. "strict": the ops
    below autograd and their dtypes; "dtype": the dtypes of results, and the ops of composites that
    have no rule, but not what a kernel calls inside; "off": not at all - the policy table is
    believed, which is wrong wherever a composite hides a policy op."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor config patches, such as {"max_autotune": True}. `mode=` of `torch.compile` works as
    in stock. `emulate_precision_casts` is on if it is not given, in graphs on the CPU that have low
    precision: results in bfloat16 and float16 are rounded inside of kernels, as in eager mode."""


def parse_options(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Check what the user gave `torch.compile` and return it as `Options`.

    Raises:
        OptionValueError: an unknown option, with near names, or value, with those there are.
        OptionTypeError: a value of the wrong type.
    """
    if not isinstance(options, Mapping | None):
        raise OptionTypeError(
            f'options: expected a dict, such as {{"inner": "aot_eager"}}; got {options!r}'
        )
    given = dict(options or {})
    names = [f.name for f in fields(Options)]
    for name in given:
        if name not in names:
            raise OptionValueError(f"unknown option {name!r}; {_instead(name, names)}")
    given["inner"] = _check_inner(given.get("inner", Options.inner))
    given["autocast"] = _check_autocast("autocast", given.get("autocast"), "None")
    given["backward_pass_autocast"] = _check_backward(
        given.get("backward_pass_autocast", backward_pass_autocast_config())
    )
    given["policies"] = _check_policies(given.get("policies"))
    for name, known in (
        ("on_backward_autocast_mismatch", _ON_MISMATCH),
        ("weight_cache", _WEIGHT_CACHE),
        ("validate", _VALIDATE),
    ):
        given[name] = _check_choice(name, given.get(name, getattr(Options, name)), known)
    given["inductor"] = _check_inductor(given.get("inductor", {}), mode, given["inner"])
    return Options(**given)


def _instead(name: Any, names: list[str]) -> str:
    """What may have been meant by an unknown option."""
    if str(name).replace("-", "_") in inductor_config_names():
        return f'Inductor\'s configs are an option of their own: {{"inductor": {{{name!r}: ...}}}}'
    return f"expected {nearest(str(name), names)}"


def _check_inner(inner: Any) -> str | Callable[..., Any]:
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', '')}"
    if inner == "smart_autocast" or name == "autocast_backend.backend.smart_autocast":
        raise OptionValueError(
            "option 'inner': expected another backend than 'smart_autocast', such as 'inductor'"
        )
    if callable(inner):
        return inner
    if not isinstance(inner, str):
        raise OptionTypeError(
            f"option 'inner': expected the name of a backend or a callable; got {inner!r}"
        )
    names = backend_names()
    if inner not in names:
        raise OptionValueError(
            f"option 'inner': no backend is called {inner!r}; expected {nearest(inner, names)}"
        )
    return inner


def _check_autocast(name: str, given: Any, other: str) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ()
    entries = [given] if isinstance(given, Mapping) else given
    if not isinstance(entries, (list, tuple)):
        raise OptionTypeError(
            f"option {name!r}: expected {other}, a dict of torch.autocast arguments, such as "
            f'{{"device_type": "cpu", "dtype": torch.bfloat16}}, or a list of such dicts; '
            f"got {given!r}"
        )
    for arguments in entries:
        try:
            check_autocast_arguments(f"option {name!r}", arguments)
        except TypeError as error:
            raise OptionTypeError(str(error)) from None
        except ValueError as error:
            raise OptionValueError(str(error)) from None
    return tuple(entries)


def _check_policies(given: Any) -> Overrides:
    try:
        return parse_overrides("option 'policies'", given)
    except TypeError as error:
        raise OptionTypeError(str(error)) from None
    except ValueError as error:
        raise OptionValueError(str(error)) from None


def _check_backward(given: Any) -> str | tuple[Mapping[str, Any], ...]:
    name = "backward_pass_autocast"
    if given is None:
        return Options.backward_pass_autocast
    if isinstance(given, str):
        return _check_choice(name, given, _BACKWARD)
    return _check_autocast(name, given, ", ".join(map(repr, _BACKWARD)))


def _check_choice(name: str, given: Any, known: tuple[str, ...]) -> str:
    if not isinstance(given, str):
        raise OptionTypeError(f"option {name!r}: expected {one_of(known)}; got {given!r}")
    if given not in known:
        raise OptionValueError(
            f"option {name!r}: unknown value {given!r}; expected {one_of(known)}"
        )
    return given


def _check_inductor(given: Any, mode: str | None, inner: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise OptionTypeError(
            f"option 'inductor': expected a dict of Inductor config patches; got {given!r}"
        )
    if (given or mode) and inner != "inductor":
        what = f"mode={mode!r}" if mode else "option 'inductor'"
        raise OptionValueError(f"{what} needs inner='inductor'; got inner={inner!r}")
    known = inductor_config_names() if given else frozenset()
    patches = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name, value in patches.items():
        if name not in known:
            raise OptionValueError(
                f"option 'inductor': unknown Inductor config {name!r}; "
                f"expected {nearest(name, known)}"
            )
        expected = inductor_config_type(name)
        if expected is not None and not isinstance(value, expected):
            raise OptionTypeError(
                f"option 'inductor': {name!r}: expected a value of type {expected.__name__}; "
                f"got {value!r}"
            )
    if not mode:
        return patches
    modes = inductor_mode_options()
    if not isinstance(mode, str):
        raise OptionTypeError(f"mode: expected {one_of(modes)}; got {mode!r}")
    if mode not in modes:
        raise OptionValueError(f"unknown mode {mode!r}; expected {one_of(modes)}")
    return {**modes[mode], **patches}
