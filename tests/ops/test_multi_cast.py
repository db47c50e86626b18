"""`multi_cast` as an op; its rounding is in test_multi_cast_values.py."""

import functools
import math
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autocast_backend import multi_cast
from autocast_backend.ops import KERNEL_TIER, casts
from tests.ops.smart_cast_suite import DTYPES, FLOATS_WITH_GRAD, assert_same, sample

op = torch.ops.smart_autocast.multi_cast.default
out_op = torch.ops.smart_autocast.multi_cast.out
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def mixture() -> list[torch.Tensor]:
    """Every dtype, and what memory can look like."""
    base = sample(f32, 4, 6, 8)
    return [
        *(sample(dtype, 3, 5) for dtype in DTYPES),
        sample(torch.float8_e5m2, 7),
        sample(f32),
        sample(f32, 0, 3),
        sample(bf16, 1, 5, 1).transpose(0, 1),
        base,
        base.transpose(0, 2),
        base.permute(1, 2, 0),
        base[:, ::2, 1:],
        base[1:3],
        sample(f16, 5, 1).expand(5, 4),
        sample(f32, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        sample(torch.complex64, 4).conj().imag,  # stored with the other sign
        sample(f32, 40)[3:],
    ]


def expected(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor.to(dtype, copy=True) for tensor in tensors]


def assert_all_same(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(actual) == len(wanted)
    for result, other in zip(actual, wanted, strict=True):
        assert_same(result, other)
        assert result.device == other.device


@pytest.mark.parametrize("call", [multi_cast, op], ids=["function", "op"])
@pytest.mark.parametrize("dtype", [f32, f16, bf16, f64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_equals_to(call: Any, dtype: torch.dtype) -> None:
    tensors = mixture()
    results = call(tensors, dtype)
    assert isinstance(results, list)
    assert_all_same(results, expected(tensors, dtype))
    addresses = {tensor.data_ptr() for tensor in tensors if tensor.numel() > 0}
    assert addresses.isdisjoint(result.data_ptr() for result in results)  # new, cast or not


def test_tuple_and_nothing() -> None:
    assert multi_cast([], bf16) == []
    assert_all_same(multi_cast((sample(f32, 3),), bf16), [sample(f32, 3).bfloat16()])


@pytest.mark.parametrize("dtype", [f16, f64, torch.float8_e4m3fn])
def test_out(dtype: torch.dtype) -> None:
    tensors = mixture()
    out = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    versions = [result._version for result in out]
    results = multi_cast(tensors, dtype, out=out)
    assert all(result is given for result, given in zip(results, out, strict=True))
    assert_all_same(results, expected(tensors, dtype))
    # An autograd graph that saved the old contents must notice.
    assert all(result._version > v for result, v in zip(out, versions, strict=True))


def test_out_with_other_strides_and_views() -> None:
    tensors = [sample(f32, 4, 6), sample(f32, 6, 4).t(), sample(f32, 4, 6), sample(f32, 9)[1:]]
    buffer = torch.full((12, 13), -1.0, dtype=bf16)
    out = [
        torch.empty(6, 4, dtype=bf16).t(),
        torch.empty(4, 6, dtype=bf16),
        buffer[::3, 1::2],
        torch.empty(16, dtype=bf16)[3:11],
    ]
    multi_cast(tensors, bf16, out=out)
    for result, tensor in zip(out, tensors, strict=True):
        assert torch.equal(result, tensor.bfloat16())
    assert (buffer == -1).sum() == buffer.numel() - 24  # nothing beside the view was written


def test_reused_out_holds_the_last_call() -> None:
    out = [torch.empty(1000, dtype=bf16)]
    for value in (1.0, 2.0):
        multi_cast([torch.full((1000,), value)], bf16, out=out)
        assert torch.equal(out[0], torch.full((1000,), value, dtype=bf16))


def test_inference_and_meta_tensors() -> None:
    with torch.inference_mode():
        inference = sample(f32, 3)
        out = [torch.empty(3, dtype=f16)]
        multi_cast([inference], f16, out=out)
    assert_all_same(multi_cast([inference], f16), [inference.to(f16)])
    assert_all_same(out, [inference.to(f16)])
    normal = [torch.empty(3, dtype=f16)]
    version = normal[0]._version
    with torch.inference_mode():
        multi_cast([inference], f16, out=normal)
    assert normal[0]._version > version
    (meta,) = multi_cast([torch.empty(4, 6, device="meta").t()], f16)
    assert (meta.device.type, meta.dtype, meta.stride()) == ("meta", f16, (1, 6))


# --- gradients


@pytest.mark.parametrize("call", [multi_cast, op])
def test_gradients_return_in_each_dtype(call: Any) -> None:
    tensors = [sample(dtype, 3, 5).requires_grad_() for dtype in FLOATS_WITH_GRAD]
    results = call(tensors, f16)
    grads = [sample(f16, 3, 5).flip(0)] * len(tensors)
    for tensor, grad, actual in zip(
        tensors, grads, torch.autograd.grad(results, tensors, grads), strict=True
    ):
        assert_same(actual, grad.to(tensor.dtype))


@pytest.mark.parametrize("kind", [list, tuple])
def test_frozen_tensors_and_absent_gradients(kind: type) -> None:
    tensors = [sample(f32, 3), sample(f32, 3).requires_grad_(), sample(f32, 4).requires_grad_()]
    tensors.append(torch.arange(3))
    results = multi_cast(kind(tensors), bf16)
    assert [result.requires_grad for result in results] == [False, True, True, False]
    assert_all_same([r.detach() for r in results], expected([t.detach() for t in tensors], bf16))
    results[1].sum().backward()  # needs nothing of the others
    assert tensors[1].grad is not None
    assert tensors[2].grad is None
    with torch.no_grad():
        assert not any(result.requires_grad for result in multi_cast(tensors, bf16))


def test_cast_each() -> None:
    """What tensors that require grad go through: a composite op, so aten::to alone is recorded."""
    cast_each = torch.ops.smart_autocast.cast_each.default
    tensors = mixture()
    assert_all_same(cast_each(tensors, f16), expected(tensors, f16))
    weight = sample(f32, 3, 5).requires_grad_()
    (result,) = cast_each([weight], bf16)
    assert result.grad_fn.name() == "ToCopyBackward0"
    torch.library.opcheck(cast_each, ([weight, sample(f16, 3)], bf16))
    assert_same(torch.vmap(lambda x: cast_each([x], bf16)[0])(weight.detach()), result.detach())


@pytest.mark.parametrize("call", [multi_cast, op])
def test_second_gradient_and_transforms(call: Any) -> None:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = call([a, b], f64)
        return (x.pow(3) * y).sum()

    a, b = sample(f32, 3, 5), sample(f16, 3, 5)
    first = torch.func.grad(loss)(a, b)
    torch.testing.assert_close(first, (3 * a.double().pow(2) * b.double()).float())
    assert_same(torch.vmap(torch.func.grad(loss))(a, b), first)
    a.requires_grad_()
    (grad,) = torch.autograd.grad(loss(a, b), a, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), a)
    torch.testing.assert_close(second, (6 * a.detach().double() * b.double()).float())


def test_vmap_over_one_of_two() -> None:
    a, b = sample(f32, 3, 5), sample(f32, 5)
    x, y = torch.vmap(lambda a, b: tuple(multi_cast([a, b], f16)), (1, None), (1, None))(a, b)
    assert_same(x, a.half())
    assert_same(y, b.half())


def test_vmap_takes_no_out() -> None:
    out = torch.empty(3, 5, dtype=f16)
    with pytest.raises(RuntimeError, match=r"multi_cast\.out"):
        torch.vmap(lambda a, o: multi_cast([a], f16, out=[o]))(sample(f32, 3, 5), out)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool) -> None:
    tensors = [
        sample(f32, 3, 5),
        sample(f16, 4).requires_grad_(requires_grad),
        sample(f64, 4, 6).t(),
    ]
    torch.library.opcheck(op, (tensors, bf16))
    out = [torch.empty_like(tensor, dtype=bf16, requires_grad=False) for tensor in tensors]
    torch.library.opcheck(out_op, ([t.detach() for t in tensors], bf16), {"out": out})


def test_compile() -> None:
    torch.compiler.reset()

    def function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x, y = multi_cast([a, b], bf16)
        with torch.no_grad():
            multi_cast([b], bf16, out=[out])
        return x * 2 + y + out

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        a, b = sample(f32, 3, 5).requires_grad_(), sample(f64, 3, 5)
        out = torch.empty(3, 5, dtype=bf16)
        result = run(a, b, out)
        result.sum().backward()
        results.append((result.detach(), a.grad, out))
    for actual, wanted in zip(*reversed(results), strict=True):
        assert_same(actual, wanted)


class Called(TorchDispatchMode):
    """Counts the calls of `multi_cast` below autograd."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is op
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", range(1, 9))
def test_few_tensors_are_cast_one_by_one(count: int) -> None:
    tensors = [sample(FLOATS_WITH_GRAD[i % 3], 3, 5).t() for i in range(count)]
    with Called() as called:
        results = multi_cast(tensors, bf16)
    assert_all_same(results, expected(tensors, bf16))
    assert called.count == (count > 6)
    assert all(r.data_ptr() != t.data_ptr() for r, t in zip(results, tensors, strict=True))
    with Called() as called:
        multi_cast([*tensors, torch.empty(2**20)], bf16)  # this one gains by the call
        multi_cast(tensors, torch.float8_e5m2)
    assert called.count == 2


@pytest.mark.parametrize("count", [1, 9, 150])
def test_tensors_that_require_grad_are_cast_one_by_one(count: int) -> None:
    tensors = [sample(f32, 3, 5).requires_grad_() for _ in range(count)]
    large = torch.empty(2**20, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        results = multi_cast([*tensors, large], bf16)
    names = [event.name for event in profile.events()]
    assert names.count("aten::_to_copy") == count + 1
    assert not [name for name in names if "smart_autocast" in name]
    assert_all_same(results[:-1], expected(tensors, bf16))


@pytest.mark.parametrize(
    ("capability", "vendor", "much"),
    [
        ("AVX512", "amd", 2**20),
        ("AVX512", "intel", 7 * 2**20),
        ("AVX2", "amd", 2**22),
        (None, None, 2**22),
    ],
)
def test_one_tensor_in_the_caches_is_cast_by_pytorch_where_that_is_faster(
    capability: str | None, vendor: str | None, much: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert casts._much_alone_on_cpu(capability, vendor) == much
    monkeypatch.setattr(casts, "_MUCH_ALONE_ON_CPU", much)
    tensor = sample(f32, 1024, 1024).t()
    with Called() as called:
        assert_all_same(multi_cast([tensor], bf16), expected([tensor], bf16))
    assert called.count == (much == 2**20)
    low = tensor.to(bf16)
    with Called() as called:  # PyTorch is slow at these two
        assert_all_same(multi_cast([low], f16), expected([low], f16))
    assert called.count == 1


class Subclass(torch.Tensor):
    """Of these, nobody but their own code knows what they hold."""


LOOKS = {"python": casts._look_in_python, "in use": casts._look_at_tensors}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_lists_are_looked_at(look: Any) -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)

    def found(tensors: Any) -> int:
        return look(tensors, casts._PLAIN_TYPES)

    for plain in ([], [tensor], (tensor, frozen)):
        assert found(plain) == casts._FROZEN
    for trained in ([parameter], (tensor, parameter, frozen), [tensor.clone().requires_grad_()]):
        assert found(trained) == casts._TRAINED
    subclass = torch.ones(2).as_subclass(Subclass)
    for other in (tensor, None, iter([tensor]), [tensor, None], [parameter, subclass], {tensor: 1}):
        assert found(other) == casts._NOT_PLAIN


@pytest.mark.skipif(KERNEL_TIER.name != "native", reason="no native library in use")
def test_looking_at_tensors_refuses_other_arguments() -> None:
    for arguments in ((), ([],), ([], [torch.Tensor]), ([], (torch.Tensor,), 1)):
        with pytest.raises(TypeError, match="expected tensors, and a tuple of their types"):
            casts._look_at_tensors(*arguments)


def test_one_large_tensor_is_one_call_below_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_MUCH_ALONE_ON_CPU", 2**20)
    tensor = sample(f32, 2048, 2048).t()
    with Called() as called:
        assert_all_same(multi_cast([tensor], bf16), expected([tensor], bf16))
        weight = tensor.clone().requires_grad_()
        with torch.no_grad():
            assert not multi_cast([weight], bf16)[0].requires_grad
    assert called.count == 2
    multi_cast([weight], bf16)[0].sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))
    hidden = torch.func.grad(lambda x: multi_cast([x], bf16)[0].sum())(tensor)
    assert torch.equal(hidden, torch.ones_like(tensor))


# --- errors


def test_errors_of_tensors_and_dtype() -> None:
    tensor = sample(f32, 3)
    with pytest.raises(TypeError, match="'tensors' must be a list or tuple of tensors, got Tensor"):
        multi_cast(tensor, bf16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got generator; pass list\(tensors\), or \[tensor\]"):
        multi_cast((t for t in [tensor]), bf16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'tensors\[1\]' must be a torch.Tensor, got float; make"):
        multi_cast([tensor, 1.0], bf16)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"'tensors\[0\]' .*, got NoneType; leave it out"):
        multi_cast([None, tensor], bf16)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"that Tensor.to casts to, got torch.float4"):
        multi_cast([tensor], torch.float4_e2m1fn_x2)
    with pytest.raises(TypeError, match=r"'dtype' must be a torch.dtype .* got str"):
        multi_cast([tensor], "bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'dtype' must be a floating dtype .* got torch.int32"):
        multi_cast([tensor], torch.int32)
    with pytest.raises(RuntimeError, match="multi_cast: argument 'dtype' must be a floating dtype"):
        op([tensor], torch.int32)
    with pytest.raises(RuntimeError, match=r"'tensors' must be a dense tensor .* got a sparse"):
        multi_cast([tensor, tensor.to_sparse()], bf16)
    with pytest.raises(RuntimeError, match="got a sparse"):
        multi_cast([tensor.to_sparse()], bf16)
    with pytest.raises(RuntimeError, match=r"'tensors' must be a dense tensor .* got a complex"):
        multi_cast([tensor.to(torch.complex64)], bf16)


def freed_memory(dtype: torch.dtype, *shape: int, offset: int = 0) -> torch.Tensor:
    """As FSDP leaves a gathered weight, which may lie in the middle of a flat parameter."""
    flat = torch.empty(offset + math.prod(shape), dtype=dtype)
    tensor = flat[offset:].view(shape)
    flat.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("offset", [0, 5])
def test_freed_memory_is_an_error_and_nothing_is_written(offset: int) -> None:
    from autocast_backend import cast_with_stats, unscale_cast

    without_memory = functools.partial(freed_memory, offset=offset)
    freed, a, scale = without_memory(f32, 4), sample(f32, 4), torch.tensor(2.0)
    stochastic = {"rounding": "stochastic", "seed": 0}
    message = "no memory|data is not allocated"  # ours; PyTorch's
    for call in (
        lambda: multi_cast([a, freed] * 5, bf16),
        lambda: multi_cast([a, freed], torch.float8_e5m2),
        lambda: multi_cast([a, without_memory(torch.int64, 4)] * 5, bf16),
        lambda: multi_cast([freed], bf16, **stochastic),
        lambda: cast_with_stats(freed, bf16),
        lambda: unscale_cast([a, freed], scale),
        lambda: unscale_cast([a], without_memory(f32)),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    x, y = torch.zeros(4, dtype=bf16), torch.zeros(4, dtype=bf16)
    with pytest.raises(RuntimeError, match=message):
        multi_cast([a, freed], bf16, out=[x, y])
    with pytest.raises(RuntimeError, match=message):
        multi_cast([a, a], bf16, out=[x, without_memory(bf16, 4)])
    with pytest.raises(RuntimeError, match=message):
        unscale_cast([a, freed], scale, bf16, out=[x, y])
    assert_same(x, torch.zeros(4, dtype=bf16))


def test_what_pytorch_does_not_cast_is_an_error_and_nothing_is_written() -> None:
    a = sample(f32, 4)
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    strided = torch.zeros(8, dtype=bf16)[::2]  # by ATen, before the kernel runs
    with pytest.raises(RuntimeError, match=r"'tensors' must be a dense tensor .* got a float4"):
        multi_cast([a, packed], bf16, out=[strided, torch.empty(4, dtype=bf16)])
    assert torch.equal(strided, torch.zeros(4, dtype=bf16))
    if torch.backends.mkldnn.is_available():
        with pytest.raises(RuntimeError, match=r"'tensors' must be .* got an MKLDNN tensor"):
            multi_cast([a, torch.ones(2, 2).to_mkldnn()], bf16)


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int2, torch.bits8], ids=str)
def test_dtypes_without_numbers_are_an_error(dtype: torch.dtype) -> None:
    for tensors in ([torch.empty(2, dtype=dtype)], [sample(f32, 4), torch.empty(2, dtype=dtype)]):
        with pytest.raises(RuntimeError, match=rf"must be a dense .* got a {dtype} tensor, which"):
            multi_cast(tensors, bf16)


def test_jit_trace_keeps_what_is_written() -> None:
    def cast_twice(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.zeros(4), torch.zeros(4, dtype=bf16)
        multi_cast([x], f32, out=[y])
        multi_cast([y], bf16, out=[z])
        return z

    traced = torch.jit.trace(cast_twice, (torch.zeros(4),), check_trace=False)
    x = sample(f32, 4)
    assert_same(traced(x), x.bfloat16())


@pytest.mark.parametrize("threads", [1, 2])
def test_denormal_numbers_are_kept_where_arithmetic_flushes_them(threads: int) -> None:
    from autocast_backend import cast_with_stats

    numbers = torch.arange(1, 2**20, dtype=torch.int32) << 3
    x = numbers.view(f32)
    wanted, before = x.bfloat16(), torch.get_num_threads()
    assert not torch.equal(wanted.view(torch.int16), torch.zeros_like(wanted, dtype=torch.int16))
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        (several, *_) = multi_cast([x] * 4, bf16)
        with_stats, _ = cast_with_stats(x, bf16)
        (written,) = multi_cast([x], bf16, out=[torch.empty_like(wanted)])
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    for result in (several, with_stats, written):
        assert torch.equal(result.view(torch.int16), wanted.view(torch.int16))


def test_mixed_devices_are_an_error() -> None:
    message = r"'tensors' must hold tensors on one device, got tensors\[0\] on cpu and "
    with pytest.raises(RuntimeError, match=message + r"tensors\[2\] on meta; call it once for"):
        multi_cast([*[sample(f32, 3)] * 2, torch.empty(3, device="meta")], bf16)
    with FakeTensorMode(), pytest.raises(RuntimeError, match=message + r".* on cuda:0"):
        multi_cast([torch.empty(3), torch.empty(3, device="cuda")], bf16)


@pytest.mark.parametrize(
    "out", [torch.empty(5, dtype=bf16).as_strided((3, 3), (1, 1)), torch.empty(3, dtype=bf16)]
)
def test_an_out_that_overlaps_in_itself_is_an_error(out: torch.Tensor) -> None:
    tensor, out = sample(f32, 3, 3), out.expand(3, 3)
    with pytest.raises(
        RuntimeError, match=r"'out\[0\]' .* got the strides \(\d, 1\) for the shape"
    ):
        multi_cast([tensor], bf16, out=[out])
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="got the strides"):
        multi_cast([mode.from_tensor(tensor)], bf16, out=[mode.from_tensor(out)])


def test_outs_with_gaps_or_without_elements() -> None:
    tensor, memory = sample(f32, 3, 4), torch.zeros(6, 9, dtype=bf16)
    for out in (memory[::2, :8:2], memory.t()[:3, :4], memory[1:4, 5:]):
        multi_cast([tensor], bf16, out=[out])
        assert torch.equal(out, tensor.bfloat16())
    none = torch.empty(0, 1).expand(0, 3)
    for device in ("cpu", "meta"):
        multi_cast([none.to(device)], bf16, out=[torch.empty_like(none, dtype=bf16, device=device)])


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_change_no_error(count: int, frozen: bool) -> None:
    """Each tensor is a call of its own then, which may have none of these."""
    trained = [sample(f32, 3).requires_grad_() for _ in range(count)]
    others = [sample(f32, 3)] * frozen
    elsewhere = torch.empty(3, device="meta", requires_grad=True)
    for one in (torch.randn(3, dtype=torch.complex64), torch.randn(3, 3).to_sparse()):
        with pytest.raises(RuntimeError, match=r"'tensors' must be a dense tensor"):
            multi_cast([*trained, *others, one.requires_grad_()], bf16)
        with pytest.raises(RuntimeError, match=r"'tensors' must be a dense tensor"):
            multi_cast([one, *others], bf16)
    for tensors in ([*trained, *others, elsewhere], [elsewhere, *others, *trained]):
        with pytest.raises(RuntimeError, match="must hold tensors on one device"):
            multi_cast(tensors, bf16)
    for tensors in ([*trained, elsewhere.detach()], [elsewhere, *[t.detach() for t in trained]]):
        with pytest.raises(RuntimeError, match="must hold tensors on one device"):
            multi_cast(tensors, bf16)


def test_errors_of_out() -> None:
    a, b = sample(f32, 3), sample(f32, 4)

    def call(*out: torch.Tensor) -> None:
        multi_cast([a, b], bf16, out=list(out))

    x, y = torch.empty(3, dtype=bf16), torch.empty(4, dtype=bf16)
    with pytest.raises(RuntimeError, match="must hold as many tensors as 'tensors', 2, got 1"):
        call(x)
    with pytest.raises(RuntimeError, match=r"'out\[1\]' .* torch.bfloat16, got torch.float16"):
        call(x, torch.empty(4, dtype=f16))
    with pytest.raises(RuntimeError, match=r"'tensors\[1\]', \(4,\), got \(2, 2\); make"):
        call(x, torch.empty(2, 2, dtype=bf16))
    with pytest.raises(RuntimeError, match=r"'out\[1\]' must have memory of its own"):
        call(x, torch.empty(1, dtype=bf16).expand(4))
    with pytest.raises(RuntimeError, match=r"on the device of 'tensors', cpu, got meta; make it"):
        call(x, y.to("meta"))
    with pytest.raises(RuntimeError, match=r"requires grad; call it under torch.no_grad"):
        multi_cast([a.clone().requires_grad_(), b], bf16, out=[x, y])
    with pytest.raises(TypeError, match="'out' must be a list or tuple of tensors, got Tensor"):
        multi_cast([a], bf16, out=x)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"'out' must be a dense tensor .* got a sparse"):
        call(x, y.fill_(1).to_sparse())
    call(x, y)  # all that was refused has left it usable


def test_overlapping_out_is_refused() -> None:
    message = "'out' must not overlap"
    memory = torch.zeros(64, dtype=torch.uint8)
    a = sample(f32, 4)
    x = memory[:8].view(bf16)
    with pytest.raises(RuntimeError, match=message + r".* got out\[0\] and out\[1\] in the same"):
        multi_cast([a, a], bf16, out=[x, x])
    with pytest.raises(RuntimeError, match=message):
        multi_cast([a, a], bf16, out=[x, memory[6:14].view(bf16)])
    source = memory[32:48].view(f32)
    for begin in (26, 32, 40, 46):
        with pytest.raises(RuntimeError, match=message):
            multi_cast([source], bf16, out=[memory[begin : begin + 8].view(bf16)])
    multi_cast([source], bf16, out=[memory[24:32].view(bf16)])
    multi_cast([source], bf16, out=[memory[48:56].view(bf16)])
    multi_cast([a, a], bf16, out=[x, memory[8:16].view(bf16)])


def test_out_with_a_stride_that_no_index_uses() -> None:
    tensor, out = sample(f32, 1, 4), torch.empty(4, dtype=bf16)
    multi_cast([tensor], bf16, out=[out.as_strided((1, 4), (0, 1))])
    assert_same(out, tensor[0].bfloat16())


# --- the process around it

native = pytest.mark.skipif(KERNEL_TIER.name != "native", reason="threads are the native kernel's")
THREADS = """
import os, sys, torch
from autocast_backend.ops import multi_cast
torch.set_num_threads(int(sys.argv[1]))
x = torch.empty(1 << 20)
before = len(os.listdir("/proc/self/task"))
multi_cast([x, x[:5]], torch.bfloat16)
print(len(os.listdir("/proc/self/task")) - before)
"""


@native
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux does")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads(threads: int) -> None:
    """The threads come with the first call that uses them: one fewer than are asked for."""
    command = [sys.executable, "-c", THREADS, str(threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) == threads - 1


def _cast_in_child(queue: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    (result,) = op([torch.full((100000,), 3.0)], bf16)
    queue.put(float(result.double().sum()))


def test_fork_after_use() -> None:
    op([torch.empty(1 << 20)], bf16)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_cast_in_child, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert queue.get() == 300000.0
