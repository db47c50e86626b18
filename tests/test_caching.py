"""Compile caches keep working: a second process over one cache directory compiles nothing, asks
validation nothing, and computes the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from autocast_backend import AutocastState
from autocast_backend.validation import verdicts
from tests.forked import COMPILING, forked, printed
from tests.support import BF16, graph_of, lower_with_report, needs_torch
from tests.test_backend import run_python

# What Inductor makes are then calls of PyTorch's kernels, and nothing for a C++ compiler. (For two
# processes with such code see tests/weights/test_inductor.py.)
WITHOUT_KERNELS = """
from torch._inductor import config, list_mode_options
config.load_config({**config.shallow_copy_dict(), **list_mode_options("lite")})
"""
PROGRAM = """
import contextlib, json, torch
from torch import nn
from torch._dynamo.utils import counters

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        region = torch.autocast("cpu", torch.bfloat16) if {in_graph} else contextlib.nullcontext()
        with region:
            y = self.a(x) + self.a(x + 1)
        return self.b(y.float())

{before}
torch.manual_seed(0)
model = Model()
x = torch.arange(32.0).view(4, 8) / 32
with torch.autocast("cpu", torch.{dtype}, enabled=not {in_graph}):
    out = torch.compile(model, backend="{backend}")(x)
with torch.autocast("cpu", torch.bfloat16, enabled={backward_on}):
    out.float().square().sum().backward()
{after}
aot = counters["aot_autograd"]
print(json.dumps({{
    "hit": aot["autograd_cache_hit"], "miss": aot["autograd_cache_miss"],
    "bypass": aot["autograd_cache_bypass"],
    "checked": counters["smart_autocast"]["checked"],
    "variants": counters["smart_autocast"]["backward_variants"],
    "dtype": str(out.dtype),
    "values": [t.flatten().tolist() for t in (out, *(p.grad for p in model.parameters()))],
}}))
"""


def program(
    backend: str,
    in_graph: bool,
    dtype: str = "bfloat16",
    *,
    backward_on: bool = False,
    before: str = "",
    after: str = "",
) -> str:
    return PROGRAM.format(
        backend=backend,
        in_graph=in_graph,
        dtype=dtype,
        backward_on=backward_on,
        before=before,
        after=after,
    )


Run = Callable[..., Any]


def from_the_start(cache: Path, program: str) -> Any:
    """What a program says that shares nothing with another but the cache directory."""
    result = run_python(WITHOUT_KERNELS + program, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """The same, faster: with torch imported, and the hashes of strings that go with it."""
    with forked(COMPILING) as run_program:

        def run(cache: Path, program: str, before: str = WITHOUT_KERNELS) -> Any:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
            said = printed(run_program(before + program, env=environment))
            return json.loads(said.splitlines()[-1])

        yield run


@pytest.fixture(scope="module")
def in_graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache directory, and what the process said that filled it: a region in the graph, and a
    backward with autocast off."""
    cache = tmp_path_factory.mktemp("in_graph")
    return cache, from_the_start(cache, program("smart_autocast", True))


@pytest.fixture
def unfilled(tmp_path: Path) -> Path:
    """A cache directory without anybody's graphs and verdicts."""
    return tmp_path / "cache"


