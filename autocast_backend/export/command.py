"""`smart-autocast lower`: a file with an exported program in, a file with the lowered one out."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from ..reports.page import to_html, unwritable
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
    for name, target in (("--output", output), ("--report", report)):
        if target is not None and (problem := unwritable(name, target)):
            raise CommandError(problem)
    program = torch.export.load(source)
    lowered, done = lower_with_report(program, device_type=device_type)
    torch.export.save(lowered, output)
    lines = [f"{output}: {done}"]
    lines += [f"  stays under autocast: {kept}" for kept in done.bracketed]
    if report is not None:
        graph = GraphReport("forward", done, tuple(rows_of(lowered.graph_module)))
        page = to_html(f"Casts of {source.name}", [graph])
        report.write_text(page, encoding="utf-8")
        lines.append(f"{report}: what became of each call")
    return "\n".join(lines)


def _check_source(source: Path) -> None:
    expected = "expected a file that torch.export.save wrote"
    if not source.is_file():
        raise CommandError(f"{source}: there is no such file; {expected}")
    if not zipfile.is_zipfile(source):
        raise CommandError(f"{source}: {expected}; this is no archive at all")
    with zipfile.ZipFile(source) as archive:
        folders = {Path(name).parent.name for name in archive.namelist() if name.endswith(".json")}
    if "models" not in folders:
        raise CommandError(
            f"{source}: {expected}; this archive holds no program (a package of AOTInductor holds "
            "compiled code alone: lower the program before it is compiled)"
        )
