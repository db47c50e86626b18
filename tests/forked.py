"""Programs in processes of their own, forked from one that has imported what takes them longest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SERVER = """
import json, os, signal, sys, traceback, types

exec(sys.argv.pop())

for line in sys.stdin:
    program, sys.argv[1:], environment, folder, *output = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(300)  # ends what hangs
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)  # where Python looks for modules first, as with `python -c`
            for stream, name in enumerate(output, 1):
                os.dup2(os.open(name, os.O_WRONLY), stream)
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

COMPILING = """
import torch._dynamo, torch._inductor.compile_fx
import autocast_backend.backend
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

valid_vec_isa_list()  # what each child would find out by compiling for them
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def forked(imports: str, **environment: str) -> Iterator[Run]:
    """Gives what runs a program, with arguments, and `env` and `cwd` as `subprocess.run` has them,
    after the imports. Variables that these read have no other value for a program."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # No processes for a few kernels.
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", **environment},
        cwd=Path(__file__).parents[1],
    )

    def run(
        program: str,
        *arguments: str,
        env: Mapping[str, str] = os.environ,
        cwd: Path = Path(__file__).parents[1],
    ) -> subprocess.CompletedProcess[str]:
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            call = [program, arguments, dict(env), str(cwd), out.name, err.name]
            print(json.dumps(call), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
            return subprocess.CompletedProcess(
                [program, *arguments], status, out.read(), err.read()
            )

    with server:
        yield run
        server.communicate()


def printed(result: subprocess.CompletedProcess[str]) -> str:
    """What a program has printed that has ended well."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
