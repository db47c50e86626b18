import argparse
import gc
import logging
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._decomp.decompositions_for_rng
import torch._dynamo.guards
import torch._dynamo.utils
import torch._inductor.config
import torch.distributed as dist
from torch.fx import GraphModule

from autocast_backend.state import AutocastState, contexts_entered
from tests import support


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs",
        type=int,
        metavar="N",
        help="try N random programs, new ones each time (tests/conformance/test_programs.py), "
        "N random trainings (tests/weights/test_random_trainings.py), and N random models, others "
        "each time (tests/models)",
    )
    parser.addoption(
        "--region-dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="that Dynamo traces PyTorch's lists with (tests/conformance/test_{op,module}_db.py)",
    )
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="of PyTorch's lists (tests/conformance/test_{op,module}_db.py) and of random models "
        "(tests/models); other tests choose their own",
    )
    parser.addoption(
        "--share",
        type=_share,
        metavar="K/N",
        help="of the slow tests, and of the cases of each test that has more than four, only those "
        "that a checksum of their names puts into the K-th of N shares (.ci/run, another for each "
        "commit)",
    )


def _share(text: str) -> str:
    share, _, shares = text.partition("/")
    if not (share.isdecimal() and shares.isdecimal() and 1 <= int(share) <= int(shares)):
        raise argparse.ArgumentTypeError(f"expected K/N, K from 1 to N, such as 1/3, got {text!r}")
    return text


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--share") is None:
        return
    share, shares = map(int, config.getoption("--share").split("/"))
    tests = [item.nodeid.partition("[")[0] for item in items]
    cases = Counter(tests)
    kept, left_out = [], []
    for item, test in zip(items, tests, strict=True):
        shared = item.get_closest_marker("slow") or cases[test] > 4
        elsewhere = shared and zlib.crc32(item.nodeid.encode()) % shares != share - 1
        (left_out if elsewhere else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """The device is known before the modules that make decorators of it are imported."""
    support.DEVICE = config.getoption("--device")
    if support.DEVICE == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device: expected a CUDA device for 'cuda', and torch sees none")


def pytest_collection_finish() -> None:
    """Take off what compiling small graphs takes and changes no result."""
    # The garbage collector need not look again and again at what torch has made when imported.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    # Dynamo has it look after each compilation, `few_classes_of_graphs` when it is time.
    torch._dynamo.config.run_gc_after_compile = False
    # For a line in its log, Dynamo times the guards of each compilation with the processor's caches
    # emptied.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # For another one, it writes down all settings.
    for kind in ("get_dynamo_config", "scrubbed_inductor_config", "functorch_config"):
        setattr(torch._dynamo.utils, f"_{kind}_for_logging", lambda: None)
    # AOTAutograd makes six tensors on fake ones each time, for a setting that is off.
    torch._decomp.decompositions_for_rng.PhiloxState.reset = lambda _: None
    # What TORCH_TRACE asks for, graphs as text and all, is made where this log has any handler, and
    # pytest gives its own to all logs that do not propagate.
    logging.getLogger("torch.__trace").addHandler = lambda _: None
    # PyTorch's lists look through the whole stack, and all modules for each frame, for the unittest
    # that asks for samples: longer than most samples take to compile.
    for name in ("common_utils", "opinfo.core"):
        if module := sys.modules.get(f"torch.testing._internal.{name}"):
            module.extract_test_fn = lambda: None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_sessionstart() -> None:
    """Leave out what takes time and changes no result."""
    # OpenMP's threads wait for each other, which costs more than the few numbers of most tests, and
    # more still where other processes want the same cores. (tests/ops has large tensors.)
    torch.set_num_threads(1)
    # Where there is Triton, Inductor starts processes for its kernels, for a CPU as well, which has
    # none; what had nothing to do may keep this one 300 s at its end (torch 2.11, Python 3.12).
    threads = os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in subprocesses, too
    torch._inductor.config.compile_threads = int(threads)
    # In each process Inductor has the C++ compiler try all instruction sets that the processor has,
    # and in each new cache folder compile for them: 3 s and 15 s. One that it does not know is an
    # error where it is used.
    if "TORCHINDUCTOR_VEC_ISA_OK" not in os.environ:
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # in subprocesses, too
        torch._inductor.config.cpp.vec_isa_ok = True
    # A seed for a device that is not there is kept, with a traceback, for when it comes.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda _: None


def pytest_sessionfinish() -> None:
    """pytest, and Python after it, collect garbage time and again at their ends."""
    gc.freeze()


def _process_state() -> dict[str, object]:
    """What a test can leave behind that changes the results of the tests after it."""
    return {
        "autocast contexts entered": contexts_entered(),
        "autocast": AutocastState.current(),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def process_state_left_alone() -> Iterator[None]:
    """A test that leaves, say, an autocast context entered fails itself, not the ones after it: the
    weight cache of autocast is cleared when no context is entered any more."""
    before = _process_state()
    yield
    after = _process_state()
    assert after == before


_graphs_kept = 0


@pytest.fixture(autouse=True)
def few_classes_of_graphs() -> Iterator[None]:
    """Each `GraphModule` has a class of its own, which the garbage collector alone frees; and each
    trace sets attributes of `nn.Module`, which asks all classes made of it: 5 ms for a thousand."""
    global _graphs_kept
    yield
    if len(GraphModule.__subclasses__()) > _graphs_kept + 300:
        gc.collect()
        _graphs_kept = len(GraphModule.__subclasses__())


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    """Distributed PyTorch, with this process as all there is."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rdzv", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
