"""Programs in processes of their own, forked from one that has imported what takes them longest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SERVER = """
import json, os, sys, traceback, types
import torch._dynamo, torch._inductor.compile_fx
import autocast_backend.backend
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

valid_vec_isa_list()  # what each child would find out by compiling for them

for line in sys.stdin:
    program, environment, output = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.update(environment)
            os.dup2(os.open(output, os.O_WRONLY), 1)
            os.dup2(1, 2)
            main = sys.modules["__main__"] = types.ModuleType("__main__")  # what pickle looks up
            exec(program, main.__dict__)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def forked() -> Iterator[Callable[..., str]]:
    """Gives what runs a program, with variables of the environment as keywords, and returns what it
    has printed. Variables that torch reads when it is imported have no effect."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},  # no processes for a few kernels
        cwd=Path(__file__).parents[1],
    )

    def run(program: str, **environment: str) -> str:
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            print(json.dumps([program, environment, output.name]), file=server.stdin, flush=True)
            status = server.stdout.readline()
            printed = output.read()
        assert status == "0\n", printed
        return printed

    with server:
        yield run
        server.communicate()
