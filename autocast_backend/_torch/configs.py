"""The compilers' configuration and caches."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

import torch
from torch import fx

from .code_of_users import inductor_told_of_custom_ops, is_traced_anew
from .joint_graphs import joint_passes
from .memory import shared_memory


def backward_pass_autocast_config() -> Any:
    """`torch._functorch.config.backward_pass_autocast`, documented but private by its module; None
    where it has its default value."""
    from torch._functorch import config

    value = config.backward_pass_autocast
    return None if value == "same_as_forward" else value


def backward_traced_off(
    *ours: Callable[[fx.GraphModule], None],
) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd traces the backward under what is on, which is nothing, and its cache key has the
    default in it, whatever the user has set. The passes see the joint graph, after the user's own
    pass; they must not depend on more than the graph, because the cache key has no pass in it. So
    there is no entry for a graph that a user's pass changes."""
    from torch._functorch import config

    return config.patch(
        backward_pass_autocast="same_as_forward",
        joint_custom_pass=joint_passes(*ours),
        enable_autograd_cache=config.enable_autograd_cache and config.joint_custom_pass is None,
    )


@contextlib.contextmanager
def own_cache_entries(nodes: Iterable[fx.Node], inputs: Iterable[Any] = ()) -> Iterator[None]:
    """Keep what is compiled meanwhile apart from what stock, or another version of this package,
    has in the caches on disk for an equal graph. Their keys know neither of our pass over joint
    graphs, nor of kernels that are opened (kernels.py), nor of PyTorch's switches, such as those of
    `sdpa_kernel`, nor of the autocast state: stock compiles a backward under the one it meets, and
    a pattern of Inductor's, traced again under it, may end in code that mixes dtypes. Nor do they
    know which inputs share memory: AOTAutograd makes one input of those, if one is written to.

    Args:
        nodes: the graph that is compiled. What it hangs on besides is in code_of_users.py.
        inputs: its inputs, where it may write to them.
    """
    from torch._functorch import config as functorch

    nodes = list(nodes)
    config: Any = torch.compiler.config
    others = [*map(str, switches()), *shared_memory(inputs)]
    tag = " ".join([config.cache_key_tag, "smart_autocast", made_with(), *others])
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(cache_key_tag=tag))
        stack.enter_context(inductor_told_of_custom_ops())
        if is_traced_anew(nodes):
            stack.enter_context(functorch.patch(enable_autograd_cache=False))
        yield


@functools.cache
def made_with() -> str:
    """What entries of ours in the caches on disk depend on besides their graph: torch, the source
    of this package, and the processor, which has a say in what some kernels call (kernels.py)."""
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(path.read_bytes())
    can = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    processor = f"{torch.backends.cpu.get_cpu_capability()} {' '.join(can)}"
    return f"{torch.__version__} {torch.version.git_version} {source.hexdigest()} {processor}"


def _constant_floats() -> set[str]:
    """Python numbers that Dynamo has made constants of a graph with dynamic sizes. It forgets them
    with the next function that it analyses anew, and AOTAutograd asks for them each time."""
    from torch._dynamo.symbolic_convert import TensorifyState

    return TensorifyState.force_specializations.copy()


def _set_constant_floats(names: set[str]) -> None:
    from torch._dynamo.symbolic_convert import TensorifyState

    TensorifyState.force_specializations = names.copy()


_einsum = torch.backends.opt_einsum

# What decides how PyTorch's own code computes, and how to set it.
_OF_ATTENTION: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
]
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    *_OF_ATTENTION,
    (lambda: _einsum.enabled, functools.partial(setattr, _einsum, "enabled")),
    (lambda: _einsum.strategy, functools.partial(setattr, _einsum, "strategy")),
]
_OF_THE_GRAPH = [*_SWITCHES, (_constant_floats, _set_constant_floats)]


def switches() -> tuple[Any, ...]:
    """What decides, at this moment, how PyTorch's own code computes a graph or a call."""
    on = [get() for get, _ in _SWITCHES]
    # Left behind where Dynamo fails inside of a transform (2.13), until the process ends: composite
    # ops then come whole to those who look below autograd.
    on.append(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther))
    return (torch.get_default_device(), _einsum.is_available(), *on)


def kernels_of_attention() -> list[Any]:
    """Which kernels attention may choose, in which order, as `sdpa_kernel` sets it, and how these
    may add up."""
    return [get() for get, _ in _OF_ATTENTION]


def compile_configs() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The compilers' configuration of this moment, and what else decides about a graph, to be
    entered again later: patches and `sdpa_kernel` are local to a `with` block, patches to a thread
    as well, and a backward may run outside of both. What is compiled then has the number of the
    compilation of this moment, in the structured trace, say."""
    from torch._functorch import config as functorch
    from torch._guards import CompileContext, compile_context

    compiling = CompileContext.try_get()

    modules = [functorch, sys.modules.get("torch._inductor.config")]
    before = [(module, module.get_config_copy()) for module in modules if module is not None]
    values = [get() for get, _ in _OF_THE_GRAPH]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for (get, put), value in zip(_OF_THE_GRAPH, values, strict=True):
                if (current := get()) != value:
                    stack.callback(put, current)
                    put(value)
            if compiling is not None:
                stack.enter_context(compile_context(compiling))
            for module, config in before:
                now = module.get_config_copy()
                changed = {k: v for k, v in config.items() if k in now and now[k] != v}
                stack.enter_context(module.patch(changed))
            yield

    return again


def freezing_is_on(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor, under these config patches, makes a graph's weights constants."""
    return bool(_inductor_config("freezing", patches))


def scales_convolutions(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor, under these config patches, multiplies the weights of convolutions by what
    a batch norm in evaluation would multiply their results by."""
    return bool(_inductor_config("efficient_conv_bn_eval_fx_passes", patches))


def cuda_graphs_are_on(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor, under these config patches, records CUDA graphs, which read their static
    inputs at the addresses they had."""
    return bool(_inductor_config("triton.cudagraphs", patches))


def _inductor_config(name: str, patches: Mapping[str, Any]) -> Any:
    from torch._inductor import config

    return patches[name] if name in patches else config.get_config_copy()[name]


def inductor_mode_options(mode: str | None = None) -> dict[str, Any]:
    """What `torch.compile(mode=...)` means as Inductor config patches; all modes for None."""
    import torch._inductor

    return torch._inductor.list_mode_options(mode) if mode else torch._inductor.list_mode_options()


def inductor_config_names() -> frozenset[str]:
    """Every name that an Inductor config patch may set."""
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def inductor_config_type(name: str) -> type | None:
    """The type of an Inductor config's values; None where one cannot say, for unions and generic
    types, which `torch.compile(options=...)` does not check either."""
    from torch._inductor import config

    found = config.get_type(name)  # type: ignore[attr-defined]
    return found if get_origin(found) is None and isinstance(found, type) else None


def compile_cache_dir() -> str | None:
    """The folder of torch.compile's caches on disk; None where they are switched off."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    off = torch.compiler.config.force_disable_caches or not config.fx_graph_cache
    return None if off else cache_dir()
