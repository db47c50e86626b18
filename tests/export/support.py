"""Functions to export and lower, and eager autocast on fake CUDA tensors."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tests.support import tensors

Region = Callable[..., contextlib.AbstractContextManager[Any]]


class Function(nn.Module):
    """A function `(region, *inputs)` as a module; `region` opens autocast regions."""

    def __init__(self, function: Callable[..., Any], region: Region) -> None:
        super().__init__()
        self.function, self.region = function, region

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.region, *inputs)


def cpu_region(dtype: torch.dtype) -> Region:
    """`torch.autocast` of the CPU, with another default dtype."""
    return lambda enabled=True, dtype=dtype: torch.autocast("cpu", dtype=dtype, enabled=enabled)


def export(
    function: Callable[..., Any], *inputs: Any, dtype: torch.dtype = torch.bfloat16
) -> ExportedProgram:
    return torch.export.export(Function(function, cpu_region(dtype)), inputs)


def save_and_load(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def dtypes(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors(value)]


def cuda_dtypes(
    function: Callable[..., Any], *inputs: Any, dtype: torch.dtype = torch.float16
) -> list[torch.dtype]:
    """The result dtypes of real CUDA autocast, on fake CUDA tensors; the machine needs no GPU."""

    @contextlib.contextmanager
    def region(enabled: bool = True, dtype: torch.dtype = dtype) -> Iterator[None]:
        # `torch.autocast("cuda")` switches itself off without a GPU; the flags do not.
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.clear_autocast_cache()

    with FakeTensorMode(), torch.no_grad():
        fake = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"), inputs
        )
        return dtypes(function(region, *fake))
