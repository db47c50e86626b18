"""`lower` and `module`: what they do to a program, beyond the round trips."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import autocast_backend.export
from autocast_backend import lower_autocast
from autocast_backend._torch.autocast import enter_autocast, exit_autocast, wrap_with_autocast
from autocast_backend.graphs import nodes_of
from autocast_backend.policies.overrides import PolicyError
from autocast_backend.regions import RegionError, hops_to_regions
from tests.export.support import Region, cuda_dtypes, dtypes, export, save_and_load
from tests.support import BF16, assert_same_bits, capture, needs_torch, targets

lower, module = autocast_backend.export.lower, autocast_backend.export.module
lower_with_report = autocast_backend.export.lower_with_report
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """The weight is used twice."""

    def __init__(self, region: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.region = nn.Linear(8, 8), region

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(**BF16) if self.region else contextlib.nullcontext():
            return self.layer(F.gelu(self.layer(x)))


def test_the_given_program_is_left_alone() -> None:
    program = torch.export.export(Layer(region=True), (X,))
    before = str(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(program)
    assert str(program) == before


class Slope(nn.Module):
    """Exported, this keeps wrappers of `torch.func` for constants, and gives a fake tensor."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(**BF16):
            return torch.func.grad(lambda y: (y @ y.T).float().sum())(x)


@needs_torch(2, 13, because="torch.export raises an AssertionError")
def test_an_export_of_a_transform_that_does_not_run_itself() -> None:
    program = torch.export.export(Slope(), (X,), strict=False)
    with pytest.raises(ValueError, match=r"^exported_program: .*'lifted_tensor_.*torch\.func"):
        lower(program)


def test_lowered_twice_is_lowered_once() -> None:
    lowered = lower(torch.export.export(Layer(region=True), (X,)))
    assert str(lower(lowered).graph) == str(lowered.graph)


def test_a_strict_export() -> None:
    """Its nodes still hold example values of Dynamo's, which are none of this program."""
    program = torch.export.export(Layer(region=True), (X,), strict=True)
    lowered, report = autocast_backend.export.lower_with_report(program)
    assert (report.lowered, report.bracketed) == (2, [])
    assert_same_bits(save_and_load(lowered).module()(X), Layer(region=True)(X))


class Norm(nn.Module):
    """`float()` is a cast under autocast, and would be none without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(**BF16):
            y = self.layer(x)
            return y * 1.001, y.float().norm()


def test_a_strict_export_that_does_not_run_itself() -> None:
    """It has `float()` for nothing, and reads its result for `y`, which is float32 then."""
    program = torch.export.export(Norm(), (X,), strict=True)
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        program.module()(X)
    with pytest.raises(ValueError, match=r"linear.*test_program.*float32.*bfloat16.*strict=False"):
        lower(program)
    lowered = lower(torch.export.export(Norm(), (X,), strict=False))
    for run in (lowered.module(), module(lowered)):
        assert_same_bits(run(X), Norm()(X))


class NormOfBranch(Norm):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(**BF16):
            y = self.layer(x)
            y = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,))
            return y * 1.001, y.float().norm()


def test_a_strict_export_with_branches_that_does_not_run_itself() -> None:
    program = torch.export.export(NormOfBranch(), (X,), strict=True)
    with pytest.raises(ValueError, match=r"was exported as torch.float32.*strict=False"):
        lower(program)
    lowered = lower(torch.export.export(NormOfBranch(), (X,), strict=False))
    assert_same_bits(lowered.module()(X), NormOfBranch()(X))


class Grid(nn.Module):
    """Its dtype under autocast is not what fake tensors say."""

    def forward(self, theta: Tensor) -> Tensor:
        with torch.autocast(**BF16):
            return F.affine_grid(theta, (1, 1, 4, 4)).float()


def test_what_fake_tensors_do_not_show_is_no_matter_of_a_strict_export() -> None:
    theta = torch.randn(1, 2, 3)
    program = torch.export.export(Grid(), (theta,), strict=False)
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        program.module()(theta)
    with pytest.raises(ValueError, match=r"affine_grid.*float32.*bfloat16.*enabled=False"):
        lower(program)


class Average(nn.Module):
    """Writes to a buffer, and to its input, what it computes in a region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        with torch.autocast(**BF16):
            y = self.layer(x)
        kept[:, 1:2].copy_(y.float()[:, :1])
        self.state.copy_(y.float())
        first, second = y.float().chunk(2, -1)
        doubled = first * 2 if torch.is_grad_enabled() else first.mul_(2)
        return doubled + second + self.state[:, :4]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_programs_that_write_to_what_they_are_given(strict: bool, grad: bool) -> None:
    kept = torch.zeros(4, 8)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(Average().requires_grad_(grad), (X, kept), strict=strict)
    if strict:  # its dtypes are those of a model without the region
        with pytest.raises(ValueError, match="strict=False"):
            lower(program)
        return
    lowered = lower(program)
    with torch.no_grad():
        assert_same_bits(lowered.module()(X, kept.clone()), Average()(X, kept.clone()))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(**BF16):
            return self.layer(x, x * 2)


