"""The options of `torch.compile(backend="smart_autocast", options={...})`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ._torch import backend_names, inductor_config_names, inductor_mode_options, pass_through_error
from .state import check_autocast_arguments

_PassThrough = pass_through_error()

# Part of the public surface, but not built yet. Accepting one without effect would be a lie.
_PLANNED = ("backward_pass_autocast", "on_backward_autocast_mismatch", "policies", "weight_cache")
_VALIDATE = ("dtype", "strict", "off")


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

    validate: str = "strict"
    """How each lowered call is proved equal to eager autocast while it compiles. "strict": the ops
    below autograd and their dtypes; "dtype": the dtypes of results; "off": not at all - the
    policy table is believed, which is wrong wherever a composite hides a policy op."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor config patches, such as {"max_autotune": True}. `mode=` of `torch.compile` works as
    in stock."""


def parse_options(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Check what the user gave `torch.compile` and return it as `Options`.

    Raises:
        OptionValueError: an unknown option or value, with the nearest valid name.
        OptionTypeError: a value of the wrong type.
    """
    given = dict(options or {})
    names = [f.name for f in fields(Options)]
    for name in given:
        if name in _PLANNED:
            raise OptionValueError(
                f"option {name!r} is not built yet; remove it (available: {', '.join(names)})"
            )
        if name not in names:
            raise OptionValueError(f"unknown option {name!r}; expected {_nearest(name, names)}")
    given["inner"] = _check_inner(given.get("inner", Options.inner))
    given["autocast"] = _check_autocast(given.get("autocast"))
    given["validate"] = _check_validate(given.get("validate", Options.validate))
    given["inductor"] = _check_inductor(given.get("inductor", {}), mode, given["inner"])
    return Options(**given)


def _check_inner(inner: Any) -> str | Callable[..., Any]:
    if callable(inner):
        return inner
    if not isinstance(inner, str):
        raise OptionTypeError(
            f"option 'inner': expected the name of a backend or a callable; got {inner!r}"
        )
    names = backend_names()
    if inner == "smart_autocast":
        raise OptionValueError("option 'inner': expected another backend than 'smart_autocast'")
    if inner not in names:
        raise OptionValueError(
            f"option 'inner': no backend is called {inner!r}; expected {_nearest(inner, names)}"
        )
    return inner


def _check_autocast(given: Any) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ()
    entries = [given] if isinstance(given, Mapping) else given
    if not isinstance(entries, (list, tuple)):
        raise OptionTypeError(
            "option 'autocast': expected None, a dict of torch.autocast arguments or a list of "
            f"such dicts; got {given!r}"
        )
    for arguments in entries:
        try:
            check_autocast_arguments("option 'autocast'", arguments)
        except TypeError as error:
            raise OptionTypeError(str(error)) from None
        except ValueError as error:
            raise OptionValueError(str(error)) from None
    return tuple(entries)


def _check_validate(given: Any) -> str:
    if not isinstance(given, str):
        raise OptionTypeError(f"option 'validate': expected a string; got {given!r}")
    if given not in _VALIDATE:
        raise OptionValueError(
            f"option 'validate': unknown value {given!r}; expected {_nearest(given, _VALIDATE)}"
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
    patches = {name.replace("-", "_"): value for name, value in given.items()}
    for name in patches:
        if name not in known:
            raise OptionValueError(
                f"option 'inductor': unknown Inductor config {name!r}; "
                f"expected {_nearest(name, known)}"
            )
    if not mode:
        return patches
    modes = inductor_mode_options()
    if mode not in modes:
        raise OptionValueError(f"unknown mode {mode!r}; expected {_nearest(mode, modes)}")
    return {**modes[mode], **patches}


def _nearest(name: str, valid: Any) -> str:
    """The valid names most like `name`, or all of them where they are few."""
    close = difflib.get_close_matches(name, list(valid), n=3, cutoff=0.5)
    if close:
        return " or ".join(map(repr, close))
    return "one of " + ", ".join(sorted(map(str, valid))[:20])
