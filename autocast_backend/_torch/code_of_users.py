"""What the keys of caches on disk do not know of a graph: mostly, code of users."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._library.utils import get_layout_constraint_tag
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .inside import custom_ops_of
from .kernels import has_kernels_of_users
from .patches import replaced


def is_traced_anew(nodes: Iterable[fx.Node]) -> bool:
    """Whether the key of AOTAutograd's cache does not know all that the trace of a graph hangs on:

    - Python numbers that Dynamo takes for changing. Calls that cannot read them from a tensor have
      them as constants; neither does the key say which ones (PyTorch #194976, #197889), nor the
      entry, for Dynamo to guard on them.
    - Code that is traced and does not come with PyTorch: of custom ops, such as what computes their
      gradients; of kernels that somebody gives to ops of PyTorch's; of tensor subclasses; of
      functions that Dynamo has left whole, which AOTAutograd overlooks inside of checkpoints.
    """
    return has_kernels_of_users() or any(
        custom_ops_of(node)
        or is_function_of_users(node.target)
        or any(map(_is_changing, pytree.tree_leaves(node.meta.get("example_value"))))
        for node in nodes
    )


def is_function_of_users(target: Any) -> bool:
    """Whether a node's target is a Python function that comes neither with PyTorch nor with this
    package, whatever its name is: `functools.wraps` may have taken that from one of PyTorch's."""
    if not isinstance(target, types.FunctionType):
        return isinstance(target, torch.jit.ScriptFunction)
    if target.__module__ == "einops.einops":  # AOTAutograd has entries for those as well
        return False
    return not any(map(Path(target.__code__.co_filename).is_relative_to, _NOT_OF_USERS))


_NOT_OF_USERS = (Path(torch.__file__).parent, Path(__file__).parents[1])


@contextlib.contextmanager
def inductor_told_of_custom_ops() -> Iterator[None]:
    """Have Inductor's key of a graph say what its custom ops return and in which layout they are
    given tensors, which its code hangs on: it has nothing but the names of the ops. It is asked for
    of the graph that AOTAutograd has traced, where code of users may call others than in Dynamo's.
    """
    from torch._inductor import codecache

    config: Any = torch.compiler.config
    original = codecache.compiled_fx_graph_hash

    def compiled_fx_graph_hash(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        tag = " ".join([config.cache_key_tag, *_custom_ops(graph)])
        with config.patch(cache_key_tag=tag):
            return original(graph, *args, **kwargs)

    with replaced(codecache, "compiled_fx_graph_hash", compiled_fx_graph_hash):
        yield


def _custom_ops(graph: fx.GraphModule) -> Iterator[str]:
    bodies = (body for body in graph.modules() if isinstance(body, fx.GraphModule))
    for node in (node for body in bodies for node in body.graph.nodes):
        ops = custom_ops_of(node)
        yield from (str(get_layout_constraint_tag(op)) for op in ops)
        for t in pytree.tree_leaves(node.meta.get("val")) if ops else ():
            if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                yield f"{t.dtype} {t.device} {tuple(t.shape)} {t.stride()}"


def _is_changing(value: Any) -> bool:
    if isinstance(value, torch.SymFloat):
        return bool(value.node.has_hint())  # others are of tensors
    return isinstance(value, torch.Tensor) and _is_written_elsewhere(value)


def _is_written_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that does not come with PyTorch, or holds one that is."""
    if not is_traceable_wrapper_subclass(tensor):
        return False
    if type(tensor).__module__.partition(".")[0] != "torch":
        return True
    names, _ = tensor.__tensor_flatten__()
    return any(_is_written_elsewhere(getattr(tensor, name)) for name in names)
