"""Which autocast state a compiled backward is computed for: run it and see.

A model with a float32 island is compiled afresh for each setting, runs forward under one autocast
state and backward under another. Its gradients are then looked up among those of eager mode: a cell
names the state of the backward whose bits they are.

    python examples/backward_states.py
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

STATES: dict[str, dict[str, Any]] = {
    "off": {"device_type": "cpu", "enabled": False},
    "bf16": {"device_type": "cpu", "dtype": torch.bfloat16},
    "fp16": {"device_type": "cpu", "dtype": torch.float16},
}
STOCK: dict[str, Any] = {  # torch._functorch.config.backward_pass_autocast
    "stock": "same_as_forward",
    'stock, "off"': "off",
    "stock, [fp16]": [STATES["fp16"]],
}
OURS: dict[str, Any] = {  # options={"backward_pass_autocast": ...}
    '"auto"': "auto",
    '"same_as_forward"': "same_as_forward",
    '"off"': "off",
    "fp16": STATES["fp16"],
}


class Island(nn.Module):
    """Two linear layers with a third between them that stays in float32 whatever is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.island, self.after = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        with torch.autocast("cpu", enabled=False):
            x = self.island(x.float()).relu()
        return self.after(x)


def gradients(forward: str, backward: str, **compile_arguments: Any) -> list[Tensor]:
    """The gradients of a step, compiled afresh."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Island()
    compiled = torch.compile(model, **compile_arguments)
    with torch.autocast(**STATES[forward]):
        out = compiled(torch.randn(8, 16))
    with torch.autocast(**STATES[backward]):
        return list(torch.autograd.grad(out.float().square().sum(), list(model.parameters())))


def whose(found: list[Tensor], eager: Mapping[str, list[Tensor]]) -> str:
    """The state whose eager gradients these are, bit for bit."""
    for state, expected in eager.items():
        if all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            return state
    return "neither"


def rows() -> Iterator[dict[str, str]]:
    """One row for each pair of states, by column; "!" where our backend warned."""
    for forward in STATES:
        eager = {state: gradients(forward, state, backend="eager") for state in STATES}
        for backward in STATES:
            row = {"forward": forward, "backward": backward}
            row["eager"] = whose(eager[backward], eager)
            for (name, setting), ours in itertools.chain(
                zip(STOCK.items(), itertools.repeat(False)),
                zip(OURS.items(), itertools.repeat(True)),
            ):
                row[name] = cell(forward, backward, eager, setting, ours)
            yield row


def cell(
    forward: str, backward: str, eager: Mapping[str, list[Tensor]], setting: Any, ours: bool
) -> str:
    """What one setting computes."""
    arguments: dict[str, Any] = {"backend": "aot_eager"}
    patch: Any = contextlib.nullcontext()
    if ours:
        options = {"inner": "aot_eager", "backward_pass_autocast": setting}
        arguments = {"backend": "smart_autocast", "options": options}
    else:
        patch = functorch_config.patch(backward_pass_autocast=setting)
    with warnings.catch_warnings(record=True) as caught, patch:
        warnings.simplefilter("always")
        found = whose(gradients(forward, backward, **arguments), eager)
    warned = any(w.category.__name__ == "BackwardAutocastWarning" for w in caught)
    return found + (" !" if warned else "")


def main() -> None:
    """Print the table as markdown."""
    for i, row in enumerate(rows()):
        if i == 0:
            print("| " + " | ".join(row) + " |")
            print("| " + " | ".join("---" for _ in row) + " |")
        print("| " + " | ".join(row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