def test_what_later_traces_lose_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="autocast_backend"):
        lowered = lower(torch.export.export(Bilinear(), (X,)))
        assert_same_bits(lowered.module()(X), Bilinear()(X))
        (warning,) = caplog.messages
        assert "the call of bilinear" in warning
        assert "run_decompositions()" in warning
        caplog.clear()
        lower(torch.export.export(Layer(region=True), (X,)))
        assert not caplog.messages


class NamedAsBuiltins(nn.Module):
    """FX names no node of its own after a Python builtin, but export does: after the inputs. `max`
    is then the name of an input, and `max_1` that of a result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, input: Tensor, max: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(**BF16):
            y = self.layer(input)
        self.count.add_(1)
        max.mul_(2)
        return y, torch.max(y @ y.T), input, max + self.count


@pytest.mark.parametrize("strict", [False, True])
def test_inputs_with_names_of_builtins(strict: bool) -> None:
    program = torch.export.export(NamedAsBuiltins(), (X, X[:, 0].clone()), strict=strict)
    lowered = lower(program)
    assert str(lowered.graph_signature) == str(program.graph_signature)
    assert str(hops_to_regions(program.graph_module, program.graph_signature)[1]) == str(
        program.graph_signature
    )
    assert {"input", "max", "max_1"} <= {node.name for node in lowered.graph.nodes}
    run, model = module(lowered), NamedAsBuiltins()
    for _ in range(2):
        expected = model(X, written := X[:, 0].clone())
        assert_same_bits(run(X, w := X[:, 0].clone()), expected)
        assert_same_bits(w, written)


@pytest.mark.parametrize("model", [nn.Linear(8, 8), nn.GRU(8, 4)], ids=["Linear", "GRU"])
def test_modules_whose_input_is_called_input(model: nn.Module) -> None:
    lowered = lower(torch.export.export(model, (X,)), ambient=BF16)
    with torch.autocast(**BF16):
        expected = model(X)
    assert_same_bits(save_and_load(lowered).module()(X), expected)


def test_the_proof_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Fake tensors log each refusal as an error; trying is none."""

    def function(region: Region, x: Tensor, y: Tensor) -> Any:
        with region():
            return torch.baddbmm(x[None], x[None], y[None])

    program = export(function, X[:, :4], X[:, 4:])
    caplog.clear()
    lower(program)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


class MovingAverage(Layer):
    """In evaluation mode nothing is left of the update; in training the region returns nothing."""

    def __init__(self) -> None:
        super().__init__(region=True)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        with torch.no_grad():
            if self.training:
                torch._foreach_lerp_([self.average], [mean], 0.1)
        return super().forward(x) + self.average


@pytest.mark.parametrize("training", [True, False])
def test_regions_that_return_nothing_can_be_stored(training: bool) -> None:
    lowered = lower(torch.export.export(MovingAverage().train(training), (X,)))
    for program in (save_and_load(lowered), save_and_load(lowered).run_decompositions()):
        run, expected = program.module(), MovingAverage().train(training)
        for _ in range(2):
            assert_same_bits(run(X), expected(X))
        assert_same_bits(run.average, expected.average)


