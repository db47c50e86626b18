"""The checks of dtypes that `torch.export` writes into its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..graphs import nodes_of

_CHECK = torch.ops.aten._assert_tensor_metadata.default
_DTYPE = 3  # positional arguments: tensor, size, stride, dtype


def floating_point_checks(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The checks that a tensor has one certain floating-point dtype, bodies included."""
    for node in list(nodes_of(graph_module)):
        if node.target is _CHECK:
            given = _dtype_of(node)
            if isinstance(given, torch.dtype) and given.is_floating_point:
                yield node


def without_dtype(check: fx.Node) -> torch.dtype:
    """Let a check ask for sizes, device and layout alone. Returns the dtype that it asked for."""
    dtype: torch.dtype = _dtype_of(check)
    check.args = check.args[:_DTYPE]
    check.kwargs = {k: v for k, v in check.kwargs.items() if k != "dtype"}
    return dtype


def _dtype_of(check: fx.Node) -> Any:
    return check.args[_DTYPE] if len(check.args) > _DTYPE else check.kwargs.get("dtype")


def with_dtype(check: fx.Node) -> None:
    """Let a check ask for the dtype that its tensor has in `meta["val"]`."""
    (tensor,) = check.all_input_nodes[:1]
    check.kwargs = {"dtype": tensor.meta["val"].dtype, **check.kwargs}
