"""`torch.ops.smart_autocast` in a process that imports torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autocast_backend.ops import KERNEL_TIER
from tests.forked import forked, printed

START = """
import sys, torch
assert "autocast_backend.ops" not in sys.modules
bf16 = torch.bfloat16
"""


Output = Callable[..., str]


@pytest.fixture(scope="module")
def output_of() -> Iterator[Output]:
    with forked("import torch") as run:
        yield lambda program, *arguments: printed(run(START + program, *arguments))


def test_an_op_is_there_when_it_is_asked_for(output_of: Output) -> None:
    assert output_of("print(torch.ops.smart_autocast.multi_cast([torch.ones(1)], bf16))") == (
        "[tensor([1.], dtype=torch.bfloat16)]\n"
    )


@pytest.mark.slow
def test_torch_lists_it_among_its_namespaces(output_of: Output) -> None:
    # torch.export looks there for composite ops to preserve.
    program = "print('smart_autocast' in torch.ops, len(list(torch.ops.smart_autocast)))"
    assert output_of(program) == "True 0\n"


def test_a_name_that_is_no_op_is_an_attribute_error(output_of: Output) -> None:
    assert output_of("print(hasattr(torch.ops.smart_autocast, 'no_op'))") == "False\n"


def test_two_threads_may_ask_first(output_of: Output) -> None:
    program = """
import threading
together, dtypes = threading.Barrier(4), []
def first():
    together.wait()
    dtypes.append(torch.ops.smart_autocast.cast(torch.ones(1), bf16).dtype)
threads = [threading.Thread(target=first) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
print(dtypes == [bf16] * 4)
"""
    assert output_of(program) == "True\n"


def test_a_thread_gets_no_op_before_all_of_it_is_there(output_of: Output) -> None:
    """The native library has the kernels, Python adds the gradients after it."""
    program = """
import threading
x = torch.ones(1, requires_grad=True)
def second():
    torch.ops.smart_autocast.multi_cast([x], bf16)[0].sum().backward()
thread, library = threading.Thread(target=second), torch.library.Library
def slow(*args):
    if args[1] == "FRAGMENT" and not thread.ident:
        thread.start(), thread.join(1)
    return library(*args)
torch.library.Library = slow
torch.ops.smart_autocast.multi_cast
thread.join()
print(x.grad)
"""
    assert output_of(program) == "tensor([1.])\n"


@pytest.mark.skipif(KERNEL_TIER.library is None, reason="no native library")
def test_a_library_that_was_loaded_alone_gets_its_gradients(output_of: Output) -> None:
    program = """
torch.ops.load_library(sys.argv[1])
x = torch.ones(1, requires_grad=True)
torch.ops.smart_autocast.multi_cast([x], bf16)[0].sum().backward()
print(x.grad)
"""
    assert output_of(program, str(KERNEL_TIER.library)) == "tensor([1.])\n"


@pytest.mark.slow
def test_dynamo_traces_an_op_that_is_not_loaded_yet(output_of: Output) -> None:
    program = """
@torch.compile(backend="eager", fullgraph=True)
def cast(x):
    return torch.ops.smart_autocast.cast(x, bf16)
print(cast(torch.ones(1)))
"""
    assert output_of(program) == "tensor([1.], dtype=torch.bfloat16)\n"


class Cast(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.smart_autocast.autocast_to_bf16(x)


@pytest.mark.slow
def test_a_saved_program_loads(output_of: Output, tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Cast(), (torch.ones(1),)), path)
    program = "print(torch.export.load(sys.argv[1]).module()(torch.ones(1)))"
    assert output_of(program, str(path)) == "tensor([1.], dtype=torch.bfloat16)\n"


def test_torchscript_finds_an_op(output_of: Output, tmp_path: Path) -> None:
    # It wants the source in a file.
    path = tmp_path / "script.py"
    path.write_text(
        "import torch\n"
        "@torch.jit.script\n"
        "def cast(x: torch.Tensor):\n"
        "    return torch.ops.smart_autocast.cast(x, torch.float64)\n"
    )
    program = "sys.path.insert(0, sys.argv[1]); import script; print(script.cast(torch.ones(1)))"
    assert output_of(program, str(tmp_path)) == "tensor([1.], dtype=torch.float64)\n"