def test_unflattened() -> None:
    """Also where the call of a module inside of a region was to be preserved, which `torch.export`
    gives up without a word."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(**BF16):
                return self.inner(x.relu()) + x

    expected = Outer()(X)
    for preserved in ((), ("inner",)):
        program = torch.export.export(Outer(), (X,), preserve_module_call_signature=preserved)
        lowered = save_and_load(lower(program))
        assert_same_bits(torch.export.unflatten(lowered)(X), expected)
        assert not any("tracepoint" in name for name in targets(lowered.graph_module))


def test_the_package_finds_its_parts() -> None:
    code = "import autocast_backend as a; print(a.export.lower.__name__, a.regions.RegionError)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.startswith("lower <class"), result.stderr


def test_around_a_program_without_regions() -> None:
    """`ambient` puts all of it under autocast, as a context manager around the model would."""
    program = torch.export.export(Layer(), (X,))
    lowered = save_and_load(lower(program, ambient=BF16))
    with torch.autocast(**BF16):
        expected = Layer()(X)
    assert expected.dtype is torch.bfloat16
    assert_same_bits(lowered.module()(X), expected)
    assert_same_bits(lower(program).module()(X), Layer()(X))  # and without it, none of it


def test_a_check_of_a_result_follows_the_ambient_state() -> None:
    """`y.float()` checks the dtype that `y` had when it was exported, which is another now."""

    def function(region: Region, x: Tensor) -> Any:
        y = x @ x.t()
        return y.relu(), y.float() + 1

    program = export(function, X)
    (check,) = checks(program)
    assert check.kwargs["dtype"] is torch.float32
    lowered = lower(program, ambient=BF16)
    (check,) = checks(lowered)
    assert check.kwargs["dtype"] is torch.bfloat16
    assert lowered.module()(X)[1].dtype is torch.float32


def test_export_itself_takes_a_cast_of_nothing_for_its_argument() -> None:
    """A limit: where `.float()` did nothing when the model was exported, whatever reads its
    argument later reads its result. This program gives float32 twice; eager, for bfloat16, once."""

    def function(region: Region, x: Tensor) -> Any:
        return x.float() * 2, x * 2

    program = lower(export(function, X))
    assert dtypes(module(program)(X.bfloat16())) == [torch.float32, torch.float32]
    program = lower(export(function, X.bfloat16()))
    for given in (torch.bfloat16, torch.float32, torch.float16):
        assert dtypes(module(program)(X.to(given))) == [torch.float32, given]


def test_gradients_of_a_reused_weight() -> None:
    """Eager autocast casts a weight once, and adds its gradients up in the lower precision. Export
    switches that cache off, so the exported program itself does not."""
    program = torch.export.export(Layer(region=True), (X,))

    def gradient(model: nn.Module) -> Tensor:
        model(X).float().square().sum().backward()
        return next(p for name, p in model.named_parameters() if name.endswith("weight")).grad

    expected = gradient(Layer(region=True))
    assert_same_bits(gradient(module(lower(program))), expected)
    assert not torch.equal(gradient(program.module()), expected)


@pytest.mark.parametrize("device_type", [None, "cpu", "cuda"])
def test_an_override_that_a_call_cannot_take(device_type: str | None) -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(**BF16):
                return x.flatten() @ x.flatten()

    program = torch.export.export(Flat(), (X,))
    with pytest.raises(PolicyError, match="'aten::flatten'"):
        lower(program, device_type=device_type, policies={"op": {"aten::flatten": "fp32"}})


RETURNS_WHAT_IT_GETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cpu": lambda w, x: w.cpu(),
    "device": lambda w, x: w.to(x.device),
    "dropout": lambda w, x: F.dropout(w, 0.5, training=False),
    "memory_format": lambda w, x: w.to(memory_format=torch.contiguous_format),
    "positive": lambda w, x: +w,
    "real": lambda w, x: w.real,
    "resolve_conj": lambda w, x: w.resolve_conj(),
}


@pytest.mark.parametrize("name", RETURNS_WHAT_IT_GETS)
def test_gradients_of_a_weight_that_calls_return_as_it_is(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8).sin())

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(**BF16):
                y = x[:, :8] @ RETURNS_WHAT_IT_GETS[name](self.weight, x)
                return y @ self.weight + y @ RETURNS_WHAT_IT_GETS[name](self.weight, x).sin()

    def gradient(model: nn.Module) -> Tensor:
        model(X).float().square().sum().backward()
        return next(model.parameters()).grad

    program = torch.export.export(Model(), (X,))
    expected = gradient(Model())
    assert not torch.equal(gradient(program.module()), expected), "a case that shows nothing"
    assert_same_bits(gradient(module(lower(program))), expected)


class Power(nn.Module):
    def forward(self, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(**BF16):
            return torch.linalg.matrix_power(w, 3), w @ w


def test_gradients_of_a_weight_that_a_composite_reads_several_times() -> None:
    """Of a weight in float16 eager autocast would keep no cast, and `matrix_power` make three."""

    def gradient(run: Any) -> Tensor:
        w = X[:, :4].clone().requires_grad_()
        sum(y.float().square().mean() for y in run(w)).backward()
        return w.grad

    program = torch.export.export(Power(), (X[:, :4].clone().requires_grad_(),))
    lowered, report = autocast_backend.export.lower_with_report(program)
    assert not report.bracketed
    assert_same_bits(gradient(module(lowered)), gradient(Power()))


def checks(program: ExportedProgram) -> list[fx.Node]:
    check = torch.ops.aten._assert_tensor_metadata.default
    return [n for n in nodes_of(program.graph_module) if n.target is check]


def cuda_policies(region: Region, x: Tensor) -> Any:
    with region():
        h, y = x @ x.t(), x.narrow(1, 0, 4)  # x[:, :4] asks CUDA itself
        out = [h.exp(), F.softmax(h, -1), h.sum(), h.sum(-1, keepdim=True), torch.linalg.norm(h)]
        out += [torch.cumsum(h, 0), h.prod(0), F.layer_norm(h, h.shape[-1:]), h + y]
        out += [torch.addcmul(h, out[0], y), F.log_softmax(h, -1, dtype=torch.float64)]
        return [*out, h]


ALL = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("traced", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", ALL)
def test_cuda_policies_of_a_program_exported_on_the_cpu(
    traced: torch.dtype, given: torch.dtype
) -> None:
    """Result dtypes of CUDA's autocast, for each input dtype, from one program that was saved.
    Exported with float64, where autocast has no dtype for `softmax`, it can be saved too."""
    program = export(cuda_policies, X.to(traced), dtype=torch.float16)
    lowered = save_and_load(lower(program, device_type="cuda"))
    asking = targets(lowered.graph_module).count("full_precision_dtype.default")
    assert asking == (7 if traced is torch.float32 else 1)  # the model itself asks for one dtype
    lowered.run_decompositions()
    actual = dtypes(module(lowered)(X.to(given)))
    assert actual == cuda_dtypes(cuda_policies, X.to(given))
    if given is not torch.float64:
        assert actual != dtypes(module(lower(program))(X.to(given)))  # the CPU's are others


def test_a_program_for_cuda_stays_on_the_cpu() -> None:
    program = export(cuda_policies, X, dtype=torch.float16)
    lowered = lower(program, device_type="cuda")
    values = [n.meta.get("val") for n in nodes_of(lowered.graph_module)]
    devices = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    devices |= {
        n.kwargs["device"].type for n in nodes_of(lowered.graph_module) if "device" in n.kwargs
    }
    assert devices == {"cpu"}


def test_a_composite_that_is_written_out_for_cuda() -> None:
    """`cross_entropy` of logits in a lower precision: exported programs hold ATen ops alone."""

    def function(region: Region, x: Tensor, classes: Tensor) -> Any:
        with region():
            return F.cross_entropy(x, classes)

    inputs = (X.bfloat16(), torch.zeros(4, dtype=torch.long))
    program = export(function, *inputs)
    lowered, report = autocast_backend.export.lower_with_report(program, device_type="cuda")
    assert not report.bracketed
    assert {"log_softmax.int", "nll_loss_nd.default"} < set(targets(lowered.graph_module))
    assert dtypes(save_and_load(lowered).module()(*inputs)) == cuda_dtypes(function, *inputs)


def test_a_composite_that_hides_a_policy() -> None:
    """`pad` runs in float32 under autocast, which is not to be seen while its argument is float32:
    only the proof for other dtypes finds the cast."""

    def function(region: Region, x: Tensor) -> Any:
        with region():
            return F.pad(x, (1, 1), mode="reflect")

    lowered = lower(export(function, X))
    assert "autocast_to_full_precision.default" in targets(lowered.graph_module)
    for given in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        expected = torch.float64 if given is torch.float64 else torch.float32
        assert dtypes(module(lowered)(X.to(given))) == [expected]


def test_lowered_in_inference_mode() -> None:
    """There, who looks below autograd sees composite ops whole, and none of the casts inside."""

    def function(region: Region, x: Tensor, y: Tensor, *weights: Tensor) -> Any:
        with region():
            return torch.gru_cell(x, y, *weights)

    inputs = [torch.randn(3, 7) for _ in range(2)] + [torch.randn(21, 7) for _ in range(2)]
    program = export(function, *inputs)
    with torch.inference_mode():
        lowered = lower(program)
    assert_same_bits(lowered.module()(*inputs), program.module()(*inputs))


def test_what_holds_for_one_dtype_only_stays_under_autocast() -> None:
    """`hstack` promotes inside: nothing to do for float32 alone, and no cast of single arguments
    does it for mixed dtypes. The call is kept, with its reason, and right for all dtypes."""

    def function(region: Region, x: Tensor, y: Tensor) -> Any:
        with region(dtype=torch.float16):
            return torch.hstack([x, y]), x.relu()

    lowered, report = autocast_backend.export.lower_with_report(export(function, X, X + 1))
    (kept,) = report.bracketed
    assert "hstack" in kept.call
    assert kept.reason.startswith("for other dtypes")
    assert [
        n.args[:3] for n in nodes_of(lowered.graph_module) if n.target is wrap_with_autocast
    ] == [("cpu", torch.float16, True)]


def test_a_weight_that_a_transform_reads_as_it_is_too() -> None:
    """The transform stays under autocast, and with it what its calls read: the weight, not the cast
    that one of them would make."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda v: (v @ self.weight).float() + self.weight.to(v.dtype))(x)

    x = X.expand(2, 4, 8)[:, :, None, :] * torch.ones(8, 1)
    with torch.autocast(**BF16):
        expected = Model()(x)
    lowered = lower(torch.export.export(Model(), (x,)), ambient=BF16)
    assert_same_bits(module(lowered)(x), expected)


