"""Every test starts with an empty weight cache and no compiled code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autocast_backend import clear_weight_cache
from autocast_backend.weights import graph_weights


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # On the CPU the memory of small casts is not kept, and the weights of tests are small.
    monkeypatch.setattr(graph_weights, "KEPT_BYTES", 0)
    torch._dynamo.reset()
    clear_weight_cache()
    yield
    clear_weight_cache()
