"""Every test starts with an empty weight cache and no compiled code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autocast_backend import clear_weight_cache


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    clear_weight_cache()
    yield
    clear_weight_cache()