def test_casts_of_the_user_stay() -> None:
    def function(region: Region, x: Tensor, y: Tensor) -> Any:
        with region():
            return x.to(torch.float32), y.to(x.dtype)

    run = module(lower(export(function, X, X.double())))
    assert dtypes(run(X.bfloat16(), X.double())) == [torch.float32, torch.float32]


@pytest.mark.parametrize("strict", [False, True])
def test_moves_keep_the_dtype_of_their_tensor(strict: bool) -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            moved = x.to(self.layer.weight.device)
            copied = moved.to("cpu", copy=True)
            last = x[None, None].to(memory_format=torch.channels_last)
            return moved.exp(), copied, last, self.layer(copied).cpu(), x.to("cpu", torch.float32)

    model = Moves()
    program = torch.export.export(model, (X,), strict=strict)
    run = module(lower(program))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = X.to(dtype)
        assert_same_bits(run.to(dtype)(x), model.to(dtype)(x))
    model.float()
    with torch.autocast(**BF16):
        expected = model(X)
    assert_same_bits(lower(program, ambient=BF16).module()(X), expected)

    def function(x: Tensor) -> Tensor:
        return (x @ x.t()).cpu()

    traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(X)
    with torch.autocast(**BF16):
        expected = function(X)
    assert_same_bits(lower_autocast(traced, ambient=BF16)(X), expected)