def assert_second_hits(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    assert (cold["hit"], cold["miss"], cold["bypass"]) == (0, 1, 0)
    assert (warm["hit"], warm["miss"], warm["bypass"]) == (1, 0, 0)
    assert cold["checked"] > 0 == warm["checked"]
    assert warm["values"] == cold["values"]


@pytest.mark.slow
def test_a_second_process_hits_the_caches_and_is_right(
    in_graph: tuple[Path, dict[str, Any]],
) -> None:
    cache, cold = in_graph
    assert_second_hits(cold, from_the_start(cache, program("smart_autocast", True)))


@pytest.mark.slow
def test_a_second_process_under_ambient_autocast(unfilled: Path, run: Run) -> None:
    cold, warm = (run(unfilled, program("smart_autocast", False)) for _ in range(2))
    assert_second_hits(cold, warm)
    # Another ambient dtype over the same caches is another entry, never the first one's.
    other = run(unfilled, program("smart_autocast", False, "float16"))
    assert (other["hit"], other["miss"]) == (0, 1)
    assert other["dtype"] == "torch.float16"


@pytest.mark.slow
def test_a_second_process_follows_another_state_of_its_backward(
    in_graph: tuple[Path, dict[str, Any]], unfilled: Path, run: Run
) -> None:
    """A cache hit brings along the compiled backward of the first process, which ran it in another
    state: it must not serve this one."""
    first_off, off = in_graph
    on = run(unfilled, program("smart_autocast", True, backward_on=True))
    then_on = run(first_off, program("smart_autocast", True, backward_on=True))
    then_off = run(unfilled, program("smart_autocast", True))
    assert [r["hit"] for r in (off, on, then_on, then_off)] == [0, 0, 1, 1]
    assert [r["variants"] for r in (off, on, then_on, then_off)] == [0, 1, 1, 0]
    assert off["values"] == then_off["values"] != on["values"] == then_on["values"]


CHANNELS_LAST = """
import json, torch
from torch import nn
from torch._dynamo.utils import counters

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Linear(8, 8)
    def forward(self, x):
        y = self.a(x).relu()
        with torch.autocast("cpu", enabled=False):
            y = self.b(y.float()).sin()
        return self.c(y.mean((2, 3)))

torch.manual_seed(0)
model = Model()
compiled = torch.compile(model, backend="smart_autocast", dynamic=True)
close = []
for n in (4, 5, 6):
    gradients = []
    for function in (compiled, model):
        with torch.autocast("cpu", torch.bfloat16):
            out = function(torch.ones(n, 3, 8, 8))
        with torch.autocast("cpu", torch.float16):
            gradients.append(torch.autograd.grad(out.mean(), list(model.parameters())))
    close += [torch.allclose(a, b, rtol=0.02, atol=1e-3) for a, b in zip(*gradients)]
print(json.dumps({
    "hit": counters["aot_autograd"]["autograd_cache_hit"] > 0,
    "variants": counters["smart_autocast"]["backward_variants"] > 0,
    "close": close,
}))
"""


@pytest.mark.slow
def test_a_second_process_knows_the_strides_of_dynamic_sizes(unfilled: Path, run: Run) -> None:
    """Inductor has convolutions give channels last, which a backward for another state reads."""
    cold, warm = (run(unfilled, CHANNELS_LAST, before="") for _ in range(2))
    assert (cold["hit"], warm["hit"]) == (False, True)
    assert (cold["variants"], warm["variants"]) == (True, True)
    assert cold["close"] == warm["close"] == [True] * 18


@pytest.mark.slow
def test_a_package_does_not_lose_what_follows_the_state(
    unfilled: Path, run: Run, tmp_path: Path
) -> None:
    """Dynamo's packages call no backend when they are loaded: a graph of ours stays out of them,
    and the second process compiles it again, from the compile caches."""
    file = str(tmp_path / "artifacts")
    write = f"open({file!r}, 'wb').write(torch.compiler.save_cache_artifacts()[0])"
    load = f"torch.compiler.load_cache_artifacts(open({file!r}, 'rb').read())"
    packages = "torch._dynamo.config.caching_precompile = True"
    first = program("smart_autocast", True, before=packages, after=write)
    second = program("smart_autocast", True, backward_on=True, before=f"{packages}\n{load}")
    cold, warm = (run(unfilled, program) for program in (first, second))
    assert [(r["hit"], r["variants"]) for r in (cold, warm)] == [(0, 0), (1, 1)]
    assert warm["values"][0] == cold["values"][0]
    assert all(w != c for w, c in zip(warm["values"][1:-1], cold["values"][1:-1], strict=True))


@pytest.mark.slow
def test_stock_bypasses_its_cache_for_a_region_in_the_graph(unfilled: Path, run: Run) -> None:
    """PyTorch #191106: enter and exit nodes are not cacheable on 2.13. If this fails, torch has
    learned to cache them, and the comparison in the docs must change."""
    stock = run(unfilled, program("inductor", in_graph=True))
    version = torch.torch_version.TorchVersion(torch.__version__)
    if "2.13" <= version < "2.14":  # 2.11 has no such bypass
        assert (stock["hit"], stock["miss"], stock["bypass"]) == (0, 0, 1)


AFTER_STOCK = """
import json, torch

@torch.library.custom_op("smart_autocast_tests::times", mutates_args=())
def times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y

@times.register_fake
def _(x, y):
    return torch.empty_like(x)

def backward(ctx, grad):
    x, y = ctx.saved_tensors
    return grad * y, (x.detach() @ y.detach()).to(grad.dtype)  # a product that reads no gradient

times.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)

def gradients(function):
    torch.manual_seed(0)
    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    out = function(x, y)
    with torch.autocast("cpu", torch.bfloat16, enabled=function is not stock):
        out.sum().backward()
    return x.grad.tolist(), y.grad.tolist()

def model(x, y):
    return times(x, y)

stock = torch.compile(model)
gradients(stock)
torch._dynamo.reset()
ours = gradients(torch.compile(model, backend="smart_autocast"))
print(json.dumps(ours == gradients(model)))
"""


@pytest.mark.slow
def test_what_stock_left_in_the_caches_is_not_ours(unfilled: Path, run: Run) -> None:
    """AOTAutograd's key of a graph is the same, but stock's forward saves the result of a product
    that the backward has to compute under its own state."""
    assert run(unfilled, AFTER_STOCK) is True


CHANGING_NUMBER = """
import json, torch

def clipped(x, y, number):
    return (x @ y).clamp(-number, number) * number

def normalized(x, y, number):
    return torch.nn.functional.rms_norm(x @ y * number, (4,), eps=number + 1)

found = []
for function in (clipped, normalized):
    compiled = torch.compile(function, backend="smart_autocast")
    for grad in (False, True):
        x = torch.ones(4, 4, requires_grad=grad)
        for number in (1.0, 1.5, 2.0):
            with torch.autocast("cpu", torch.bfloat16):
                ours, eager = (f(x, torch.ones(4, 4), number) for f in (compiled, function))
            found.append(torch.allclose(ours, eager, rtol=0.01))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_number_that_became_a_constant_is_another_entry(unfilled: Path, run: Run) -> None:
    """Stock finds the code for another number (PyTorch #194976, #197889)."""
    assert run(unfilled, CHANGING_NUMBER) == [True] * 12


@pytest.mark.slow
def test_a_second_process_guards_on_a_number_that_became_a_constant(
    unfilled: Path, run: Run
) -> None:
    """Stock, and Dynamo with it, takes what the first process compiled for every number."""
    assert [run(unfilled, CHANGING_NUMBER) for _ in range(2)] == [[True] * 12] * 2


CUSTOM = """
import functools, json, torch
from torch._dynamo.utils import counters
from torch.library import Library
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)

class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)
    def __init__(self, x):
        self.x = x
    def __tensor_flatten__(self):
        return ["x"], None
    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Wrapped(inner["x"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = tree_map_only(Wrapped, lambda t: t.x, args)
        return dispatched(func, args, kwargs or dict())

weight = Wrapped(torch.ones(4, 4))
ops, kernels = Library("mine", "FRAGMENT"), Library("aten", "IMPL")
"""
CODE_OF_USERS = (
    CUSTOM
    + """
FACTOR = {factor}
twice.register_autograd(lambda ctx, grad: grad * FACTOR)
ops.define("times(Tensor x) -> Tensor")
ops.impl("times", lambda x: x * FACTOR, "CompositeImplicitAutograd")

def dispatched(func, args, kwargs):
    return func(*args, **kwargs) * FACTOR

@torch.compiler.allow_in_graph
def whole(x):
    return x * FACTOR

@torch.compiler.allow_in_graph
@functools.wraps(torch.nn.functional.mish)
def wrapped(x):
    return x * FACTOR

functions = dict(
    gradient=lambda x: twice(x @ x),
    composite=lambda x: torch.ops.mine.times(x @ x),
    subclass=lambda x: (x @ x).float() * weight,
    checkpoint=lambda x: checkpoint(whole, x @ x, use_reentrant=False),
    wrapped=lambda x: wrapped(x @ x),
    kernel=lambda x: torch.nn.functional.silu(x @ x),
)

def numbers(function):
    x = torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(x)
    out.sum().backward()
    return [out.tolist(), x.grad.tolist()]

found = dict()
for name, function in functions.items():
    if name == "kernel" and FACTOR != 1:
        kernels.impl("silu", lambda x: x * FACTOR, "AutogradCPU")
    compiled = torch.compile(function, backend="{backend}")
    found[name] = numbers(compiled) == numbers(function)
print(json.dumps([found, counters["aot_autograd"]["autograd_cache_hit"]]))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["smart_autocast", "inductor"])
def test_a_second_process_runs_the_code_that_it_has(unfilled: Path, run: Run, backend: str) -> None:
    """AOTAutograd traces what users write for custom ops, for PyTorch's ops and for subclasses of
    tensors, and functions that Dynamo has left whole; of these it leaves out of its cache those
    that are not in a checkpoint and have a name of their own. The others are not in its key, and
    what it traced for the first process, stock uses again."""
    first, second = (
        run(unfilled, CODE_OF_USERS.format(factor=factor, backend=backend)) for factor in (1, 2)
    )
    names = ["gradient", "composite", "subclass", "checkpoint", "wrapped", "kernel"]
    assert first == [dict.fromkeys(names, True), 0]
    if backend == "smart_autocast":
        assert second == first
    else:  # torch 2.11 has no entries for subclasses
        found, hits = second
        stale = dict.fromkeys(names, False)
        assert found in (stale, {**stale, "subclass": True})
        assert hits == list(found.values()).count(False)


RESULTS_OF_CUSTOM_OPS = (
    CUSTOM
    + """
@torch.library.custom_op("mine::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin().to(torch.{dtype})

@sine.register_fake
def _(x):
    return torch.empty_like(x, dtype=torch.{dtype})

def called(x):
    return sine(x).exp().double().float()

def dispatched(func, args, kwargs):
    result = func(*args, **kwargs)
    return called(result) if func is torch.ops.aten.mul.Tensor else result

twice.register_autograd(lambda ctx, grad: called(grad))
ops.define("composite(Tensor x) -> Tensor")
ops.impl("composite", called, "CompositeImplicitAutograd")
x = torch.arange(16.0).view(4, 4).requires_grad_()

def forward(function):
    with torch.no_grad():
        return function(x)

def gradient(function):
    return torch.autograd.grad(function(x).exp().sum(), x)[0]

found = dict()
for name, numbers, function in (
    ("forward", forward, lambda x: called(x @ x)),
    ("composite", forward, lambda x: torch.ops.mine.composite(x @ x).exp()),
    ("gradient", gradient, lambda x: twice(x / 8)),
    ("dynamic", gradient, lambda x: twice(x / 16)),
    ("subclass", gradient, lambda x: x / 8 * weight),
):
    hits = counters["inductor"]["fxgraph_cache_hit"]
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(function, backend="smart_autocast", dynamic=name == "dynamic")
        close = torch.allclose(numbers(compiled), numbers(function), rtol=0.2)
    found[name] = [close, counters["inductor"]["fxgraph_cache_hit"] - hits]
print(json.dumps(found))
"""
)


@pytest.mark.slow
def test_a_second_process_knows_what_its_custom_ops_return(unfilled: Path, run: Run) -> None:
    """Inductor's key of a graph has the names of ops, and not the dtypes of what they return. Code
    of users, which AOTAutograd traces, may call others than Dynamo's graph does."""
    programs = [
        RESULTS_OF_CUSTOM_OPS.format(dtype=dtype) for dtype in ("bfloat16", "bfloat16", "float32")
    ]
    first, second, other = (run(unfilled, program, before="") for program in programs)
    names = ["forward", "composite", "gradient", "dynamic", "subclass"]
    assert first == {name: [True, 0] for name in names}
    assert second.pop("subclass") in ([True, 1], [True, 2])  # torch 2.11 finds one of the two
    assert second == dict(zip(names, [[True, n] for n in (1, 1, 2, 2)], strict=False))
    forwards = [[True, n] for n in (0, 0, 1, 1, 0)]  # those of `twice` do not call the other
    assert other == dict(zip(names, forwards, strict=True))


LAYOUT = """
import json, torch

@torch.library.custom_op("mine::in_memory", mutates_args=(), tags=[torch.Tag.{layout}])
def in_memory(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided(x.shape, (4, 1)).clone()

@in_memory.register_fake
def _(x):
    return x.new_empty(x.shape)

def function(x):
    return in_memory((x @ x).t() + x)

x = torch.arange(16.0).view(4, 4)
with torch.autocast("cpu", torch.bfloat16):
    ours = torch.compile(function, backend="smart_autocast")(x)
    print(json.dumps(torch.equal(ours, function(x))))
"""


@pytest.mark.slow
def test_a_second_process_knows_which_layout_its_custom_ops_want(unfilled: Path, run: Run) -> None:
    """Stock's keys do not: who gives an op that went wrong the tag it lacks gets the old code."""
    programs = [
        LAYOUT.format(layout=tag)
        for tag in ("flexible_layout", "needs_fixed_stride_order", "needs_exact_strides")
    ]
    assert [run(unfilled, program, before="") for program in programs] == [False, True, True]


ATTENTION = """
import json, torch
from torch.nn.attention import SDPBackend, sdpa_kernel

def attention(q):
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)

{before}
q = torch.arange(256.0).sin().view(1, 2, 16, 8)
with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.{kernel}):
    equal = torch.equal(torch.compile(attention, backend="{backend}")(q), attention(q))
print(json.dumps(equal))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "others"), [("smart_autocast", True), ("inductor", False)])
def test_a_second_process_has_the_kernels_that_it_asks_for(
    unfilled: Path, run: Run, backend: str, others: bool
) -> None:
    """Stock's keys know neither of `sdpa_kernel` nor of what its kernels may do."""
    reduced = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)"
    asked = [("FLASH_ATTENTION", ""), ("MATH", ""), ("MATH", reduced)]
    programs = [
        ATTENTION.format(kernel=kernel, before=before, backend=backend) for kernel, before in asked
    ]
    assert [run(unfilled, program) for program in programs] == [True, others, others]


SHARED_MEMORY = """
import json, torch

def numbers(function, grad):
    memory = torch.arange(20.0).sin().view({shape})
    x, y = (memory.as_strided((4, 4), (4, 1), i) for i in (0, {second}))
    y = y if {shared} else y.clone()
    w = torch.ones(4, 4, requires_grad=grad)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(x, y, w)
    if grad:
        out.sum().backward()
    return [t.tolist() for t in (x, y, out, w.grad) if t is not None]

def function(x, y, w):
    x.mul_(3)
    return y @ w

def is_right(grad):
    try:
        return numbers(compiled, grad) == numbers(function, grad)
    except AssertionError:  # Inductor's code checks sizes
        return False

compiled = torch.compile(function, backend="{backend}")
print(json.dumps([is_right(grad) for grad in (False, True)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "others"), [("smart_autocast", True), ("inductor", False)])
def test_a_second_process_sees_which_inputs_share_memory(
    unfilled: Path, run: Run, backend: str, others: bool
) -> None:
    """AOTAutograd writes to such inputs as to one, or to each alone; its key does not know it."""
    cases = [(4, False, -1), (4, True, -1), (2, True, -1), (2, True, (4, 5))]
    programs = [
        SHARED_MEMORY.format(second=second, shared=shared, shape=shape, backend=backend)
        for second, shared, shape in cases
    ]
    found = [run(unfilled, program) for program in programs]
    assert found == [[True, True], *[[others, others]] * 3]


JOINT_PASS = """
import json, torch
from torch._functorch import config

def change(graph, inputs):
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = torch.ops.aten.{becomes}.default
    return graph

config.joint_custom_pass = change
x = torch.ones(4, 4, requires_grad=True)
with torch.autocast("cpu", torch.bfloat16):
    out = torch.compile(lambda x: (x @ x).sin(), backend="{backend}")(x)
    equal = torch.equal(out, (x @ x).{becomes}())
out.sum().backward()  # there is an entry once that is compiled
print(json.dumps(equal))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "second"), [("smart_autocast", True), ("inductor", False)])
def test_a_second_process_has_its_own_pass_over_joint_graphs(
    unfilled: Path, run: Run, backend: str, second: bool
) -> None:
    """AOTAutograd's key does not know `joint_custom_pass`."""
    programs = [JOINT_PASS.format(becomes=name, backend=backend) for name in ("sin", "cos")]
    assert [run(unfilled, program) for program in programs] == [True, second]


BACKWARD_AFTER_STOCK = """
import contextlib, json, torch
from torch import nn
from torch._dynamo.utils import counters

class Island(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                y = self.b(y.float())
            return self.c(y)

def gradients(backend, backward_on):
    torch.manual_seed(0)
    model, x = Island(), torch.randn(8, 16)
    out = torch.compile(model, backend=backend)(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward_on):
        out.float().sum().backward()
    return [p.grad for p in model.parameters()]

with contextlib.suppress(RuntimeError):  # of a product of two dtypes
    gradients("inductor", True)
torch._dynamo.reset()
counters.clear()
ours = gradients("smart_autocast", False)
hits = counters["inductor"]["fxgraph_cache_hit"]
close = all(map(torch.allclose, ours, gradients("eager", False)))
print(json.dumps({"hits": hits, "close": close}))
"""


@pytest.mark.slow
def test_a_backward_that_stock_compiled_is_not_ours(unfilled: Path, run: Run) -> None:
    """Stock compiles it when it is called, here under autocast, and stores broken code, of patterns
    that only Inductor's whole compiler looks for."""
    assert run(unfilled, BACKWARD_AFTER_STOCK, before="") == {"hits": 0, "close": True}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verdicts, "compile_cache_dir", lambda: str(tmp_path))
    verdicts.forget()
    return tmp_path / "smart_autocast"


