"""`unscale_cast` against what GradScaler does in two passes."""

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autocast_backend import UnscaledGrads, unscale_cast
from tests.ops.smart_cast_suite import FLOATS_WITH_GRAD, assert_same, sample
from tests.ops.test_multi_cast_values import assert_same_numbers, misaligned, patterns

op = torch.ops.smart_autocast.unscale_cast.default
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
inf, nan = math.inf, math.nan


def in_two_passes(
    grads: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """As torch.amp.GradScaler.unscale_ does it, after the cast."""
    results = [grad.to(dtype, copy=True) for grad in grads]
    found = torch.zeros((), device=scale.device)
    inverse = scale.double().reciprocal().float()
    if results:
        torch._amp_foreach_non_finite_check_and_unscale_(results, found, inverse)
    return results, found


def assert_as_in_two_passes(
    grads: list[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype
) -> float:
    results, found = op(grads, scale, dtype)
    wanted, wanted_found = in_two_passes(grads, scale, dtype)
    assert len(results) == len(wanted)
    for result, other in zip(results, wanted, strict=True):
        assert_same_numbers(result, other)
    assert_same(found, wanted_found)
    return found.item()


def mixture() -> list[torch.Tensor]:
    base = sample(f32, 4, 6, 8)
    return [
        *(sample(dtype, 3, 5) for dtype in FLOATS_WITH_GRAD),
        sample(torch.float8_e5m2, 7),
        sample(f32),
        sample(f32, 0, 3),
        base,
        base.transpose(0, 2),
        base[:, ::2, 1:],
        sample(f16, 5, 1).expand(5, 4),
        sample(bf16, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        sample(torch.complex64, 4).conj().imag,
        sample(f16, 40)[3:],
        misaligned(sample(f32, 50)),
        misaligned(sample(f64, 9)),
    ]


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16])
@pytest.mark.parametrize("scale", [1.0, 65536.0, 3.0, 2.0**-20, 1e-40])
def test_mixtures(dtype: torch.dtype, scale: float) -> None:
    assert assert_as_in_two_passes(mixture(), torch.tensor(scale), dtype) == 0
    assert assert_as_in_two_passes(mixture(), torch.tensor([scale]), dtype) == 0


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16])
@pytest.mark.parametrize("source", FLOATS_WITH_GRAD)
def test_values_of_every_kind(source: torch.dtype, dtype: torch.dtype) -> None:
    everything = patterns(source)
    everything = everything[:: max(1, everything.numel() // 2**16)]
    finite = everything[everything.to(dtype).isfinite()]
    for scale in (torch.tensor(7.0), torch.tensor(inf)):
        assert assert_as_in_two_passes([everything], scale, dtype) == 1
        assert assert_as_in_two_passes([finite, finite[3:5000]], scale, dtype) == 0


@pytest.mark.parametrize("source", FLOATS_WITH_GRAD)
def test_one_number_anywhere_is_found(source: torch.dtype) -> None:
    """In either of three pieces that threads take, and in the parts of such a piece."""
    size = 150_001
    grads = [sample(f32, 3), torch.ones(size, dtype=source), sample(bf16, 70)]
    for bad in (inf, -inf, nan):
        for place in (0, 33, 1023, 1024, 65_535, 131_072, size - 1):
            grads[1][place] = bad
            assert op(grads, torch.tensor(2.0), f32)[1] == 1
            grads[1][place] = 1
    assert op(grads, torch.tensor(2.0), f32)[1] == 0


def test_what_the_cast_makes_infinite_counts_but_not_what_the_scale_does() -> None:
    assert op([torch.tensor([1e300], dtype=f64)], torch.tensor(1.0), f32)[1] == 1
    assert op([torch.tensor([1e300], dtype=f64)], torch.tensor(1.0), f64)[1] == 0
    results, found = op([torch.tensor([1e30])], torch.tensor(1e-20), f32)
    assert (results[0].item(), found.item()) == (inf, 0)


def test_scale_of_zero_and_nan() -> None:
    for scale in (0.0, -0.0, nan, -4.0):
        assert assert_as_in_two_passes(mixture(), torch.tensor(scale), f32) == 0


def test_sizes_and_alignment() -> None:
    some = patterns(f32)[:: patterns(f32).numel() // 700].contiguous()
    views = [some[o : o + n] for o in range(4) for n in (*range(20), 31, 33, 63, 64, 65, 129)]
    for dtype in (f32, f64, bf16):
        assert_as_in_two_passes(views, torch.tensor(5.0), dtype)


def test_named_and_new() -> None:
    grads = (sample(f32, 3), sample(f16, 4))
    unscaled = unscale_cast(grads, torch.tensor(8.0))
    assert isinstance(unscaled, UnscaledGrads)
    assert torch.equal(unscaled.tensors[0], grads[0] / 8)
    assert unscaled.tensors[1].dtype == f32
    assert unscaled.found_inf.shape == ()
    assert not {t.data_ptr() for t in grads} & {t.data_ptr() for t in unscaled.tensors}
    nothing, found = unscale_cast([], torch.tensor(8.0))
    assert (nothing, found.shape, found.item()) == ([], (), 0.0)


def test_as_grad_scaler_does() -> None:
    """A step of the real one, and the gradients that it leaves."""
    weights = [sample(f32, 5).requires_grad_(), sample(f32, 2, 3).requires_grad_()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = sum(w.pow(3).sum() for w in weights)
    scaler.scale(loss).backward()
    scaled = [w.grad.clone() for w in weights]
    scaler.unscale_(torch.optim.SGD(weights))
    for result, weight in zip(
        unscale_cast(scaled, torch.tensor(scaler.get_scale())).tensors, weights, strict=True
    ):
        assert_same(result, weight.grad)


@pytest.mark.parametrize("gradient", [2.0, inf])
def test_a_fused_optimizer_skips_what_is_found(gradient: float) -> None:
    """As `GradScaler` has them do it."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.full((3,), gradient)
    found = unscale_cast([weight.grad], torch.tensor(2.0), out=[weight.grad]).found_inf
    optimizer.grad_scale, optimizer.found_inf = None, found
    optimizer.step()
    steps = 0 if gradient == inf else 1
    assert optimizer.state[weight]["step"] == steps
    assert torch.equal(weight, torch.ones(3)) == (steps == 0)


def test_inference_and_meta_tensors() -> None:
    with torch.inference_mode():
        grads, scale = [sample(f16, 3)], torch.tensor(2.0)
        inside = unscale_cast(grads, scale)
    assert_same(unscale_cast(grads, scale).tensors[0], inside.tensors[0])
    meta, found = op([torch.empty(4, 6, device="meta").t()], torch.empty((), device="meta"), f32)
    assert (meta[0].device.type, meta[0].stride(), found.device.type) == ("meta", (1, 6), "meta")
    with FakeTensorMode():
        scale = torch.empty((), device="cuda")
        results, found = op([torch.empty(4, 6, device="cuda", dtype=f16).t()], scale, f32)
        assert (results[0].device.type, results[0].dtype) == ("cuda", f32)
        assert results[0].stride() == (1, 6)
        assert (found.device.type, found.dtype, found.shape) == ("cuda", f32, ())


def test_opcheck() -> None:
    grads = [sample(f32, 3, 5), sample(f16, 4), sample(f64, 4, 6).t()]
    torch.library.opcheck(op, (grads, torch.tensor(4.0), f32))
    torch.library.opcheck(op, ([], torch.tensor([4.0]), bf16))


def test_vmap_finds_in_each() -> None:
    grads = torch.tensor([[1.0, inf], [nan, 2.0], [2.0, 4.0]]).half()
    other = sample(f32, 3)
    (results, same), found = torch.vmap(lambda g, s: op([g, other], s, f32))(
        grads, torch.tensor([1.0, 2.0, 4.0])
    )
    assert found.tolist() == [1.0, 1.0, 0.0]
    assert results[2].tolist() == [0.5, 1.0]
    assert_same(same[1], other / 2)


def test_compile() -> None:
    torch.compiler.reset()

    def function(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (x, y), found = unscale_cast([a * 2, b], s)
        return x, y + 1, found

    a, b, s = sample(f16, 3, 5), sample(f32, 4), torch.tensor(16.0)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for actual, wanted in zip(compiled(a, b, s), function(a, b, s), strict=True):
        assert_same(actual, wanted)


def test_takes_no_gradients() -> None:
    grads = [sample(f32, 3).requires_grad_(), sample(f32, 3)]
    message = "unscale_cast: it has no gradient, but a tensor requires grad; call it under torch.no"
    for call in (unscale_cast, op):
        with pytest.raises(RuntimeError, match=message):
            call(grads, torch.tensor(2.0), f32)
    with pytest.raises(RuntimeError, match=message):
        unscale_cast(grads[1:], torch.tensor(2.0, requires_grad=True))
    with torch.no_grad():
        results, _ = unscale_cast(grads, torch.tensor(2.0))
    assert not any(result.requires_grad for result in results)


def test_errors() -> None:
    grad, scale = sample(f32, 3), torch.tensor(2.0)

    def refused(error: type[Exception], message: str, *arguments: Any) -> None:
        with pytest.raises(error, match=message):
            unscale_cast(*arguments)

    refused(TypeError, "'grads' must be a list or tuple of tensors, got Tensor", grad, scale)
    refused(TypeError, r"'grads\[1\]' must be a torch.Tensor, got NoneType", [grad, None], scale)
    refused(TypeError, r"'scale' must be a torch.Tensor, got float", [grad], 2.0)
    refused(TypeError, "'dtype' must be a torch.dtype .* got str", [grad], scale, "float")
    refused(RuntimeError, "'dtype' must be torch.float32, .* got", [grad], scale, torch.int32)
    one = "'scale' must be a float32 tensor of one element"
    refused(RuntimeError, one, [grad], torch.ones(2))
    refused(RuntimeError, one + ".* got 1 of torch.float64", [grad], scale.double())
    floating = r"'grads' must hold floating tensors, got torch.int64 for grads\[1\]; leave it out"
    refused(RuntimeError, floating, [grad, torch.arange(3)], scale)
    refused(
        RuntimeError, "'grads' must be a dense tensor .* got a sparse", [grad.to_sparse()], scale
    )
    refused(RuntimeError, "'grads' must be a dense tensor .* got a complex", [grad + 1j], scale)
    devices = r"'grads' must hold tensors on the device of 'scale', cpu, got grads\[\d\] on "
    refused(RuntimeError, devices + "meta", [grad, torch.empty(3, device="meta")], scale)
    with FakeTensorMode():
        refused(RuntimeError, devices + "cuda:0", [torch.empty(3, device="cuda")], torch.ones(()))


def test_vmap_over_nothing() -> None:
    (result, other), found = torch.vmap(
        lambda a, b: unscale_cast([a, b], torch.tensor(2.0), bf16), in_dims=(1, None)
    )(torch.empty(3, 0, 2), sample(f32, 4))
    assert (result.shape, result.dtype) == ((0, 3, 2), bf16)
    assert (other.shape, other.dtype) == ((0, 4), bf16)
    assert (found.shape, found.dtype) == ((0,), f32)


def test_a_scale_that_is_no_dense_tensor() -> None:
    scale = torch.ones(1).to_sparse()
    with pytest.raises(RuntimeError, match=r"'scale' must be a dense tensor .* got a sparse"):
        unscale_cast([sample(f32, 4)], scale)
    with pytest.raises(RuntimeError, match=r"'scale' must be a dense tensor .* got None"):
        torch.ops.smart_autocast.unscale_cast([sample(f32, 4)], None, f32)
