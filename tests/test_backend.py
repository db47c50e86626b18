"""The backend as `torch.compile` sees it: found, configured, protected from autocast, and quiet."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from autocast_backend import AutocastState
from autocast_backend.backend import smart_autocast
from autocast_backend.state import contexts_entered
from tests.support import BF16, FP16, assert_same_bits, autocast_put_right, train_step


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


FOUND_WITHOUT_IMPORT = """
import torch
f = torch.compile(lambda x: x @ x, backend="smart_autocast", options={"inner": "aot_eager"})
with torch.autocast("cpu", torch.bfloat16):
    print(f(torch.ones(2, 2)).dtype)
"""


def test_torch_finds_the_backend_without_an_import_of_ours() -> None:
    result = run_python(FOUND_WITHOUT_IMPORT)
    # Nobody has asked for the log.
    assert (result.stdout, result.stderr) == ("torch.bfloat16\n", "")


def test_the_package_names_the_backend() -> None:
    # For where the package is on the path, but not installed, so that nothing finds it by its name.
    import autocast_backend

    assert autocast_backend.smart_autocast is smart_autocast
    assert autocast_backend.backend.smart_autocast is smart_autocast
    compiled = torch.compile(
        lambda x: x @ x, backend=autocast_backend.smart_autocast, options={"inner": "aot_eager"}
    )
    with torch.autocast(**BF16):
        assert compiled(torch.ones(2, 2)).dtype == torch.bfloat16


def test_importing_torch_loads_next_to_nothing_of_ours() -> None:
    """Our entry point runs in every process that imports torch."""
    ours = "sorted(m for m in sys.modules if m.startswith('autocast_backend'))"
    program = f"import sys, torch; print({ours})"
    names = ["autocast_backend", "autocast_backend._logging", "autocast_backend._op_namespace"]
    assert run_python(program).stdout == f"{names}\n"


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch._ops", "_OpNamespace"), ("torch._logging._internal", "register_log")],
)
def test_importing_torch_does_not_depend_on_its_private_names(module: str, name: str) -> None:
    program = (
        f"import {module} as module; del module.{name}\n"
        "from autocast_backend import _logging, _op_namespace\n"
        "_logging.register(), _op_namespace.register(); print('done')"
    )
    result = run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.stdout == "done\n", result.stderr


@pytest.mark.slow
def test_torch_logs_knows_our_name() -> None:
    # Before 2.13, torch reads TORCH_LOGS before it calls our entry point: there it takes only what
    # it can import.
    torch_is_new = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
    name = "smart_autocast" if torch_is_new else "autocast_backend"
    result = run_python(FOUND_WITHOUT_IMPORT, TORCH_LOGS=f"+{name}")
    assert result.returncode == 0, result.stderr
    assert "under cpu: bfloat16: 1 node lowered" in result.stderr
    assert "torch.ops.smart_autocast.autocast_to_bf16.default" in result.stderr


def test_the_log_names_brackets_and_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(**BF16):
            y = torch.linalg.matrix_power(x.sin(), 3)
            return y, torch.linalg.matrix_power(x.cos(), 3)

    torch._dynamo.reset()
    with caplog.at_level("INFO", logger="autocast_backend"):
        options = {"inner": "aot_eager"}
        torch.compile(function, backend="smart_autocast", options=options)(torch.ones(4, 4))
    (line,) = [m for m in caplog.messages if "stays under autocast" in m]
    first, second = line.split("; so does ")  # the reason is said once
    code = function.__code__.co_firstlineno
    for told, number in ((first, code + 2), (second, code + 3)):
        assert "linalg_matrix_power" in told
        assert f'test_backend.py", line {number},' in told


def test_the_counters_count() -> None:
    counters = torch._dynamo.utils.counters["smart_autocast"]
    counters.clear()
    torch._dynamo.reset()
    f = torch.compile(
        lambda x: (x @ x).sin(), backend="smart_autocast", options={"inner": "aot_eager"}
    )
    with torch.autocast(**BF16):
        f(torch.ones(4, 4))
    expected = {"graphs": 1, "lowered": 1, "untouched": 1, "bracketed": 0, "casts": 2}
    assert {name: counters[name] for name in expected} == expected


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "aot_eager_decomp_partition", "callable"])
@pytest.mark.parametrize("region", [BF16, FP16], ids=["bf16", "fp16"])
def test_inner_compilers(inner: Any, region: dict[str, Any]) -> None:
    """Any registered backend, or a callable; those without AOTAutograd run the lowered graph
    itself, with autocast off."""
    seen: list[AutocastState] = []

    def compile_nothing(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(AutocastState.current())
            return graph_module(*args)

        return run

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.ones(2, 8)
    options = {"inner": compile_nothing if inner == "callable" else inner}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="smart_autocast", options=options)
    with torch.autocast(**region):
        expected = model(x)
        assert_same_bits(compiled(x), expected)
    assert all(not state.enabled_devices for state in seen)
    assert bool(seen) == (inner == "callable")


@pytest.mark.parametrize("ambient", [False, True])
def test_the_inner_compilers_code_is_disabled_once(ambient: bool) -> None:
    """As with stock: each `torch.compiler.disable` around it is paid for by every call."""
    wrappers: list[int] = []

    def inner(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
            names = [f"{code.co_filename}:{code.co_name}" for code in codes]
            wrappers.append(sum(name.endswith("eval_frame.py:_fn") for name in names))
            return graph_module(*args)

        return torch.compiler.disable(run)

    stock = torch.compile(lambda x: x @ x, backend=inner)
    ours = torch.compile(lambda x: x @ x, backend="smart_autocast", options={"inner": inner})
    with torch.autocast(**BF16, enabled=ambient):
        stock(torch.ones(2, 2))
        ours(torch.ones(2, 2))
    assert wrappers == [1, 1]


def test_another_compiled_function_does_not_trace_the_code() -> None:
    """Who calls the backend himself may call its code in a function that Dynamo traces."""
    traced: list[bool] = []

    def inner(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            traced.append(torch.compiler.is_compiling())
            return graph_module(*args)

        return run

    x = torch.ones(2, 2)
    graph_module = torch.fx.symbolic_trace(lambda x: (x.relu(),))
    code = smart_autocast(graph_module, [x], options={"inner": inner})
    torch.compile(lambda x: code(x)[0], backend="eager")(x)
    assert traced == [False]


def test_who_calls_the_backend_needs_a_graph() -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"^graph_module: expected a torch.fx.GraphModule.*Linear"):
        smart_autocast(model, [torch.ones(2, 2)])


def test_inductor_config_patches_reach_inductor_and_its_lazy_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx, config

    seen = []

    def spy(graph: Any, inputs: Any, **_: Any) -> Any:
        seen.append(config.max_autotune_gemm_backends)
        raise RuntimeError("seen enough")

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", spy)
    torch._dynamo.reset()
    options = {"inductor": {"max_autotune_gemm_backends": "ATEN", "fx_graph_cache": False}}
    compiled = torch.compile(torch.sin, backend="smart_autocast", options=options)
    with pytest.raises(Exception, match="seen enough"):
        compiled(torch.ones(3))
    assert seen == ["ATEN"]
    assert config.max_autotune_gemm_backends != "ATEN"


def test_batch_norms_are_not_moved_into_convolutions_with_casts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Inductor's pass for that scales weights after their casts, by float32 numbers."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    options = {"inductor": {"efficient_conv_bn_eval_fx_passes": True}}
    compiled = torch.compile(model, backend="smart_autocast", options=options)
    x = torch.randn(1, 1, 4, 4)
    with torch.autocast(**BF16), caplog.at_level("INFO", logger="autocast_backend"):
        assert_same_bits(compiled(x), model(x))
    assert any("efficient_conv_bn_eval_fx_passes is off" in message for message in caplog.messages)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_an_error_in_the_model_arrives_unchanged_and_the_state_is_restored(inner: str) -> None:
    class Broken(ValueError):
        pass

    @torch.library.custom_op("smart_autocast_tests::broken", mutates_args=())
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise Broken("from the model")

    @broken.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(**BF16):
            y = torch.linalg.matrix_power(x.sin(), 3)  # stays in a bracket
            return torch.linalg.matrix_power(broken(y).float(), 3)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="smart_autocast", options={"inner": inner})
    for outside in (BF16, {**BF16, "enabled": False}):
        with torch.autocast(**outside):
            before = AutocastState.current()
            with pytest.raises(Broken, match="from the model"):
                compiled(torch.ones(4, 4))
            assert AutocastState.current() == before
            assert contexts_entered() == 1
    assert contexts_entered() == 0
    for dtype in (torch.bfloat16, torch.float16):  # which are not guarded on where it is off
        with AutocastState.off().set("cpu", dtype=dtype).applied():
            with pytest.raises(Broken, match="from the model"):
                compiled(torch.ones(4, 4))
            assert torch.get_autocast_dtype("cpu") is dtype


def test_a_graph_that_raises_while_it_is_compiled_leaves_no_region_entered() -> None:
    """Entered for good, autocast would never clear its weight cache again. Stock leaves it so."""

    @torch.library.custom_op("smart_autocast_tests::no_second_trace", mutates_args=())
    def no_second_trace(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    traced = 0

    @no_second_trace.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        nonlocal traced
        traced += 1
        if traced > 1:
            raise ValueError("traced again")
        return torch.empty_like(x)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            return torch.linalg.matrix_power(no_second_trace(x), 3)  # stays in a bracket

    torch._dynamo.reset()
    with autocast_put_right():
        weight = torch.ones(4, 4, requires_grad=True)
        compiled = torch.compile(function, backend="smart_autocast", options={"inner": "aot_eager"})
        with pytest.raises(Exception, match="traced again"):
            compiled(weight)
        assert contexts_entered() == 0


def test_a_failing_inner_compiler_leaves_the_state_alone() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("inner")

    torch._dynamo.reset()
    compiled = torch.compile(torch.sin, backend="smart_autocast", options={"inner": fails})
    with torch.autocast(**FP16):
        before = AutocastState.current()
        with pytest.raises(Exception, match="inner"):
            compiled(torch.ones(2))
        assert AutocastState.current() == before


def test_another_ambient_state_is_another_compilation() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: x @ x, backend="smart_autocast", options={"inner": "aot_eager"}
    )
    x = torch.ones(2, 2)
    dtypes = [compiled(x).dtype]
    for region in (BF16, FP16, {**BF16, "enabled": False}):
        with torch.autocast(**region):
            dtypes.append(compiled(x).dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16, torch.float32]


def test_another_kernel_of_attention_is_another_compilation() -> None:
    """Dynamo does not ask for it, so stock goes on with the first one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(1, 2, 64, 8, requires_grad=True)

    def attention(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    compiled = torch.compile(
        attention, backend="smart_autocast", options={"inner": "aot_eager"}, fullgraph=True
    )

    def numbers(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.autocast(**BF16):
            out = function(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), x)]

    found = []
    stats = torch._dynamo.utils.counters["stats"]
    graphs = stats["unique_graphs"]
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel):
            found.append(numbers(compiled))
            assert_same_bits(found[-1], numbers(attention))
    assert not torch.equal(found[0][0], found[1][0])
    assert stats["unique_graphs"] == graphs + 2