def checked(region: Region, x: Tensor, index: Tensor) -> Any:
    with region():
        return x.float() @ x.float().t(), index.long(), index.int()


def test_the_checks_that_are_lifted_and_those_that_stay() -> None:
    index = torch.arange(3)
    program = lower(export(checked, X, index))
    with pytest.raises(RuntimeError, match="Tensor dtype mismatch!"):
        program.module()(X.bfloat16(), index)
    run = module(program)
    assert dtypes(run(X.bfloat16(), index)) == [torch.bfloat16, torch.int64, torch.int32]
    with pytest.raises(RuntimeError, match="Expected: a floating-point dtype"):
        run(X.long(), index)
    with pytest.raises(RuntimeError, match="Tensor dtype mismatch!"):
        run(X, index.int())
    with pytest.raises(RuntimeError, match="Tensor layout mismatch!"):
        run(X.to_sparse(), index)
    with pytest.raises(AssertionError, match="Guard failed"):
        run(X[:2], index)


def test_the_bounds_of_a_dynamic_shape_stay() -> None:
    program = torch.export.export(
        Layer(region=True), (X,), dynamic_shapes=({0: Dim("rows", min=2, max=8)},)
    )
    run = module(lower(program))
    assert run(X[:3].bfloat16()).shape == (3, 8)
    with pytest.raises(AssertionError, match="Guard failed"):
        run(torch.randn(9, 8))


