"""How compiled code reaches a module: `L['self'].blocks.0`, as Dynamo writes it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import Any

Name = tuple[str, ...]
"""A module's name, in parts: ("blocks", "0", "router"). Empty for the outermost module."""

_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_INDEX = rf"""(?:{_STRING}|-?\d+|\([^\]]*\))"""
_VARIABLE = re.compile(rf"([A-Z])\[({_STRING})\]")
_STEP = re.compile(
    rf"\[({_INDEX})\]"  # of a list or a dict
    rf"|, ({_STRING})\)"  # of `getattr(module, 'a b')`
    rf"|\.?(.+?)(?=\.|\[{_INDEX}\]|, {_STRING}\)|$)",
    re.DOTALL,
)
_DICTS = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class Path:
    """A path, taken apart.

    Attributes:
        scope: "L" for a local variable, "G" for a global one; empty where there is none.
        variable: its name.
        steps: what leads on from it: an attribute, or with True the index of an item.
    """

    scope: str
    variable: str
    steps: tuple[tuple[Any, bool], ...]

    @property
    def name(self) -> Name:
        """The name of a module; the variable is no part of it, nor one of a function around."""
        cells = [i for i, (step, _) in enumerate(self.steps) if step == "cell_contents"]
        steps = self.steps[cells[-1] + 1 :] if cells else self.steps
        return tuple(str(step) for step, item in steps if item or step not in _DICTS)

    @property
    def parts(self) -> tuple[str, str, tuple[tuple[Any, bool], ...]]:
        """For `guard_same`."""
        return self.scope, self.variable, self.steps

    def to(self, below: Name) -> Path:
        """The path of a module inside of this one."""
        return replace(self, steps=(*self.steps, *((part, False) for part in below)))


def parse_path(path: str) -> Path:
    """`L['self'].blocks.0` -> local variable "self", steps "blocks" and "0"."""
    path = re.sub(r"^(getattr\()+", "", path)
    match = _VARIABLE.match(path)
    steps: list[tuple[Any, bool]] = []
    for item, attribute, plain in _STEP.findall(path[match.end() :] if match else path):
        if item:
            steps.append((ast.literal_eval(item), True))
        elif attribute:
            steps.append((ast.literal_eval(attribute), False))
        else:
            # Of `_modules['a\\b']` Dynamo leaves what is between the quotes, backslashes doubled.
            steps.append((ast.literal_eval(f'"{plain}"') if "\\" in plain else plain, False))
    if match is None:
        return Path("", "", tuple(steps))
    return Path(match[1], ast.literal_eval(match[2]), tuple(steps))


def parse_name(path: str) -> Name:
    """`L['self'].blocks.0` -> ("blocks", "0")."""
    return parse_path(path).name
