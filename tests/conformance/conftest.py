from typing import Any

import pytest
import torch


@pytest.fixture
def region(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The arguments of `torch.autocast` around what PyTorch lists."""
    dtype = getattr(torch, pytestconfig.getoption("--region-dtype"))
    return {"device_type": "cpu", "dtype": dtype}


@pytest.fixture
def autocast_without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.autocast("cuda")`, which brackets enter, works on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