def test_a_module_of_another_dtype_leaves_the_program() -> None:
    program = lower(torch.export.export(Layer(region=True), (X,)))
    run = module(program).to(torch.bfloat16)
    assert {p.dtype for p in run.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in program.parameters()} == {torch.float32}
    assert_same_bits(run(X.bfloat16()), Layer(region=True).to(torch.bfloat16)(X.bfloat16()))


def test_arguments_that_are_refused() -> None:
    program = torch.export.export(Layer(region=True), (X,))
    with pytest.raises(TypeError, match=r"exported_program: expected.*got Layer"):
        lower(Layer())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"exported_program: expected.*got Layer"):
        module(Layer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Lower it first"):
        lower(program.run_decompositions())
    for other in ("gpu", "maia"):  # fake tensors of MAIA know no autocast
        with pytest.raises(ValueError, match=rf"device_type: expected one of cpu, .*got '{other}'"):
            lower(program, device_type=other)
    with pytest.raises(TypeError, match="device_type: expected a string or None; got 3"):
        lower(program, device_type=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ambient: unknown torch\.autocast argument"):
        lower(program, ambient={"device": "cpu"})
    with pytest.raises(ValueError, match=r"ambient: expected autocast for 'cuda'.*got .* for cpu"):
        lower(program, ambient=BF16, device_type="cuda")


def traced(x: Tensor, w: Tensor) -> Any:
    with torch.autocast(**BF16):
        y = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            pass
        with torch.autocast("cpu", enabled=False):
            sizes = y.shape[0] * 2
        with torch.autocast(**BF16):
            z = y @ y.t()
    with torch.autocast("cpu", dtype=torch.float16):
        return z.exp(), z @ z, sizes


def test_a_pre_dispatch_graph() -> None:
    """Enter and exit nodes in an ATen graph: nested, adjacent, empty, and changing nothing."""
    w = torch.randn(8, 8)
    graph = make_fx(traced, tracing_mode="fake", pre_dispatch=True)(X, w)
    lowered = lower_autocast(graph)
    assert not any("autocast_" in t and "to_" not in t for t in targets(lowered))
    assert_same_bits(lowered(X, w), traced(X, w))
    assert all("val" in n.meta for n in lowered.graph.nodes if n.op == "call_function")
    assert not any("example_value" in n.meta for n in lowered.graph.nodes)


def test_example_values_of_several_fake_modes() -> None:
    """Each value of a graph that `make_fx` traces with real tensors has a fake mode of its own."""
    graph = make_fx(traced, pre_dispatch=True)(X, torch.randn(8, 8))
    for ambient in ((), BF16):
        with pytest.raises(ValueError, match=r"^graph_module: .* fake modes; .*tracing_mode="):
            lower_autocast(graph, ambient=ambient)


def test_submodules_whose_values_are_to_be_computed_anew() -> None:
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8)))
    FakeTensorProp(graph, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    for arguments in ({"ambient": BF16}, {"policies": {"op": {"aten::linear": "fp32"}}}):
        with pytest.raises(ValueError, match=r"^graph_module: node '_0' calls the submodule '0'"):
            lower_autocast(graph, **arguments)


def applied_twice(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w).relu(), w)


def test_values_that_require_grad_in_a_pre_dispatch_graph() -> None:
    """`make_fx` forgets that inputs require grad. Told so, their gradients add up as in eager."""
    w, v = (torch.eye(8).add(0.3).requires_grad_() for _ in range(2))
    graph = make_fx(applied_twice, tracing_mode="fake", pre_dispatch=True)(X, w)
    value = graph.graph.find_nodes(op="placeholder")[1].meta["val"]
    assert not value.requires_grad
    value.requires_grad_()
    lowered = lower_autocast(graph, ambient=BF16)
    with torch.autocast(**BF16):
        expected = applied_twice(X, w)
    actual = lowered(X, v)
    assert_same_bits(actual, expected)
    for result in (expected, actual):
        result.float().square().sum().backward()
    assert_same_bits(v.grad, w.grad)


