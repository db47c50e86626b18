"""Values of a program under another autocast state, or on another device type, than it was exported
with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import recipes
from .._torch.autocast import enter_autocast
from .._torch.dynamo import is_set_grad_enabled
from .._torch.fake_tensors import fake_mode_of, observing
from ..bodies import Bodies
from ..graphs import get_attribute
from ..regions import Placement, find_regions, is_region_node, nodes_of
from ..state import AutocastState

_ASSERT = torch.ops.aten._assert_tensor_metadata.default


def forget_weight_cache_flag(graph_module: fx.GraphModule) -> None:
    """Let regions inherit whether weight casts are cached.

    Export traces with the cache off, and writes that down as the region's `cache_enabled`, whatever
    the model asked for. Eager autocast, which the lowered program is to equal, caches.
    """
    for node in nodes_of(graph_module):
        if node.target is enter_autocast and node.args[3:] == (False,):
            node.args = (*node.args[:3], None)


class Retargeting:
    """Gives a flat graph, with enter and exit nodes, the values that it has elsewhere.

    Args:
        device_type: where tensors of the CPU are to be, and regions of the CPU to apply; None:
            where they are.
    """

    def __init__(self, graph_module: fx.GraphModule, device_type: str | None) -> None:
        self._module = graph_module
        self._device_type = device_type
        values = [n.meta.get("val") for n in nodes_of(graph_module)]
        self._fake_mode = fake_mode_of(values)
        self._moved: dict[fx.Node, None] = {}

    def apply(self, ambient: AutocastState) -> None:
        """Set `meta["val"]` of every node to its value under `ambient`, on the device type."""
        if self._fake_mode is None:
            return
        if self._device_type is not None:
            for node in nodes_of(self._module):
                self._move(node, "cpu", self._device_type)
        inputs = [n.meta["val"] for n in self._module.graph.find_nodes(op="placeholder")]
        with observing(self._fake_mode):
            self._run(
                self._module,
                [self._tensors(value, self._there) for value in inputs],
                Placement(ambient, None),
                torch.is_grad_enabled(),
            )

    def undo(self) -> None:
        """Put the program back on the CPU; what it computes stays."""
        if self._device_type is None or self._fake_mode is None:
            return
        for node in self._moved:
            self._move(node, self._device_type, "cpu")
        with self._fake_mode:
            for node in nodes_of(self._module):
                if "val" in node.meta:
                    node.meta["val"] = self._tensors(node.meta["val"], self._back)

    def _move(self, node: fx.Node, source: str, target: str) -> None:
        """Rewrite the devices among the arguments of a call, and the device type of a region."""
        moved = False

        def move(argument: Any) -> Any:
            nonlocal moved
            if isinstance(argument, torch.device) and argument.type == source:
                moved = True
                return torch.device(target if target == "cpu" else f"{target}:0")
            return argument

        arguments = pytree.tree_map(move, (node.args, dict(node.kwargs)))
        if node.target is enter_autocast and node.args[0] == source:
            moved, arguments = True, ((target, *node.args[1:]), {})
        if moved:
            node.args, node.kwargs = arguments
            self._moved[node] = None

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor on the device type. It requires no grad: on a machine without that device,
        autograd ends the process (2.13)."""
        if self._device_type is None or tensor.device.type != "cpu":
            return tensor
        return _like(tensor, self._device_type)

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        return _like(tensor, "cpu") if tensor.device.type == self._device_type else tensor

    @staticmethod
    def _tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return pytree.tree_map_only(torch.Tensor, change, value)

    def _run(
        self, module: fx.GraphModule, inputs: list[Any], outside: Placement, grad: bool
    ) -> Any:
        placements = find_regions(module.graph, outside)
        bodies = Bodies(module)
        values: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        for node in module.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "get_attr":
                values[node] = get_attribute(module, str(node.target))
                continue
            elif is_region_node(node):
                values[node] = None
                continue
            elif node.target is _ASSERT:
                if kwargs.get("dtype") is not None:  # the dtype it has now
                    node.kwargs = {**node.kwargs, "dtype": args[0].dtype}
                values[node] = None
            elif (body := bodies.of(node)) is not None:
                records = body.call.grad_mode(node, grad)
                operands = list(args[body.call.first_operand :])
                values[node] = body.call.result(
                    self._run(body.module, operands, placements[node], records)
                )
            else:
                if is_set_grad_enabled(node.target):
                    grad = bool(node.args[0])
                with placements[node].state.applied(), torch.set_grad_enabled(grad):
                    values[node] = recipes.run(node.target, args, kwargs)
            values[node] = self._as_traced(node, values[node])
            if "val" in node.meta:
                node.meta["val"] = values[node]
        return None

    def _as_traced(self, node: fx.Node, value: Any) -> Any:
        """`value` in the symbols of the trace: a call whose sizes hang on data makes new ones."""
        traced = node.meta.get("val")
        if isinstance(traced, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return traced
        if not node.meta.get("unbacked_bindings"):
            return value

        def restore(new: Any, old: Any) -> Any:
            if not isinstance(new, torch.Tensor):
                return old
            return _like(old, new.device.type, new.dtype)

        return pytree.tree_map(restore, value, traced)


def _like(tensor: torch.Tensor, device_type: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=device_type
    )
