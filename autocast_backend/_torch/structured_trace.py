"""PyTorch's structured trace, which `TORCH_TRACE=folder` has it write and tlparse shows."""

from __future__ import annotations

from collections.abc import Callable

from torch._logging._internal import trace_structured


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Leave a text in the trace, with the compilation of this moment. It is made where there is a
    trace alone."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
    )
