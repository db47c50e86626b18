import pytest
import torch

from autocast_backend.validation import verdicts


@pytest.fixture(autouse=True)
def nothing_proved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts of other processes are not believed, nor is one file a call written for them."""
    monkeypatch.setattr(verdicts, "compile_cache_dir", lambda: None)


@pytest.fixture
def dtypes(pytestconfig: pytest.Config) -> list[torch.dtype]:
    """Of the regions around what PyTorch lists: Dynamo traces the first one."""
    first = getattr(torch, pytestconfig.getoption("--region-dtype"))
    return sorted((torch.bfloat16, torch.float16), key=lambda dtype: dtype is not first)


@pytest.fixture
def autocast_without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.autocast("cuda")`, which brackets enter, works on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
