"""One call of each op that autocast registers, as data: op -> what makes its arguments from `t`.

- `t(4, 4)`: a floating tensor, of the next dtype in turn;
- `t.spd(4)`: the same, symmetric and positive definite;
- `t.unit(4)`: the same, values between 0 and 1;
- `t.sign(4)`: the same, of 1 and -1;
- `t.long(4, high=3)`: int64 values below `high`;
- `t.pivots(4)`: the int32 pivots of a matrix.

A dict as the last argument holds the keyword arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class Tensors:
    """Makes the tensors of one call on one device, of these dtypes in turn; each instance the same.

    Off the CPU they have no values: to be used inside a FakeTensorMode.
    """

    def __init__(self, device: str, dtypes: Sequence[torch.dtype]) -> None:
        self._device = device
        self._dtypes = itertools.cycle(dtypes)
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return self._floating(torch.randn(shape, generator=self._generator))

    def unit(self, *shape: int) -> torch.Tensor:
        return self._floating(torch.rand(shape, generator=self._generator))

    def spd(self, n: int) -> torch.Tensor:
        half = torch.randn(n, n, generator=self._generator)
        return self._floating(half @ half.T + n * torch.eye(n))

    def sign(self, *shape: int) -> torch.Tensor:
        return self._floating(torch.randn(shape, generator=self._generator).sign())

    def long(self, *shape: int, high: int) -> torch.Tensor:
        return self._placed(torch.randint(high, shape, generator=self._generator))

    def pivots(self, n: int) -> torch.Tensor:
        return self._placed(torch.arange(1, n + 1, dtype=torch.int32))

    def _floating(self, values: torch.Tensor) -> torch.Tensor:
        return self._placed(values.to(next(self._dtypes)))

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._device == "cpu" else torch.empty_like(values, device=self._device)


def _same(names: str, arguments: Callable[[Tensors], tuple[Any, ...]]) -> dict[str, Any]:
    return dict.fromkeys(names.split(), arguments)


def _cell(t: Tensors, gates: int, hidden: Any) -> tuple[Any, ...]:
    return t(2, 4), hidden, t(gates * 4, 4), t(gates * 4, 4), t(gates * 4), t(gates * 4)


CALLS: Mapping[str, Callable[[Tensors], tuple[Any, ...]]] = {
    # matrix products
    **_same("mm matmul", lambda t: (t(4, 4), t(4, 4))),
    **_same("addmm _addmm_activation", lambda t: (t(4, 4), t(4, 4), t(4, 4))),
    "mv": lambda t: (t(4, 4), t(4)),
    "addmv": lambda t: (t(4), t(4, 4), t(4)),
    "addr": lambda t: (t(4, 4), t(4), t(4)),
    "bmm": lambda t: (t(2, 4, 4), t(2, 4, 4)),
    "baddbmm": lambda t: (t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "addbmm": lambda t: (t(4, 4), t(2, 4, 4), t(2, 4, 4)),
    "linear": lambda t: (t(4, 4), t(4, 4), t(4)),
    "einsum": lambda t: ("ij,jk->ik", [t(4, 4), t(4, 4)]),
    **_same("chain_matmul linalg_multi_dot", lambda t: ([t(4, 4), t(4, 4), t(4, 4)],)),
    "linalg_vecdot": lambda t: (t(4, 4), t(4, 4)),
    **_same("dot vdot", lambda t: (t(4), t(4))),
    "tensordot": lambda t: (t(2, 3), t(3, 2), [1], [0]),
    "bilinear": lambda t: (t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    # convolutions
    **_same("conv1d conv_transpose1d", lambda t: (t(2, 4, 8), t(4, 4, 3), t(4))),
    **_same("conv2d conv_transpose2d.input", lambda t: (t(2, 4, 8, 8), t(4, 4, 3, 3), t(4))),
    **_same("conv3d conv_transpose3d.input", lambda t: (t(2, 4, 8, 8, 8), t(4, 4, 3, 3, 3), t(4))),
    "conv1d.padding": lambda t: (t(2, 4, 8), t(4, 4, 3), t(4), [1], "same"),
    "conv2d.padding": lambda t: (t(2, 4, 8, 8), t(4, 4, 3, 3), t(4), [1, 1], "same"),
    "conv3d.padding": lambda t: (t(2, 4, 8, 8, 8), t(4, 4, 3, 3, 3), t(4), [1, 1, 1], "same"),
    "conv_tbc": lambda t: (t(8, 2, 4), t(3, 4, 4), t(4)),
    "convolution": lambda t: (*_conv2d(t), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "_convolution": lambda t: (
        *(*_conv2d(t), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        *(False, False, True, True),
    ),
    "_convolution.deprecated": lambda t: (
        *(*_conv2d(t), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        *(False, False, True),
    ),
    "cudnn_convolution": lambda t: (
        *(*_conv2d(t)[:2], [0, 0], [1, 1], [1, 1], 1),
        *(False, True, True),
    ),
    "cudnn_convolution_transpose": lambda t: (
        *(*_conv2d(t)[:2], [0, 0], [0, 0], [1, 1], [1, 1], 1),
        *(False, True, True),
    ),
    "_mps_convolution": lambda t: (*_conv2d(t), [0, 0], [1, 1], [1, 1], 1),
    # recurrent and attention
    "lstm_cell": lambda t: _cell(t, 4, [t(2, 4), t(2, 4)]),
    "gru_cell": lambda t: _cell(t, 3, t(2, 4)),
    **_same("rnn_tanh_cell rnn_relu_cell", lambda t: _cell(t, 1, t(2, 4))),
    "_thnn_fused_lstm_cell": lambda t: (t(2, 16), t(2, 16), t(2, 4), t(16), t(16)),
    "_thnn_fused_gru_cell": lambda t: (t(2, 12), t(2, 12), t(2, 4), t(12), t(12)),
    "_cudnn_rnn": lambda t: (
        *(t(3, 2, 4), [t(4, 4), t(4, 4)], 2, None, t(1, 2, 4), None, 0, 4, 0, 1),
        *(False, 0.0, False, False, [], None),
    ),
    "mkldnn_rnn_layer": lambda t: (
        *(t(3, 2, 4), t(16, 4), t(16, 4), t(16), t(16), t(2, 4), t(2, 4)),
        *(False, [], 2, 4, 1, True, False, False, False),
    ),
    **_same(
        "scaled_dot_product_attention _scaled_dot_product_flash_attention",
        lambda t: (t(2, 2, 8, 8), t(2, 2, 8, 8), t(2, 2, 8, 8)),
    ),
    "_native_multi_head_attention": lambda t: (
        *(t(2, 3, 8), t(2, 3, 8), t(2, 3, 8), 8, 2, t(24, 8), t(24), t(8, 8), t(8)),
    ),
    # pointwise and reductions
    **_same("cosh erfinv expm1 exp sinh tan reciprocal softplus", lambda t: (t(4),)),
    **_same("acos asin log log10 log1p log2 rsqrt", lambda t: (t.unit(4),)),
    "prelu": lambda t: (t(4, 4), t(4)),
    "pow.Tensor_Scalar": lambda t: (t.unit(4), 1.5),
    "pow.Tensor_Tensor": lambda t: (t.unit(4), t(4)),
    "pow.Scalar": lambda t: (2.0, t(4)),
    "atan2": lambda t: (t(4), t(4)),
    **_same("addcdiv addcmul", lambda t: (t(4), t(4), t.unit(4))),
    "cross": lambda t: (t(4, 3), t(4, 3), 1),
    **_same("prod sum", lambda t: (t(4, 4),)),
    **_same("prod.dim_int sum.dim_IntList", lambda t: (t(4, 4), 0)),
    **_same("cumprod cumsum log_softmax.int softmax.int", lambda t: (t(4, 4), 1)),
    "logsumexp": lambda t: (t(4, 4), [1]),
    "trace": lambda t: (t(4, 4),),
    **_same("nanquantile quantile", lambda t: (t(4, 4), t.unit(2), 1)),
    **_same("nanquantile.scalar quantile.scalar", lambda t: (t(4, 4), 0.5, 1)),
    # norms and distances
    "layer_norm": lambda t: (t(4, 4), [4], t(4), t(4)),
    "native_layer_norm": lambda t: (t(4, 4), [4], t(4), t(4), 1e-5),
    "rms_norm": lambda t: (t(4, 4), [4], t(4)),
    "group_norm": lambda t: (t(2, 4, 4), 2, t(4), t(4)),
    "batch_norm": lambda t: (t(2, 4, 4), t(4), t(4), t(4), t.unit(4), False, 0.1, 1e-5, True),
    "norm.Scalar": lambda t: (t(4, 4), 2),
    "norm.ScalarOpt_dim": lambda t: (t(4, 4), 2, [1]),
    **_same("frobenius_norm.dim nuclear_norm.dim", lambda t: (t(4, 4), [0, 1])),
    "nuclear_norm": lambda t: (t(4, 4),),
    "linalg_vector_norm": lambda t: (t(4, 4), 2),
    "linalg_matrix_norm": lambda t: (t(4, 4), 1),
    "linalg_matrix_norm.str_ord": lambda t: (t(4, 4), "fro"),
    "renorm": lambda t: (t(4, 4), 2, 0, 1.0),
    **_same("dist cdist cosine_similarity", lambda t: (t(4, 4), t(4, 4))),
    "pdist": lambda t: (t(4, 4),),
    # losses
    **_same("l1_loss mse_loss smooth_l1_loss huber_loss", lambda t: (t(4, 4), t(4, 4))),
    **_same("kl_div binary_cross_entropy_with_logits", lambda t: (t(4, 4), t.unit(4, 4))),
    **_same("soft_margin_loss hinge_embedding_loss", lambda t: (t(4, 4), t.sign(4, 4))),
    "binary_cross_entropy": lambda t: (t.unit(4, 4), t.unit(4, 4)),
    "poisson_nll_loss": lambda t: (t(4, 4), t.unit(4, 4), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda t: (t(4, 4), t(4, 4), t.sign(4)),
    "margin_ranking_loss": lambda t: (t(4), t(4), t.sign(4)),
    "triplet_margin_loss": lambda t: (t(4, 4), t(4, 4), t(4, 4)),
    **_same("nll_loss cross_entropy_loss", lambda t: (t(4, 4), t.long(4, high=4), t.unit(4))),
    "nll_loss2d": lambda t: (t(2, 4, 3, 3), t.long(2, 3, 3, high=4)),
    "multi_margin_loss": lambda t: (t(4, 4), t.long(4, high=4)),
    "multilabel_margin_loss": lambda t: (t(4, 4), t.long(4, 4, high=4)),
    "multilabel_margin_loss_forward": lambda t: (t(4, 4), t.long(4, 4, high=4), 1),
    "ctc_loss.IntList": lambda t: (t(8, 2, 4), t.long(2, 3, high=4), [8, 8], [3, 3]),
    "ctc_loss.Tensor": lambda t: (
        *(t(8, 2, 4), t.long(2, 3, high=4), t.long(2, high=9), t.long(2, high=4)),
    ),
    # pooling, padding, sampling
    **_same("adaptive_avg_pool3d adaptive_max_pool3d", lambda t: (t(2, 2, 4, 4, 4), [2, 2, 2])),
    **_same("avg_pool3d max_pool3d", lambda t: (t(2, 2, 4, 4, 4), [2, 2, 2])),
    "fractional_max_pool2d": lambda t: (t(2, 2, 6, 6), [2, 2], [3, 3], t.unit(2, 2, 2)),
    "fractional_max_pool3d": lambda t: (t(2, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], t.unit(2, 2, 3)),
    "max_unpool2d": lambda t: (t(2, 2, 2, 2), t.long(2, 2, 2, 2, high=16), [4, 4]),
    "max_unpool3d": lambda t: (
        *(t(2, 2, 2, 2, 2), t.long(2, 2, 2, 2, 2, high=64), [4, 4, 4], [2, 2, 2], [0, 0, 0]),
    ),
    **_same("reflection_pad1d replication_pad1d", lambda t: (t(2, 4, 4), [1, 1])),
    **_same("reflection_pad2d replication_pad2d", lambda t: (t(2, 2, 4, 4), [1, 1, 1, 1])),
    "replication_pad3d": lambda t: (t(2, 2, 4, 4, 4), [1, 1, 1, 1, 1, 1]),
    **_same(
        "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback",
        lambda t: (t(2, 2, 4, 4), t(2, 3, 3, 2), 0, 0, False),
    ),
    "grid_sampler_3d": lambda t: (t(2, 2, 4, 4, 4), t(2, 3, 3, 3, 3), 0, 0, False),
    **_same("upsample_nearest1d _upsample_nearest_exact1d", lambda t: (t(2, 2, 4), [8])),
    **_same("upsample_nearest2d _upsample_nearest_exact2d", lambda t: (t(2, 2, 4, 4), [8, 8])),
    **_same(
        "upsample_nearest3d _upsample_nearest_exact3d", lambda t: (t(2, 2, 4, 4, 4), [8, 8, 8])
    ),
    "upsample_linear1d": lambda t: (t(2, 2, 4), [8], False),
    **_same(
        "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa",
        lambda t: (t(2, 2, 4, 4), [8, 8], False),
    ),
    "upsample_trilinear3d": lambda t: (t(2, 2, 4, 4, 4), [8, 8, 8], False),
    # linear algebra
    **_same("cholesky linalg_cholesky linalg_cholesky_ex cholesky_inverse", lambda t: (t.spd(4),)),
    **_same("inverse linalg_inv linalg_inv_ex pinverse", lambda t: (t.spd(4),)),
    **_same("linalg_eigh linalg_eigvalsh linalg_matrix_sqrth", lambda t: (t.spd(4),)),
    **_same("linalg_eig linalg_eigvals linalg_svd linalg_svdvals svd", lambda t: (t(4, 4),)),
    **_same("geqrf linalg_qr qr _lu_with_info", lambda t: (t(4, 4),)),
    **_same("cholesky_solve linalg_solve linalg_lstsq", lambda t: (t.spd(4), t(4, 4))),
    "triangular_solve": lambda t: (t(4, 4), t.spd(4)),
    "lu_solve": lambda t: (t(4, 4), t.spd(4), t.pivots(4)),
    "linalg_cond": lambda t: (t.spd(4),),
    "linalg_cond.p_str": lambda t: (t.spd(4), "fro"),
    "linalg_matrix_rank": lambda t: (t(4, 4), 0.1),
    "linalg_matrix_rank.tol_tensor": lambda t: (t(4, 4), t.unit()),
    "linalg_matrix_rank.atol_rtol_float": lambda t: (t(4, 4), {"atol": 0.1}),
    "linalg_matrix_rank.atol_rtol_tensor": lambda t: (t(4, 4), {"atol": t.unit(), "rtol": None}),
    "linalg_tensorinv": lambda t: (t(2, 2, 4), 2),
    "linalg_tensorsolve": lambda t: (t(2, 2, 4), t(2, 2)),
    **_same("linalg_householder_product orgqr", lambda t: (t(4, 3), t(3))),
    "ormqr": lambda t: (t(4, 3), t(3), t(4, 2)),
    # Fourier transforms and complex numbers
    **_same("fft_fft fft_ifft fft_rfft fft_ihfft", lambda t: (t(8),)),
    **_same("fft_irfft fft_hfft", lambda t: (t(8),)),
    **_same("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", lambda t: (t(8, 8),)),
    **_same("fft_fftn fft_ifftn fft_rfftn fft_irfftn", lambda t: (t(8, 8),)),
    **_same(
        "stft stft.center", lambda t: (t(2, 64), 16, {"window": t(16), "return_complex": True})
    ),
    "polar": lambda t: (t.unit(4), t(4)),
    "view_as_complex": lambda t: (t(4, 2),),
    # the rest
    **_same("cat stack", lambda t: ([t(4), t(4), t(4)],)),
    "index_copy": lambda t: (t(4, 4), 0, t.long(2, high=4), t(2, 4)),
    "index_put": lambda t: (t(4, 4), [t.long(2, high=4)], t(2, 4)),
    "scatter_add": lambda t: (t(4, 4), 0, t.long(2, 4, high=4), t(2, 4)),
    "fake_quantize_per_tensor_affine": lambda t: (t(4), 0.1, 0, 0, 255),
}


def _conv2d(t: Tensors) -> tuple[Any, ...]:
    return t(2, 4, 8, 8), t(4, 4, 3, 3), t(4)


def arguments_of(op: str, t: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of the call of `op`."""
    *args, last = CALLS[op](t)
    return (tuple(args), last) if isinstance(last, dict) else ((*args, last), {})
