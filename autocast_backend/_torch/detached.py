"""Detached outputs of AOTAutograd's graphs, beside what they are detached from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .patches import replaced


@contextlib.contextmanager
def detached_outputs_right() -> Iterator[None]:
    """Have `return t, t.detach()`, where `t` is a view, return the same numbers twice. Outside of
    the graph AOTAutograd makes the second of the first, by the calls that have made `t` of what it
    is a view of:

        t = (x @ w).t()
        return t, t.detach()         returned is t.t().detach(); of t = (x @ w)[1:], an error
    """
    from torch._functorch._aot_autograd import collect_metadata_analysis as analysis
    from torch._functorch._aot_autograd.functional_utils import MetadataKey
    from torch._functorch._aot_autograd.schemas import OutputType

    original = vars(analysis)["OutputAliasInfo"]
    of_outputs = OutputType.alias_of_intermediate_base_is_user_output

    def without_calls(*args: Any, **kwargs: Any) -> Any:
        info = original(*args, **kwargs)
        calls = info.view_meta_sequence
        if info.output_type is of_outputs and not info.requires_grad and calls is not None:
            calls.sequence = []  # sizes and strides are those of the output that it is made of
        return info

    def make(tensor: torch.Tensor) -> Any:
        return MetadataKey.make(tensor), tensor.dtype  # t.detach().view(torch.int32) is another

    with (
        replaced(analysis, "OutputAliasInfo", without_calls),
        replaced(analysis, "MetadataKey", SimpleNamespace(make=make)),
    ):
        yield
