"""The modules around a graph: what module patterns of the option `policies` may name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx, nn

from .._torch.dynamo import compiled_frame, left_to_python
from .._torch.guards import guard_same
from ..graphs import nodes_of
from .overrides import Overrides, PolicyError, module_stack
from .paths import Name, Path, parse_name, parse_path


def bind(overrides: Overrides, graph_module: fx.GraphModule) -> Overrides:
    """The overrides, with the names of the modules around a graph; each pattern matches one.

    Known are the modules within reach of the function that Dynamo compiles - in its variables, and
    below what its nodes were reached through - so also those that are not called, or stand in
    another graph after a graph break. Where Dynamo is not at work, known are the modules that the
    nodes name. A function that reaches no module gives nothing to check: it is a part of something
    larger.

    Raises:
        PolicyError: a pattern matches no module, with near names; a module has another name here
            than in the model, so that nobody can tell which patterns match it; or one that is named
            is not compiled.
    """
    if not overrides.modules:
        return overrides
    entries = [entry for node in nodes_of(graph_module) for entry in module_stack(node)]
    frame = compiled_frame()
    roots = _within_reach(frame, [path for _, path in entries]) if frame else {}
    names: dict[str, set[Name]] = {}
    ways: dict[str, list[Path]] = {}
    weights: dict[Name, int] = {}
    callable: set[Name] = set()
    for path, root in roots.items():
        way = parse_path(path)
        for name, module in root.named_modules(remove_duplicate=False):
            below = tuple(filter(None, name.split(".")))
            names.setdefault(str(id(module)), set()).add(way.name + below)
            if type(module).forward is not nn.Module.forward:
                callable.add(way.name + below)
            ways.setdefault(str(id(module)), []).append(way.to(below))
            for weight, value in (*module._parameters.items(), *module._buffers.items()):
                weights[(*way.name, *below, weight)] = id(value)
            _check_compiled(overrides, way.name + below, module)
    for identity, path in dict.fromkeys(entries):
        names.setdefault(identity, set()).add(parse_name(path))
        _guard(parse_path(path), ways.get(identity, []))
    if names or not frame:
        every = (name for known in names.values() for name in known)
        overrides.check_modules(every, compiled_by_dynamo=frame is not None)
    owners: dict[int, list[Name]] = {}
    for weight, tensor in weights.items():
        owners.setdefault(tensor, []).append(weight[:-1])
    return replace(
        overrides,
        names={i: tuple(known) for i, known in names.items()},
        owners={weight: tuple(owners[tensor]) for weight, tensor in weights.items()},
        callable=frozenset(callable),
    )


def _within_reach(
    frame: tuple[dict[str, Any], dict[str, Any]], paths: list[str]
) -> dict[str, nn.Module]:
    """The modules in a function's local variables, and those that `paths` begin with, by path."""
    local, scope = frame
    variables = {f"L['{n}']": v for n, v in local.items() if isinstance(v, nn.Module)}
    found = dict(variables)
    for path in paths:  # outer modules come before those inside
        inside = any(_is_at_or_below(path, outer) for outer in found)
        module = None if inside else _resolve(path, local, scope)
        if isinstance(module, nn.Module):
            found[path] = module
    roots: dict[str, nn.Module] = {}
    for path, root in found.items():
        whole = next((p for p, m in found.items() if m is not root and root in m.modules()), None)
        if path not in variables or whole is None:
            roots[path] = root
        elif any(_is_at_or_below(used, path) for used in paths):
            raise PolicyError(
                f"option 'policies': after a graph break, a part of {whole} is reached as {path}. "
                "Other parts may run the same compiled code, so no pattern can tell them apart. "
                "Compile with fullgraph=True, or compile the parts with options of their own"
            )
    return roots


def _is_at_or_below(path: str, outer: str) -> bool:
    """Whether a path leads through another: `L['self'].head[0]` through `L['self'].head`, and
    `L['self'].head2` does not."""
    one, other = parse_path(path).parts, parse_path(outer).parts
    return one[:2] == other[:2] and one[2][: len(other[2])] == other[2]


def _guard(called: Path, ways: list[Path]) -> None:
    """Have Dynamo compile anew once a module that is called is not the one it was that has another
    name: `self.active = self.experts[1]`, after `self.experts[0]`. Dynamo asks for its class."""
    for way in ways:
        if called.scope and (way.variable, way.name) != (called.variable, called.name):
            guard_same(called.parts, way.parts)


def _check_compiled(overrides: Overrides, name: Name, module: nn.Module) -> None:
    """Refuse an override of a module, or of one inside it, whose calls Dynamo leaves to Python."""
    why = left_to_python(module)
    if why is None:
        return
    for inner, _ in module.named_modules(remove_duplicate=False):
        below = tuple(filter(None, inner.split(".")))
        if (override := overrides.of_module(name + below)) is not None:
            raise PolicyError(
                f"{override} names {'.'.join(name + below)!r}, whose calls Dynamo does not "
                f"compile, because {why}; they would run as in eager mode"
            )


def _resolve(path: str, local: dict[str, Any], scope: dict[str, Any]) -> Any:
    """What a path such as `L['trainer'].model` stands for; None where it cannot be followed."""
    parsed = parse_path(path)
    value: Any = {"L": local, "G": scope}.get(parsed.scope, {}).get(parsed.variable)
    for step, item in parsed.steps:
        try:
            value = value[step] if item else getattr(value, step)
        except (AttributeError, LookupError, TypeError):
            return None
    return value
