"""The policy table: what autocast does to which op, as data.

The rows are PyTorch's own (`ATen/autocast_mode.h` and `.cpp`), one table per device type, keyed by
the names the dispatcher registers. `tests/policies/test_table.py` compares them with the dispatcher
of the installed torch and each policy with what real autocast does to fake tensors.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import fx

from .._torch.autocast import autocast_registrations
from .._torch.ops import is_dispatched, op_name_of


class Policy(enum.Enum):
    """What autocast does to one op; the names are PyTorch's (`at::autocast::CastPolicy`)."""

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast every tensor to the region's dtype."""
    FP32 = "fp32"
    """Cast every tensor to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Pass `dtype=float32` where the caller gave no dtype."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Call the overload that takes a dtype, with float32."""
    PROMOTE = "promote"
    """Cast tensors that differ in dtype to float32; float64 takes no part."""
    BANNED = "banned"
    """Raise: the op is not safe in a lower precision."""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        policy: what autocast does.
        versions: the versions of torch that register it, as a version specifier; empty: all.
        optional: whether a build of torch may lack the registration, as one without cuDNN does.
    """

    policy: Policy
    versions: str = ""
    optional: bool = False

    def is_in(self, version: str) -> bool:
        """Whether this torch has the row. Nightlies and release candidates count as the release."""
        return _is_among(version, self.versions)


@functools.cache
def _is_among(version: str, versions: str) -> bool:
    return SpecifierSet(versions).contains(Version(version).base_version)


def _rows(optional: str = "", /, **ops: str) -> MappingProxyType[str, Row]:
    """Rows from lists of ops by policy; an op may carry a version specifier."""
    rows = {}
    for policy, listed in ops.items():
        for op, versions in map(_split, listed.split()):
            rows[op] = Row(Policy(policy), versions, op in optional.split())
    return MappingProxyType(rows)


def _split(op: str) -> tuple[str, str]:
    """`qr<2.14` -> `qr`, `<2.14`."""
    end = next((i for i, character in enumerate(op) if character in "<>=!"), len(op))
    return op[:end], op[end:]


# Versions: from the dispatchers of torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
_CPU = _rows(
    lower_precision_fp="""
        _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm
        bmm conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul
        mkldnn_rnn_layer mm prelu scaled_dot_product_attention
    """,
    fp32="""
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
        avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky<2.14
        cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss.IntList
        ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft
        fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
        grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals
        linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq
        linalg_matrix_rank linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
        linalg_matrix_rank.tol_tensor linalg_matrix_sqrth>=2.14 linalg_qr linalg_solve linalg_svd
        linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d
        max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss
        multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr
        ormqr pinverse poisson_nll_loss polar prod prod.dim_Dimname<2.13 prod.dim_int qr<2.14
        quantile quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d
        replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd
        trace triangular_solve triplet_margin_loss view_as_complex
    """,
    promote="cat index_copy index_copy.dimname<2.13 stack",
)

# The lists of ATen/autocast_mode.h (AT_FORALL_...), which every accelerator but MPS registers.
_XPU = _rows(
    lower_precision_fp="""
        _convolution _convolution.deprecated _scaled_dot_product_flash_attention
        _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul
        conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
        convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv
        prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """,
    fp32="""
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin
        binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity dist
        erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div
        l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
        multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm
        nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
        reciprocal renorm rms_norm>=2.12 rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan
        triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """,
    fp32_set_opt_dtype="""
        cumprod cumprod.dimname<2.13 cumsum cumsum.dimname<2.13 linalg_matrix_norm
        linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.Dimname<2.13 log_softmax.int prod
        prod.dim_Dimname<2.13 prod.dim_int softmax.Dimname<2.13 softmax.int sum
        sum.dim_DimnameList<2.13 sum.dim_IntList
    """,
    fp32_append_dtype="norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim<2.13",
    promote="""
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """,
    banned="binary_cross_entropy",
)

# _cudnn_rnn has a kernel of its own, ATen/cudnn/AutocastRNN.cpp: it copies the weights into a flat
# buffer of the lower precision, which that source takes to be float16. Not seen in action.
_CUDA = _XPU | _rows(
    "_cudnn_rnn",
    lower_precision_fp="_cudnn_rnn cudnn_convolution cudnn_convolution_transpose",
    fp32="linalg_matrix_sqrth>=2.14",
)

_MPS = _rows(
    lower_precision_fp="""
        _convolution _convolution.deprecated _mps_convolution addbmm addmm addmv addr baddbmm bmm
        chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        convolution einsum linalg_multi_dot linear lstm_cell matmul mm mv prelu
        scaled_dot_product_attention
    """,
    fp32="""
        acos asin batch_norm binary_cross_entropy_with_logits cdist conv_transpose3d.input cosh
        cosine_embedding_loss cosine_similarity cumprod cumprod.dimname<2.13 cumsum
        cumsum.dimname<2.13 dist erfinv exp expm1 frobenius_norm.dim group_norm
        hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord linalg_vector_norm log log10 log1p log2 log_softmax.Dimname<2.13
        log_softmax.int logsumexp margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim
        pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod
        prod.dim_Dimname<2.13 prod.dim_int reciprocal renorm rsqrt sinh smooth_l1_loss
        soft_margin_loss softmax.Dimname<2.13 softmax.int softplus sum sum.dim_DimnameList<2.13
        sum.dim_IntList tan triplet_margin_loss
    """,
    promote="addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot",
)

ROWS: Mapping[str, Mapping[str, Row]] = MappingProxyType(
    {"cpu": _CPU, "cuda": _CUDA, "xpu": _XPU, "mps": _MPS, "mtia": _XPU, "maia": _XPU}
)
"""Device type -> op name (with overload, without `aten::`) -> row, of every version of torch since
2.11; all device types that PyTorch itself registers autocast ops for."""


def table(device_type: str, version: str = torch.__version__) -> Mapping[str, Policy]:
    """Op name -> policy: the rows of one version of torch, sorted by name."""
    rows = sorted(ROWS.get(device_type, {}).items())
    return MappingProxyType({op: row.policy for op, row in rows if row.is_in(version)})


TABLES: Mapping[str, Mapping[str, Policy]] = MappingProxyType({d: table(d) for d in ROWS})
"""Device type -> op name -> policy, for the installed torch."""

COMPOSITES: Mapping[str, Mapping[str, Policy]] = MappingProxyType(
    {
        # CompositeImplicitAutograd ops that are not registered themselves, but whose one policy op
        # gets the composite's own arguments. Validation decides node by node whether that is so.
        "cpu": dict.fromkeys(("chain_matmul", "einsum", "tensordot"), Policy.LOWER_PRECISION_FP),
        "mps": {"linalg_norm": Policy.FP32},
        **{
            device_type: {"linalg_norm": Policy.FP32_SET_OPT_DTYPE}
            for device_type in ("cuda", "xpu", "mtia", "maia")
        },
    }
)


@dataclass(frozen=True)
class Differences:
    """How a table and the dispatcher of the installed torch differ.

    Attributes:
        equal: how many registrations have their row.
        missing: registrations without a row.
        gone: rows of this version of torch that are not registered.
    """

    equal: int
    missing: tuple[str, ...]
    gone: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.gone)


def differences(device_type: str) -> Differences:
    """Compare the table of one device type with the dispatcher.

    Compared are ATen's ops: other libraries, torchvision for one, register autocast ops of their
    own. A row of another version of torch that is registered all the same counts as missing.
    """
    names = (name.partition("::") for name in autocast_registrations(device_type))
    registered = {name for namespace, _, name in names if namespace == "aten"}
    here = {op for op, row in ROWS[device_type].items() if row.is_in(torch.__version__)}
    optional = {op for op in here if ROWS[device_type][op].optional}
    return Differences(
        equal=len(registered & here),
        missing=tuple(sorted(registered - here)),
        gone=tuple(sorted(here - registered - optional)),
    )


# Python names whose ATen op is called something else.
_ATEN_NAMES = MappingProxyType(
    {
        "affine_grid": "affine_grid_generator",
        "and_": "bitwise_and",
        "cross_entropy": "cross_entropy_loss",
        "dropout1d": "feature_dropout",
        "dropout2d": "feature_dropout",
        "dropout3d": "feature_dropout",
        "floordiv": "floor_divide",
        "fold": "col2im",
        "grid_sample": "grid_sampler",
        "imatmul": "matmul",
        "interpolate": "upsample_nearest2d",  # `op_name` knows which; they have the same policy
        "invert": "bitwise_not",
        "mod": "remainder",
        "nll_loss_nd": "nll_loss",
        "or_": "bitwise_or",
        "pos": "positive",
        "truediv": "div",
        "xor": "bitwise_xor",
    }
)

# The same of methods such as `x.__rpow__(2)`, without the underscores: `2**x`.
_REFLECTED = MappingProxyType(
    {
        "radd": "add",
        "rdiv": "reciprocal",
        "rfloordiv": "floor_divide",
        "rmatmul": "matmul",
        "rmod": "remainder",
        "rmul": "mul",
        "rpow": "pow",
        "rtruediv": "reciprocal",
    }
)


def op_name(node: fx.Node) -> str | None:
    """The ATen name a call node stands for, with the overload where the node has one; None for
    what calls no op. A name is a claim that validation checks, not a promise."""
    if node.op == "call_method":
        return _plain(str(node.target))
    if node.target is F.interpolate:
        return _interpolation(node)
    return name_of(node.target) if node.op == "call_function" else None


def _interpolation(node: fx.Node) -> str:
    """The op of a call of `F.interpolate`, by its mode and the dimensions of its input."""
    call = inspect.signature(F.interpolate).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    x, mode, antialias = (call.arguments[a] for a in ("input", "mode", "antialias"))
    shape = getattr(x.meta.get("example_value", x.meta.get("val")), "shape", None)
    if shape is None:
        return name_of(node.target)
    op = {
        "nearest": "upsample_nearest",
        "nearest-exact": "_upsample_nearest_exact",
        "area": "adaptive_avg_pool",
    }.get(mode, f"{'_' if antialias else ''}upsample_{mode}")
    return f"{op}{len(shape) - 2}d{'_aa' if antialias else ''}"


def name_of(function: Any) -> str:
    """The ATen name a function stands for, as `op_name` has it; empty for other libraries' ops."""
    if is_dispatched(function):
        name, overload = op_name_of(function)
        return _aten(name) and _aten(name) + (f".{overload}" if overload else "")
    if function is F.unfold:  # a tensor's `unfold` is another op
        return "im2col"
    return _plain(getattr(function, "__name__", ""))


def _aten(qualified: str) -> str:
    namespace, _, name = qualified.partition("::")
    return name if namespace == "aten" else ""


def _plain(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = _REFLECTED.get(name, name)
    return _ATEN_NAMES.get(name, name)


def find_policy(name: str | None, device_type: str) -> Policy | None:
    """The policy of the op `name` on `device_type`; None where autocast leaves it alone.

    A name without overload, which is all that a torch-level call tells, has the policy of its
    registered overloads: on no device type do two overloads of one op differ.
    """
    if not name:
        return None
    if "." in name:
        rows = TABLES.get(device_type)
        return rows.get(name) if rows else None
    return _by_base_name(device_type).get(name)


@functools.cache
def _by_base_name(device_type: str) -> dict[str, Policy]:
    rows: dict[str, Policy] = {}
    for table in (COMPOSITES, TABLES):
        rows.update(table.get(device_type, {}))
    return {op.partition(".")[0]: policy for op, policy in rows.items()}
