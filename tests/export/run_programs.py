"""Run saved programs in a process of their own: `python -m tests.export.run_programs FOLDER MODE`.

`MODE` is "package", which imports `autocast_backend.export` and runs each program for every dtype,
or the path of the ops' library, which is loaded and nothing else of the package; each program then
runs for the dtype it was exported with. The results go to `FOLDER/results.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.export.models import CASES, DTYPES


def run(module: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
    """What a module gives and its buffers; the error where it raises."""
    try:
        outputs = module(*inputs)
    except RuntimeError as error:
        return str(error)
    return outputs, {name: b.detach().clone() for name, b in module.named_buffers()}


def run_for_all_dtypes(module_of: Any, case: Any) -> dict[Any, Any]:
    """Results by (dtype, whether the parameters have it too)."""
    results = {}
    for dtype in DTYPES:
        for whole in (False, True):
            module = module_of()
            if whole:
                module.to(dtype)
            results[dtype, whole] = run(module, case.inputs_of(dtype))
    return results


def main(folder: Path, mode: str) -> None:
    if mode == "package":
        import autocast_backend.export
    else:
        torch.ops.load_library(mode)
    results: dict[str, Any] = {}
    for case in CASES:
        path = folder / f"{case.name}.pt2"

        def load(path: Path = path) -> torch.export.ExportedProgram:
            return torch.export.load(path)

        if mode == "package":
            results[case.name] = run_for_all_dtypes(
                lambda load=load: autocast_backend.export.module(load()), case
            )
        else:
            assert "autocast_backend.ops" not in sys.modules
            results[case.name] = run(load().module(), case.inputs)
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
