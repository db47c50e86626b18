"""Calls of which AOTAutograd's trace would give another dtype than eager autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autocast_backend.backend import NotCompiledError
from tests.support import BF16


class Tagger(nn.Module):
    """An LSTM over embeddings: its input is float32, and requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.states = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.states(self.words(x))[0]


def trained(call: Any, model: nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad()
    with torch.autocast(**BF16):
        y = call(x)
    y.float().sin().sum().backward()
    return [y, *(p.grad for p in model.parameters())]


@contextlib.contextmanager
def skipped_without_onednn(dtype: str) -> Iterator[None]:
    """Eager mode raises where oneDNN has no LSTM for the processor."""
    try:
        yield
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"oneDNN has no LSTM in {dtype} for this processor")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Tagger()


@torch._dynamo.config.patch(allow_rnn=True)
def test_an_lstm_over_float32_with_gradients_runs_as_in_eager_mode(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.arange(8).view(2, 4)
    with skipped_without_onednn("bfloat16"):
        expected = trained(model, model, x)
    assert expected[0].dtype is torch.bfloat16
    compiled = torch.compile(model, backend="smart_autocast", options={"inner": "aot_eager"})
    with caplog.at_level("WARNING", logger="autocast_backend"):
        found = trained(compiled, model, x)
    assert found[0].dtype is torch.bfloat16
    assert all(map(torch.equal, found, expected))
    (warning,) = caplog.messages
    assert "not compiled" in warning
    assert "the call of lstm" in warning


@torch._dynamo.config.patch(allow_rnn=True)
@pytest.mark.parametrize("weight_cache", ["scope", "version", "off"])
def test_in_float16_it_is_not_given_its_weights_cast(weight_cache: str) -> None:
    """The trace of a call that is has another dtype, that of the call as it is has not."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = nn.LSTM(8, 8), torch.randn(2, 3, 8)
    options = {"inner": "aot_eager", "weight_cache": weight_cache}
    compiled = torch.compile(model, backend="smart_autocast", options=options)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        with skipped_without_onednn("float16"):
            expected, _ = model(x)
        for _ in range(2):
            found, _ = compiled(x)
            assert found.dtype is expected.dtype is torch.float16
            assert torch.equal(found, expected)


@torch._dynamo.config.patch(allow_rnn=True)
@pytest.mark.parametrize(
    "options", [{"autocast": BF16}, {"policies": {"op": {"aten::sin": "fp32"}}}], ids=["a", "p"]
)
def test_with_options_that_eager_mode_does_not_know_it_is_an_error(
    model: nn.Module, options: dict[str, Any]
) -> None:
    compiled = torch.compile(
        model, backend="smart_autocast", options={"inner": "aot_eager", **options}
    )
    with pytest.raises(NotCompiledError, match=r"lstm.*allow_rnn"), torch.autocast(**BF16):
        compiled(torch.arange(8).view(2, 4))
