"""Random trainings: several compiled graphs share weights in nested autocast contexts, weights are
written to in every way, frozen, and read with and without gradients. Outputs and gradients have
eager's bits throughout.

    make test ARGS="tests/weights/test_random_trainings.py --programs 1000"

tries more of them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import BF16, FP16

from .support import bf16, ours

SIZE = 8
WEIGHTS = 3
IN_CI = 24

Step = tuple[Any, ...]
Graph = Callable[..., Tensor]


def linear(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).sin()


def matmul(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return (x @ w).relu()


def two_weights(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x @ w, (SIZE,)) @ v


def own_region(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    with bf16():
        return x @ w + x


def autograd_on(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    with torch.enable_grad():
        return (x @ w).cos()


GRAPHS = (linear, matmul, two_weights, autograd_on, own_region)
MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
CONTEXTS = {
    "bf16": BF16,
    "uncached": {**BF16, "cache_enabled": False},
    "off": {"device_type": "cpu", "enabled": False},
}


def random_training(seed: int) -> list[Step]:
    """Rounds of contexts with calls in them; a backward inside or outside; a change of weights."""
    pick = random.Random(seed)
    steps: list[Step] = []
    for _ in range(pick.randint(1, 3)):
        # A nested context of another dtype would get the outer one's casts from eager's cache.
        outermost = pick.choice(["bf16", "bf16", "fp16", "uncached"])
        inner = (
            [] if outermost == "fp16" else pick.choices([*CONTEXTS], k=pick.choice([0, 0, 1, 2]))
        )
        for context in (outermost, *inner):
            steps.append(("enter", context))
            for _ in range(pick.randint(1, 3)):
                mode = pick.choices([*MODES], weights=(4, 1, 1))[0]
                # Nested in fp16, the region of `own_region` is of another dtype; nested in "off",
                # its casts are its own (docs/weights.md).
                graphs = len(GRAPHS) - (outermost == "fp16" or context == "off")
                graph = pick.randrange(graphs)
                # With its casts inside, or with none, AOTAutograd refuses inference mode, with
                # stock, too.
                inside = {"uncached", "off"} & {outermost, *inner} or ("freeze",) in steps
                if GRAPHS[graph] is autograd_on and inside:
                    mode = "grad"
                steps.append(("call", graph, pick.sample(range(WEIGHTS), 2), mode))
                if pick.random() < 0.1:
                    steps.append(("clear",))
                if pick.random() < 0.1:
                    steps.append(("write", pick.choice([*WRITES])))
        exits: list[Step] = [("exit",)] * (1 + len(inner))
        exits.insert(pick.randrange(len(exits) + 1), ("backward",))
        steps += exits
        steps.append(("write", pick.choice([*WRITES])))
        if pick.random() < 0.3:
            steps.append(("freeze",))
    return steps


def _step(**arguments: Any) -> Callable[[list[nn.Parameter]], None]:
    return lambda weights: torch.optim.SGD(weights, lr=0.1, **arguments).step()


def _copied(weights: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for w in weights:
            w.copy_(w * 1.5)


def _multiplied(weights: list[nn.Parameter]) -> None:
    with torch.no_grad():
        torch._foreach_mul_(weights, 0.7)


def _given_other_data(weights: list[nn.Parameter]) -> None:
    for w in weights:
        w.data = w.data * 1.25


def _swapped(weights: list[nn.Parameter]) -> None:
    for w in weights:
        other = nn.Parameter(w.detach() * 0.9, requires_grad=w.requires_grad)
        other.grad = w.grad
        torch.utils.swap_tensors(w, other)


WRITES: dict[str, Callable[[list[nn.Parameter]], None]] = {
    "SGD": _step(foreach=False),
    "SGD, foreach": _step(foreach=True),
    "SGD, fused": _step(fused=True),
    "copy_": _copied,
    "mul_": _multiplied,
    "data =": _given_other_data,
    "swap_tensors": _swapped,
}


def play(
    steps: list[Step], graphs: Sequence[Graph], seed: int
) -> list[tuple[int, str, Tensor | None]]:
    """What a training computes: outputs, and the gradients after each backward."""
    generator = torch.Generator().manual_seed(seed)

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=generator))

    *weights, bias = parameters = [
        *(parameter(SIZE, SIZE) for _ in range(WEIGHTS)),
        parameter(SIZE),
    ]
    computed: list[tuple[int, str, Tensor | None]] = []
    outputs: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        contexts: list[contextlib.ExitStack] = []
        for number, (kind, *arguments) in enumerate(steps):
            if kind == "enter":
                context = {**CONTEXTS, "fp16": FP16}[arguments[0]]
                contexts.append(stack.enter_context(contextlib.ExitStack()))
                contexts[-1].enter_context(torch.autocast(**context))
            elif kind == "exit":
                contexts.pop().close()
            elif kind == "call":
                graph, (w, v), mode = arguments
                x = torch.randn(4, SIZE, generator=generator)
                with MODES[mode]():
                    output = graphs[graph](x, weights[w], weights[v], bias)
                computed.append((number, "output", output.detach().clone()))
                outputs += [output] if output.requires_grad else []
                del output  # `swap_tensors` wants its graph to be gone
            elif kind == "backward" and outputs:
                torch.stack([y.float().square().mean() for y in outputs]).sum().backward()
                outputs = []
                grads = [None if p.grad is None else p.grad.clone() for p in parameters]
                computed += [(number, f"grad of {i}", grad) for i, grad in enumerate(grads)]
            elif kind == "write":
                outputs = []  # their backward needs what is written to
                if graphs == GRAPHS:  # eager's cache does not see that weights change; ours does
                    torch.clear_autocast_cache()
                WRITES[arguments[0]](parameters)
            elif kind == "freeze":
                weights[0].requires_grad_(not weights[0].requires_grad)
            elif kind == "clear":
                torch.clear_autocast_cache()
    return computed


@pytest.mark.slow
@pytest.mark.parametrize("lifetime", ["scope", "version"])
@torch._dynamo.config.patch(recompile_limit=100)  # one for each autocast state and grad mode
def test_random_trainings(lifetime: str, request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    arguments = ours(weight_cache=lifetime)
    compiled = [torch.compile(g, dynamic=False, fullgraph=True, **arguments) for g in GRAPHS]
    for seed in range(request.config.getoption("--programs") or IN_CI):
        steps = random_training(seed)
        expected = play(steps, GRAPHS, seed)
        actual = play(steps, compiled, seed)
        for (number, what, found), (_, _, eagers) in zip(actual, expected, strict=True):
            same = found is eagers or (
                found is not None
                and eagers is not None
                and found.dtype is eagers.dtype
                and torch.equal(found, eagers)
            )
            assert same, f"seed {seed}: {what} at step {number} of {steps}"
