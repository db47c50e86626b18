"""What Inductor's CUDA graphs ask of their inputs, without a GPU.

Nothing is recorded here. Graphs are compiled by AOTAutograd, with the inputs that it finds to be
static, and called by the rules of `torch._inductor.cudagraph_trees`, read in torch 2.13:

- a function's first call is a warm-up, its second one records;
- a recording serves calls whose static inputs are at the addresses that they had; for others the
  function is recorded again, without a limit;
- other inputs are copied, to where they were;
- to a backward, all that the forward has saved is static (`count_tangents`);
- results of recorded functions are always where they were, which is taken for granted here;
- an output in the memory of a static input is kept by the recording, and each replay returns it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, fx


class Recording:
    """One recording of a function, with the attributes of a `CUDAGraphNode`."""

    def __init__(self, addresses: list[int], outputs: Sequence[Any], storages: set[int]) -> None:
        self.addresses = addresses
        self.children: dict[int, list[Recording]] = {}
        self.static_output_tensors = [
            o if isinstance(o, Tensor) and o.untyped_storage().data_ptr() in storages else None
            for o in outputs
        ]


class Recorder:
    """An inner compiler whose functions are called as if they were CUDA graphs.

    Attributes:
        recordings: how many there are, of all functions.
        copied: how many bytes of inputs were copied to where a recording reads them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import cudagraph_trees

        self.recordings = self.copied = 0
        self._roots: dict[int, list[Recording]] = {}
        self._results: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        container = SimpleNamespace(tree_manager=SimpleNamespace(roots=self._roots))
        monkeypatch.setattr(cudagraph_trees.local, "tree_manager_containers", {0: container})
        monkeypatch.setattr("autocast_backend.backend.lookup_backend", lambda name: self._backend)

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        compile_graph = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=self._forward,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compile_graph(module, inputs)

    def _forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import get_static_input_idxs

        return self._called_as_recorded(module, get_static_input_idxs(0))

    def _backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.utils import count_tangents

        return self._called_as_recorded(module, range(count_tangents(module)))

    def _called_as_recorded(self, module: fx.GraphModule, static: Sequence[int]) -> Any:
        module.recompile()
        roots = self._roots.setdefault(len(self._roots), [])
        warm = False

        def run(args: list[Any]) -> Sequence[Any]:
            nonlocal warm
            inputs = list(args)
            args.clear()
            outputs = list(module(*inputs))
            given = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
            given = {i: x for i, x in given.items() if not self._is_result(x)}
            fixed = [x for i, x in given.items() if i in static]
            storages = {tensor.untyped_storage().data_ptr() for tensor in fixed}
            for x in outputs:
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in storages:
                    self._results[x.untyped_storage()._cdata] = x.untyped_storage()
            if not warm:
                warm = True
                return outputs
            self.copied += sum(x.nbytes for i, x in given.items() if i not in static)
            addresses = [tensor.data_ptr() for tensor in fixed]
            for recording in roots:
                if recording.addresses == addresses:
                    kept = recording.static_output_tensors
                    return [o if k is None else k for o, k in zip(outputs, kept, strict=True)]
            self.recordings += 1
            roots.append(Recording(addresses, outputs, storages))
            return outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _is_result(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._results
