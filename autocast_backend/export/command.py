"""`smart-autocast lower`: a file with an exported program in, a file with the lowered one out."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ..files import replaced, unwritable
from ..reports.page import to_html
from ..reports.rows import GraphReport, rows_of
from .program import check_device_type, lower_with_report


class CommandError(Exception):
    """A file that cannot be read or written as the command is asked to."""


def lower_file(
    source: Path, output: Path, report: Path | None = None, device_type: str | None = None
) -> str:
    """Lower the program saved in `source` and save it in `output`.

    Args:
        source: a file that `torch.export.save` wrote.
        report: where to write what became of each call, as an HTML page.
        device_type: as `autocast_backend.export.lower` takes it.

    Returns:
        What was done, in words.

    Raises:
        CommandError: a file that is not there, not an exported program, or cannot be written.
        TypeError, ValueError, RegionError: as `lower`.
    """
    check_device_type(device_type, "--device")
    _check_source(source)
    targets = {"--output": output, "--report": report}
    if problem := unwritable(targets, {"the program to lower": source}):
        raise CommandError(problem)
    program = _load(source)
    try:
        lowered, done = lower_with_report(program, device_type=device_type)
    except RuntimeError as error:
        if device_type is None:
            raise
        raise CommandError(str(error)) from error  # it names device_type
    _save(lowered, output)
    lines = [f"{output}: {done}"]
    lines += [f"  stays under autocast: {kept}" for kept in done.bracketed]
    if report is not None:
        graph = GraphReport("forward", done, tuple(rows_of(lowered.graph_module)))
        page = to_html(f"Casts of {source.name}", [graph])
        try:
            with replaced(report) as new:
                new.write_text(page, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--report: {report} cannot be written: {error}") from error
        lines.append(f"{report}: what became of each call")
    return "\n".join(lines)


_UNREADABLE = (
    *(RuntimeError, ValueError, TypeError, LookupError, AssertionError, OSError),
    *(AttributeError, EOFError, ImportError, pickle.UnpicklingError),
)
"""What `torch.export.load` raises of damaged files, other formats and what it does not know."""


def _load(source: Path) -> ExportedProgram:
    try:
        return torch.export.load(source)
    except _UNREADABLE as error:
        raise CommandError(
            f"{source}: torch.export.load, of torch {torch.__version__}, does not read it: "
            f"{str(error).strip()} If it has ops of another library, import that in a program of "
            "your own, and call autocast_backend.export.lower there; else save it anew"
        ) from error


def _save(program: ExportedProgram, output: Path) -> None:
    try:
        with replaced(output) as new, _Archive(io.FileIO(new, "w")) as archive:
            torch.export.save(program, archive)
            if archive.error is not None:
                raise archive.error
    except OSError as error:
        raise CommandError(f"--output: {output} cannot be written: {error}") from error


class _Archive(io.BufferedWriter):
    """A file for PyTorch to write an archive to. An exception in a write would end the process when
    its writer is freed. So the first one is kept here, and what comes after it is dropped."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error
        return len(data)


def _check_source(source: Path) -> None:
    expected = "expected a file that torch.export.save wrote"
    if not source.is_file():
        raise CommandError(f"{source}: there is no such file; {expected}")
    if not os.access(source, os.R_OK):
        raise CommandError(f"{source}: it may not be read; {expected}")
    if not zipfile.is_zipfile(source):
        raise CommandError(f"{source}: {expected}; this is no archive at all")
    try:
        with zipfile.ZipFile(source) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise CommandError(f"{source}: {expected}; this archive is damaged: {error}") from error
    folders = {Path(name).parent.name for name in names if name.endswith(".json")}
    if "models" not in folders:
        raise CommandError(
            f"{source}: {expected}; this archive holds no program (a package of AOTInductor holds "
            "compiled code alone: lower the program before it is compiled)"
        )