@torch.library.custom_op("smart_autocast_tests::product_out", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Autocast has no rule for it, and acts inside."""
    return (x @ w).float()


@product.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1], dtype=torch.float32)


@torch.library.custom_op("smart_autocast_tests::product_into", mutates_args=("y",))
def product_into(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x @ w)


class WithOpaqueOps(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            y = torch.zeros(4, 8)
            product_into(x, w, y)
            return product(x, w) + y + (x @ w)


def test_custom_ops_that_nobody_sees_inside_stay_under_autocast() -> None:
    model, w = WithOpaqueOps(), torch.randn(8, 8)
    program, report = lower_with_report(torch.export.export(model, (X, w)))
    reasons = [one.reason for one in report.bracketed]
    assert [r.split(" has no")[0] for r in reasons] == [
        "the custom op smart_autocast_tests::product_into",
        "the custom op smart_autocast_tests::product_out",
    ]
    assert_same_bits(module(program)(X, w), model(X, w))
    assert_same_bits(lower_autocast(capture(model, X, w))(X, w), (model(X, w),))


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.cond(x.sum() > 0, lambda v: v @ v.t(), lambda v: (v @ v.t()).sin(), (x,))


def test_branches_are_not_lowered_where_values_are_computed_anew() -> None:
    program = torch.export.export(Branches(), (X,))
    assert not lower_with_report(program)[1].bracketed
    (bracketed,) = lower_with_report(program, device_type="cpu")[1].bracketed
    assert "cond is not lowered where the values of a graph are computed anew" in bracketed.reason


def unclosed(graph: fx.Graph) -> None:
    (exit_,) = graph.find_nodes(op="call_function", target=exit_autocast)
    graph.erase_node(exit_)


def unopened(graph: fx.Graph) -> None:
    (enter,) = graph.find_nodes(op="call_function", target=enter_autocast)
    (exit_,) = graph.find_nodes(op="call_function", target=exit_autocast)
    exit_.args = (next(iter(graph.nodes)),)
    graph.erase_node(enter)


@pytest.mark.parametrize("spoil", [unclosed, unopened])
def test_malformed_regions_are_refused(spoil: Any) -> None:
    """With the node, and the line of the nearest call."""
    program = torch.export.export(Layer(region=True), (X,))
    graph, _ = hops_to_regions(program.graph_module)
    spoil(graph.graph)
    with pytest.raises(RegionError, match=r"node _(enter|exit)_autocast.*File.*line \d+"):
        lower_autocast(graph)


def test_overrides() -> None:
    """`policies`, as the backend takes them; checks of dtypes follow."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            with torch.autocast(**BF16):
                h = self.first(x)
                return h.relu(), self.second(x), h.float()

    program = torch.export.export(Model(), (X,))
    lowered = save_and_load(lower(program, policies={"module": {"first": "fp32"}}))
    assert dtypes(lowered.module()(X)) == [torch.float32, torch.bfloat16, torch.float32]
    # The argument is named, and there is no word of torch.compile.
    wrong = r"module 'third' \(fp32\) matches no module; expected one of 'first', 'second'"
    with pytest.raises(ValueError, match=f"^policies: {wrong}$"):
        lower(program, policies={"module": {"third": "fp32"}})


class Padded(nn.Module):
    """Autocast casts what `pad` gets to float32: where it is float32 already, that is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.padding = nn.ReflectionPad1d(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(**BF16):
            return self.padding(x)


@pytest.mark.parametrize(("key", "name"), [("op", "aten::pad"), ("module", "padding")])
@pytest.mark.parametrize(
    ("asked", "expected"), [("off", torch.bfloat16), ({"dtype": torch.float16}, torch.float32)]
)
def test_an_override_holds_for_dtypes_that_the_program_was_not_exported_with(
    key: str, name: str, asked: Any, expected: torch.dtype
) -> None:
    program = torch.export.export(Padded(), (torch.randn(1, 4, 8),))
    policies = {key: {name: asked}}
    lowered, report = autocast_backend.export.lower_with_report(program, policies=policies)
    assert len(report.overridden) == 1
    assert not report.passed_over
    assert module(lowered)(torch.randn(1, 4, 8, dtype=torch.bfloat16)).dtype is expected


def test_a_program_of_bfloat16_inputs_is_right_for_others() -> None:
    """Nothing of the composite's products is to be seen where the inputs have that dtype."""

    def function(region: Region, x: Tensor) -> Tensor:
        with region():
            return torch.inner(x, x)

    run = module(lower(export(function, X.bfloat16())))
    for x in (X, X.bfloat16(), X.half()):
        assert_same_bits(run(x), function(lambda: torch.autocast(**BF16), x))
