"""Each op that autocast registers, in a program that was exported once, for float32, and lowered:
run with tensors of other dtypes it gives what eager autocast does.

On the CPU the bits are compared. The policies of CUDA are lowered for on the CPU too, and the
dtypes of the results compared with those that CUDA's autocast gives fake tensors. On torch 2.13, of
127 registrations of the CPU 123 can be exported, and of 119 of CUDA 113 can be exported and
lowered. So are PyTorch's own modules: of 114 in its list, 110.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import _pytree as pytree

import autocast_backend.export
from tests.conformance.calls import Tensors, arguments_of
from tests.conformance.one_call import NO_KERNEL, PINNED
from tests.conformance.test_module_db import EAGER_RAISES, MODULES, sample_of
from tests.conformance.test_registrations import REGISTERED
from tests.export.support import Region, cpu_region, cuda_dtypes, dtypes, export, save_and_load
from tests.support import LOW_PRECISION_LSTM, assert_same_bits

F32, F64 = torch.float32, torch.float64
BF16, F16 = torch.bfloat16, torch.float16
# dtypes of the tensors of a call, in turn
MIXES = ([F32], [BF16], [F16], [F64], [F32, BF16], [BF16, F32, F32], [F16, F32])

# `torch.export` refuses them, or the CPU has no kernel for them.
NOT_EXPORTED = {
    ("cpu", "_grid_sampler_2d_cpu_fallback"),
    ("cpu", "ctc_loss.IntList"),
    ("cpu", "ctc_loss.Tensor"),
    ("cpu", "linalg_lstsq"),
    ("cuda", "_cudnn_rnn"),
    ("cuda", "_thnn_fused_gru_cell"),
    ("cuda", "cudnn_convolution"),
    ("cuda", "cudnn_convolution_transpose"),
}
# They do not run on fake CUDA tensors without CUDA; the first one is banned under autocast.
NOT_LOWERED = {"binary_cross_entropy", "grid_sampler", "gru_cell"}
NOT_ON_THE_CPU = {"_scaled_dot_product_flash_attention", "_thnn_fused_lstm_cell"}
# `torch.export` refuses them, or eager autocast does.
MODULES_NOT_EXPORTED = {"nn_CTCLoss", "nn_GaussianNLLLoss", *EAGER_RAISES}
# Their Python code makes a first hidden state in the dtype of the input, and export writes it down.
# (oneDNN's LSTM casts that as well.)
READS_A_DTYPE = {"nn_GRU"} if LOW_PRECISION_LSTM else {"nn_GRU", "nn_LSTM"}
# The last result is memory to work in, whose content means nothing.
MEANINGFUL = {"mkldnn_rnn_layer": 3}


def ops_of(device_type: str) -> list[str]:
    return [op for where, op in REGISTERED if where == device_type]


def call_of(name: str) -> tuple[Callable[..., Any], Callable[[list[torch.dtype]], list[Any]]]:
    """A call of an op as a function of its tensors, and what makes these."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    flat, spec = pytree.tree_flatten(arguments_of(name, Tensors("cpu", [F32])))
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def function(region: Region, *tensors: torch.Tensor) -> Any:
        leaves = list(flat)
        for i, tensor in zip(places, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with region():
            return op(*args, **kwargs)

    def tensors(mix: list[torch.dtype]) -> list[Any]:
        leaves = pytree.tree_leaves(arguments_of(name, Tensors("cpu", mix)))
        return [leaves[i] for i in places]

    return function, tensors


@pytest.mark.parametrize("name", ops_of("cpu"))
def test_on_the_cpu(name: str) -> None:
    if ("cpu", name) in NOT_EXPORTED:
        pytest.skip("cannot be exported")
    if ("cpu", name) in NO_KERNEL:
        pytest.skip("this processor has no kernel for it")
    function, tensors = call_of(name)
    try:
        program = export(function, *tensors([F32]))
    except DataDependentOutputException as error:
        assert not PINNED
        pytest.skip(f"cannot be exported with this build of torch: {error}")
    lowered, report = autocast_backend.export.lower_with_report(program)
    assert not (PINNED and report.bracketed)
    run = autocast_backend.export.module(lowered)
    compared = 0
    for mix in MIXES:
        torch.manual_seed(0)
        try:
            expected = function(cpu_region(BF16), *tensors(mix))
        except (RuntimeError, IndexError):  # eager takes no such mixture
            continue
        torch.manual_seed(0)
        actual, end = run(*tensors(mix)), MEANINGFUL.get(name)
        assert_same_bits(*(pytree.tree_leaves(v)[:end] for v in (actual, expected)), str(mix))
        compared += 1
    assert compared


@pytest.mark.parametrize("name", ops_of("cuda"))
def test_policies_of_cuda(name: str) -> None:
    if ("cuda", name) in NOT_EXPORTED:
        pytest.skip("cannot be exported")
    function, tensors = call_of(name)
    program = export(function, *tensors([F32]), dtype=F16)
    if name in NOT_LOWERED and PINNED:
        with pytest.raises(RuntimeError, match="device_type='cuda': the program does not run"):
            autocast_backend.export.lower(program, device_type="cuda")
        return
    try:
        lowered, report = autocast_backend.export.lower_with_report(program, device_type="cuda")
    except RuntimeError as error:
        if PINNED or "does not run on fake tensors" not in str(error):
            raise
        pytest.skip(f"cannot be lowered with this build of torch: {error}")
    assert not (PINNED and report.bracketed)
    if report.bracketed or name in NOT_ON_THE_CPU:
        return
    run = autocast_backend.export.module(lowered)
    compared = 0
    for mix in MIXES:
        try:
            expected = cuda_dtypes(function, *tensors(mix))
        except RuntimeError:
            continue
        assert dtypes(run(*tensors(mix))) == expected, mix
        compared += 1
    assert compared


@pytest.mark.parametrize("name", MODULES)
def test_modules_on_the_cpu(name: str) -> None:
    """PyTorch's own modules, exported as they are and lowered for a context around them."""
    if name in MODULES_NOT_EXPORTED:
        pytest.skip("cannot be exported, or eager autocast itself raises")
    torch.manual_seed(0)
    sample = sample_of(MODULES[name], 0)
    made, given = sample.constructor_input, sample.forward_input
    module = MODULES[name].module_cls(*made.args, **made.kwargs)
    if isinstance(module, LazyModuleMixin):
        module(*given.args, **given.kwargs)
    program = torch.export.export(copy.deepcopy(module), given.args, given.kwargs)
    lowered = autocast_backend.export.lower(program, ambient={"device_type": "cpu", "dtype": BF16})
    run = autocast_backend.export.module(save_and_load(lowered))

    def outcome(module: nn.Module, dtype: torch.dtype) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.detach().to(dtype if t.is_floating_point() else t.dtype),
            (given.args, given.kwargs),
        )
        torch.manual_seed(0)
        with torch.no_grad():
            outputs = module(*args, **kwargs)
        return outputs, dict(module.named_buffers())

    for dtype in (F32, BF16, F16, F64):
        if dtype is not F32 and name in READS_A_DTYPE:
            continue
        with torch.autocast("cpu", dtype=BF16):
            try:
                expected = outcome(copy.deepcopy(module), dtype)
            except (RuntimeError, ValueError):  # eager takes no such mixture
                assert dtype is not F32 or (name == "nn_LSTM" and not LOW_PRECISION_LSTM)
                continue
        assert_same_bits(outcome(copy.deepcopy(run), dtype), expected, str(dtype))