def lower_a_product(n: int = 4) -> int:
    """Lower a graph of one call; how many calls were validated."""
    state = AutocastState.of(BF16)
    with FakeTensorMode():
        x = torch.empty(n, n)
        return lower_with_report(graph_of(torch.mm, (x, x), {}, state), state).checked


@needs_torch(2, 13, because="compiled functions have no aot_compile")
def test_what_is_compiled_ahead_of_time_is_refused() -> None:
    """`aot_compile` keeps what AOTAutograd made, and nothing of what we put around it."""

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    torch._dynamo.reset()
    x = torch.ones(4, 4, requires_grad=True)
    compiled = torch.compile(product, backend="smart_autocast", fullgraph=True)
    with pytest.raises(NotImplementedError, match="Call the compiled function instead"):
        compiled.aot_compile(((x,), {}))


def test_verdicts_survive_the_process(store: Path) -> None:
    assert lower_a_product() == 1
    verdicts.forget()
    assert lower_a_product() == 0
    verdicts.forget()
    assert lower_a_product(5) == 1  # another question
    assert len(list(store.iterdir())) == 2


def test_verdicts_of_another_version_do_not_count(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lower_a_product() == 1
    verdicts.forget()
    monkeypatch.setattr(verdicts, "made_with", lambda: "another torch, or another source of ours")
    assert lower_a_product() == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', "null"])
def test_a_damaged_file_is_asked_again_and_replaced(store: Path, content: str) -> None:
    lower_a_product()
    (path,) = store.iterdir()
    good = path.read_text()
    path.write_text(content)
    verdicts.forget()
    assert lower_a_product() == 1
    assert path.read_text() == good


def test_a_bracket_survives_the_process(store: Path) -> None:
    state = AutocastState.of(BF16)

    def lower() -> Any:
        with FakeTensorMode():
            x = torch.empty(4, 4)
            module = graph_of(torch.linalg.matrix_power, (x, 3), {}, state)
            return lower_with_report(module, state)

    first = lower()
    verdicts.forget()
    second = lower()
    assert (first.checked, second.checked) == (1, 0)
    assert [str(b) for b in first.bracketed] == [str(b) for b in second.bracketed] != []


def test_a_bracket_of_a_process_without_the_kernels_of_autograd_is_not_anothers(
    store: Path,
) -> None:
    """Dynamo's errors inside of `torch.func.jvp` may leave a process like that."""

    def bracketed() -> list[str]:
        verdicts.forget()
        state = AutocastState.of(BF16)
        with FakeTensorMode():
            x, w = torch.empty(2, 4, 4), torch.empty(4, 4, requires_grad=True)
            report = lower_with_report(graph_of(F.linear, (x, w), {}, state), state)
        return [b.call for b in report.bracketed]

    with torch._C._AutoDispatchBelowAutograd():
        assert bracketed() == ["linear"]
    assert bracketed() == []


def test_code_that_may_change_between_processes_is_asked_again(store: Path) -> None:
    """A user's function has the same name tomorrow and another body."""

    @torch.library.custom_op("smart_autocast_tests::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @triple.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    state = AutocastState.of(BF16)
    for _ in range(2):
        verdicts.forget()
        with FakeTensorMode():
            x = torch.empty(4, 4)
            op = torch.ops.smart_autocast_tests.triple.default
            assert lower_with_report(graph_of(op, (x,), {}, state), state).checked == 1


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with PyTorch's own caches: read-only homes and full disks are found in containers."""
    in_the_way = tmp_path / "smart_autocast"
    in_the_way.write_text("a file")  # `mkdir` fails for root, too, whom no permissions stop
    monkeypatch.setattr(verdicts, "compile_cache_dir", lambda: str(tmp_path))
    verdicts.forget()
    with caplog.at_level("WARNING", logger="autocast_backend"):
        assert lower_a_product() == 1
    assert "the next process validates again" in caplog.text
    in_the_way.unlink()

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    verdicts.forget()
    with monkeypatch.context() as patch:
        patch.setattr(verdicts.os, "replace", full)
        assert lower_a_product() == 1
    assert list(in_the_way.iterdir()) == []


def test_without_a_cache_directory_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verdicts, "compile_cache_dir", lambda: None)
    monkeypatch.chdir(tmp_path)
    verdicts.forget()
    assert lower_a_product() == 1
    assert list(tmp_path.iterdir()) == []
