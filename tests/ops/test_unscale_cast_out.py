"""`unscale_cast` into memory that is there: other tensors, and the gradients themselves."""

import re
import weakref

import pytest
import torch

from autocast_backend import unscale_cast
from tests.ops.smart_cast_suite import assert_same, sample
from tests.ops.test_multi_cast_values import assert_same_numbers, misaligned
from tests.ops.test_unscale_cast import in_two_passes, mixture

op = torch.ops.smart_autocast.unscale_cast.out
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SCALE = torch.tensor(3.0)


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16])
def test_into_other_tensors(dtype: torch.dtype) -> None:
    for grads in (mixture(), [*mixture(), torch.tensor([1.0, torch.inf])], []):
        wanted, found = in_two_passes(grads, SCALE, dtype)
        out = [torch.full_like(grad, 7, dtype=dtype).contiguous() for grad in grads]
        askew = [misaligned(tensor) if tensor.numel() > 0 else tensor for tensor in out]
        for results in (out, askew):
            unscaled = unscale_cast(grads, SCALE, dtype, out=results)
            assert [id(t) for t in unscaled.tensors] == [id(t) for t in results]
            for result, other in zip(results, wanted, strict=True):
                assert_same_numbers(result, other.contiguous())
            assert_same(unscaled.found_inf, found)


def test_strides_and_what_lies_between() -> None:
    base = torch.full((6, 8), 7.0)
    grad = sample(f16, 3, 4)
    unscale_cast([grad, grad.t()], SCALE, out=[base[::2, 1::2], torch.empty(4, 3)])
    assert_same_numbers(base[::2, 1::2].contiguous(), in_two_passes([grad], SCALE, f32)[0][0])
    base[::2, 1::2] = 7
    assert torch.equal(base, torch.full((6, 8), 7.0))


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16])
def test_in_place(dtype: torch.dtype) -> None:
    def some() -> list[torch.Tensor]:
        wide = sample(dtype, 4, 6)
        large = sample(dtype, 300_007)
        askew = misaligned(sample(dtype, 50))
        slices = sample(dtype, 4, 6)[:, ::2]
        return [sample(dtype, 3, 5), wide.t(), slices, large, sample(dtype), askew]

    grads = some()
    versions = [grad._version for grad in grads]
    results = unscale_cast(grads, SCALE, dtype, out=grads).tensors
    wanted, _ = in_two_passes(some(), SCALE, dtype)
    for grad, result, other in zip(grads, results, wanted, strict=True):
        assert result is grad
        assert_same_numbers(grad.contiguous(), other.contiguous())
    assert all(grad._version > version for grad, version in zip(grads, versions, strict=True))
    # Beside others that are cast.
    mixed = [sample(dtype, 9), sample(f16 if dtype == f32 else f32, 9)]
    wanted, _ = in_two_passes(mixed, SCALE, dtype)
    out = [mixed[0], torch.empty(9, dtype=dtype)]
    unscale_cast(mixed, SCALE, dtype, out=out)
    for result, other in zip(out, wanted, strict=True):
        assert_same_numbers(result, other)


def test_opcheck_and_compile() -> None:
    grads, out = [sample(f16, 3, 5), sample(f32, 4)], [torch.empty(3, 5), torch.empty(4)]
    torch.library.opcheck(op, (grads, SCALE, f32), {"out": out})
    torch.compiler.reset()

    def function(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = unscale_cast([a * 2], SCALE, out=[x]).found_inf
        return x + found

    x, y = torch.empty(3, 5), torch.empty(3, 5)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(compiled(grads[0], x), function(grads[0], y))
    assert_same(x, y)


def test_errors() -> None:
    grads = [sample(f32, 4), sample(f16, 4)]
    x, y = torch.empty(4), torch.empty(4)

    def refused(message: str, *out: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="unscale_cast: " + re.escape(message)):
            unscale_cast(grads, SCALE, out=out)

    refused("argument 'out' must hold as many tensors as 'grads', 2, got 1", x)
    refused("argument 'out[1]' must have the dtype asked for", x, y.half())
    refused("argument 'out[1]' must have the shape of 'grads[1]'", x, y[:3])
    refused("argument 'out[1]' must have memory of its own", x, y[:1].expand(4))
    overlap = "argument 'out' must not overlap with 'grads' or in itself"
    refused(overlap, x, x)
    first = overlap + ", first byte to last, got "
    refused(first + "out[1] and grads[0] in the same", x, grads[0])  # another's
    grads[0] = x[1:]
    refused("argument 'out[0]' must have the shape", x, y)
    grads = [torch.empty(5)[1:], sample(f16, 4)]
    refused(overlap, grads[0]._base[:-1], y)  # its own, but not in the same place
    grads = [sample(f32, 4, 4), sample(f16, 4)]
    refused(overlap, grads[0].t(), y)  # nor in the same order
    with pytest.raises(RuntimeError, match=overlap):
        unscale_cast(grads[1:], SCALE, bf16, out=[grads[1].view(bf16)])
    scales = torch.full((3,), 2.0)
    for out in (scales[1:2], scales):  # the scale itself, and what it is in
        grads = [torch.ones_like(out)]
        for some in (grads, [out]):  # in place, too
            with pytest.raises(RuntimeError, match=r"'out' .* with 'scale' .* and scale in the"):
                unscale_cast(some, scales[1], out=[out])
    assert torch.equal(scales, torch.full((3,), 2.0))
    unscale_cast([torch.ones(1), torch.empty(0)], scales[1], out=[scales[:1], scales[1:1]])
    assert scales.tolist() == [0.5, 2, 2]
    grads = [sample(f32, 4, 4), sample(f16, 4)]
    with pytest.raises(RuntimeError, match="it has no gradient, but a tensor requires grad"):
        unscale_cast(grads, SCALE, out=[x, y.clone().requires_grad_()])
    with pytest.raises(TypeError, match="'out' must be a list or tuple of tensors, got Tensor"):
        unscale_cast(grads, SCALE, out=x)  # type: ignore[arg-type]


def test_jit_trace_keeps_what_is_written() -> None:
    def unscale(grad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4)
        unscale_cast([grad], SCALE, out=[out])
        return out

    traced = torch.jit.trace(unscale, (torch.zeros(4),), check_trace=False)
    grad = sample(f16, 4)
    assert_same(traced(grad), unscale(grad))


def test_an_out_that_is_no_dense_tensor() -> None:
    grad = sample(f32, 2, 2)
    with pytest.raises(RuntimeError, match=r"'out' must be a dense tensor .* got an MKLDNN tensor"):
        unscale_cast([grad], SCALE, out=[grad.to_mkldnn()])


def test_a_dtype_that_no_kernel_knows_names_the_argument_and_keeps_nothing() -> None:
    grad, out = sample(f32, 4), torch.zeros(4)
    leaked = weakref.ref(out)
    with pytest.raises(RuntimeError, match=r"'dtype' must be torch\.float32.* got torch\.qint8"):
        unscale_cast([grad], SCALE, torch.qint8, out=[out])
    del out
    assert leaked() is None
