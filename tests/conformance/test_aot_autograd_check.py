"""PyTorch's own check of operators under AOTAutograd, on the lowered graphs.

`torch.testing._internal.optests.aot_autograd_check` runs a function as it is and through
AOTAutograd, with other numbers than it was traced with too, and compares outputs and gradients:
here their bits.
The function here is what Dynamo makes of an operator in a bfloat16 region, lowered: smart casts
must be traced through, have gradients there, and keep no numbers. `test_op_db.py` compares the same
operators with eager autocast, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import OpInfo
from torch.testing._internal.optests import aot_autograd_check

from autocast_backend.graphs import copy_graph
from autocast_backend.lowering.context import Context
from autocast_backend.lowering.lower import lower
from autocast_backend.state import AutocastState
from tests.conformance.one_call import PINNED
from tests.conformance.test_op_db import OPS
from tests.support import BF16

# The operators whose first sample is lowered to smart casts; for others there is nothing to check.
LOWERED = {
    "": """
        __rmatmul__ addbmm addmm addmm.decomposed baddbmm bmm cat cdist cholesky
        cholesky_inverse cholesky_solve geqrf grid_sampler_2d grid_sampler_3d index_copy
        lu_solve masked.prod matmul mm nanquantile ormqr pinverse polar prod qr quantile stack
        stft svd tensordot trace triangular_solve view_as_complex
    """,
    "fft.": """
        fft fft2 fftn hfft ifft ifft2 ifftn ihfft irfft irfft2 irfftn rfft rfft2 rfftn
    """,
    "linalg.": """
        cholesky cholesky_ex cond eig eigh eigvals eigvalsh householder_product inv inv_ex
        matrix_rank matrix_rank.hermitian multi_dot qr solve svd svdvals tensorinv tensorsolve
        vecdot
    """,
    "nn.functional.": """
        adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d binary_cross_entropy
        binary_cross_entropy_with_logits conv1d conv2d conv3d conv_transpose1d conv_transpose2d
        conv_transpose3d cosine_embedding_loss cross_entropy grid_sample hinge_embedding_loss
        huber_loss kl_div l1_loss linear linear_cross_entropy margin_ranking_loss max_pool3d
        max_unpool2d max_unpool2d.grad max_unpool3d max_unpool3d.grad mse_loss multi_margin_loss
        multilabel_margin_loss nll_loss poisson_nll_loss prelu smooth_l1_loss soft_margin_loss
        triplet_margin_loss
    """,
}
NAMES = [prefix + name for prefix, names in LOWERED.items() for name in names.split()]

WITHOUT_GRADIENTS = {
    "linalg.eig": "the check's loss depends on the phase of eigenvectors, where eager itself raises"
}

# AOTAutograd takes them apart, into other bits.
DECOMPOSED = {"linalg.qr", "qr"}


def lowered(op: OpInfo) -> list[tuple[Callable[..., Any], tuple[Any, ...], int]]:
    """The graphs of the operator's first sample in a region: lowered, with inputs and casts."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)))
    graphs: list[tuple[Callable[..., Any], tuple[Any, ...], int]] = []

    def region(given: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast(**BF16):
            return op.op(given, *args, **kwargs)

    def keep(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        context = Context(ambient=AutocastState.off())
        graph = lower(copy_graph(graph_module), context)
        graphs.append((graph, tuple(inputs), context.report.casts))
        return graph_module.forward

    torch.compile(region, backend=keep)(sample.input, sample.args, sample.kwargs)
    return graphs


@pytest.mark.parametrize("name", [name for name in NAMES if name in OPS])
def test_aot_autograd_check(name: str) -> None:
    graphs = lowered(OPS[name])
    casts = sum(casts for *_, casts in graphs)
    if not casts and not PINNED:
        pytest.skip("not lowered with this build of torch")
    assert casts > 0
    tolerances = {} if name in DECOMPOSED else {"rtol": 0, "atol": 0}
    for graph, inputs, _ in graphs:
        aot_autograd_check(
            graph,
            inputs,
            {},
            dynamic=False,
            assert_equals_fn=functools.partial(
                torch.testing.assert_close, equal_nan=True, **tolerances
            ),
            check_gradients=False if name in WITHOUT_GRADIENTS else "auto",
            try_check_data_specialization=True,
        )
