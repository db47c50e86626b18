"""The weight plan with Inductor, and across processes."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import COMPILING, forked, printed
from tests.support import assert_same_bits

from .support import Plain, bf16, casts_made, data, make, ours

pytestmark = pytest.mark.slow


def training(**arguments: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    torch._dynamo.reset()
    model = make(Plain)
    compiled = torch.compile(model, **arguments)
    with bf16():
        loss = sum(compiled(row).float().square().mean() for row in data(3, 3, 8))
    loss.backward()  # type: ignore[union-attr]
    return loss.detach(), [p.grad for p in model.parameters()]  # type: ignore[union-attr]


def test_training() -> None:
    """Inductor's own arithmetic differs from eager's in the last bits, so it is compared with the
    plan against itself without: with one call, where there is nothing to add up, equal."""
    loss, gradients = training(**ours(inner="inductor"))
    eager_loss, eager = training(backend="eager")
    torch.testing.assert_close(loss, eager_loss, rtol=2**-7, atol=2**-8)
    for mine, theirs in zip(gradients, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-8)
    assert casts_made(lambda: training(**ours(inner="inductor"))) == 4


@pytest.mark.parametrize("dynamic", [False, True])
def test_inference_with_the_second_graph_compiled_late(dynamic: bool) -> None:
    model = make(Plain)
    compiled = torch.compile(model, dynamic=dynamic, **ours(inner="inductor"))
    plain = torch.compile(model, dynamic=dynamic, **ours(inner="inductor", weight_cache="off"))
    with torch.no_grad():
        for n in (3, 5) if dynamic else (3,):
            x = data(n, 8)
            with bf16():
                expected = plain(x)
                results = [compiled(x) for _ in range(3)]
            assert_same_bits(results, [expected] * 3)
    with torch.no_grad(), bf16():
        assert casts_made(lambda: [compiled(data(3, 8)) for _ in range(2)]) == 4


PROCESS = """
    import torch
    from torch._dynamo.utils import counters

    from tests.weights.support import Plain, bf16, data, make, ours

    model = make(Plain)
    compiled = torch.compile(model, **ours(inner="inductor"))
    with bf16():
        loss = sum(compiled(row).float().square().mean() for row in data(3, 3, 8))
    loss.backward()
    with bf16(), torch.no_grad():
        outputs = [compiled(data(3, 8)) for _ in range(3)]
    torch.save([loss.detach(), [p.grad for p in model.parameters()], outputs], FILE)
    print(counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_two_processes_over_one_cache(tmp_path: Path) -> None:
    found, hits = [], []
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with forked(COMPILING) as run:
        for file in (tmp_path / "cold", tmp_path / "warm"):
            program = f"FILE = {str(file)!r}\n{textwrap.dedent(PROCESS)}"
            hits.append(int(printed(run(program, env=environment))))
            found.append(torch.load(file))
    assert hits == [0, 3]  # training, inference, inference with the casts outside
    assert_same_bits(found[1], found[0])