@pytest.mark.parametrize("options", [{}, {"autocast": BF16}], ids=["ambient", "option"])
def test_a_graph_without_example_values_is_refused_where_autocast_is_on(
    options: dict[str, Any],
) -> None:
    """Nothing can be proved about it, and it must not quietly become float32."""

    def compile_directly() -> Any:
        graph = torch.fx.symbolic_trace(lambda x: (x @ x,))
        return smart_autocast(graph, [torch.ones(4, 4)], options={"inner": "aot_eager", **options})

    expected = pytest.raises(ValueError, match="no node has meta")
    with torch.autocast(**BF16, enabled=not options), expected:
        compile_directly()
    if not options:
        assert compile_directly()(torch.ones(4, 4))[0].dtype == torch.float32


def test_a_graph_outside_every_region_is_compiled_as_stock_compiles_it() -> None:
    def outputs(**compile_arguments: Any) -> Any:
        return train_step(lambda: nn.Linear(8, 8), (torch.ones(2, 8),), **compile_arguments)

    ours = outputs(backend="smart_autocast", options={"inner": "aot_eager"})
    assert_same_bits(ours, outputs(backend="aot_eager"))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            for layer in self.layers:
                x = layer(x).relu()
        return x


@pytest.mark.parametrize("ambient", [False, True], ids=["in_graph", "ambient"])
def test_regions_cut_by_ddps_graph_splits(one_process_group: None, ambient: bool) -> None:
    """DDPOptimizer cuts the graph into buckets and compiles each by itself."""

    def run(backend: str, **compile_arguments: Any) -> tuple[Any, int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = DistributedDataParallel(Deep(), bucket_cap_mb=1)
        compiled = torch.compile(model, backend=backend, **compile_arguments)
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
            out = compiled(torch.ones(2, 512))
        out.float().sum().backward()
        return (out, [p.grad for p in model.parameters()])

    counters = torch._dynamo.utils.counters["smart_autocast"]
    expected = run("aot_eager")
    counters.clear()
    actual = run("smart_autocast", options={"inner": "aot_eager"})
    assert counters["graphs"] > 1
    assert counters["lowered"] >= 4
    assert_same_bits(actual, expected)


class Own(nn.Module):
    """A container of PyTorch's is not compiled in place, with any backend."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_compiled_in_place_before_a_trainer_puts_autocast_around_its_forward() -> None:
    """As accelerate does, after `Module.compile`: Dynamo finds the new forward."""

    def losses_and_weights(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Own()
        if compiled:
            model.compile(backend="smart_autocast", options={"inner": "aot_eager"})
        with_autocast = torch.autocast(**BF16)(type(model).forward)
        model.forward = MethodType(with_autocast, model)  # type: ignore[method-assign]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(4, 8)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *model.parameters()]

    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["smart_autocast"]
    counted.clear()
    assert_same_bits(losses_and_weights(compiled=True), losses_and_weights(compiled=False))
    assert counted["lowered"] == 2
