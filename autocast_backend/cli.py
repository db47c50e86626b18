"""The console script ``smart-autocast``."""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from ._native import KernelTierError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        # What becomes of the output of `explain`, and how it ends, is up to its program.
        return _explain(options) if options.command == "explain" else _print_answer(options)
    except KernelTierError as error:
        print(f"smart-autocast: {error}", file=sys.stderr)
        return 1


def _print_answer(options: argparse.Namespace) -> int:
    try:
        if options.command == "policies":
            status = _policies(options.device, options.check)
        elif options.command == "lower":
            status = _lower(options)
        else:
            status = _info()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough: `smart-autocast policies | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smart-autocast", description="See and lower the autocast regions of PyTorch."
    )
    parser.add_argument(
        "--version", action="version", version=f"smart_autocast {_version('smart_autocast')}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="what is installed, which kernels run, and why")
    policies = commands.add_parser("policies", help="what autocast does to which op")
    policies.add_argument(
        "--device", metavar="TYPE", help="of one device type, such as cuda; default: all of them"
    )
    policies.add_argument(
        "--check",
        action="store_true",
        help="compare the tables with what the installed torch registers; exit with 1 if they "
        "differ",
    )
    explain = commands.add_parser(
        "explain",
        help="run a Python program, then say what became of each call that it compiled",
        usage="%(prog)s [-h] [--stats] [--report FILE] PROGRAM [ARGUMENTS]",
    )
    explain.add_argument("program", type=Path, metavar="PROGRAM", help="a Python file")
    of_program = explain.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    of_program.required = False  # so that an error does not name them
    explain.add_argument(
        "--stats",
        action="store_true",
        help="count what casts lose and which results are not finite, in code that runs op by op; "
        "comes before PROGRAM",
    )
    explain.add_argument(
        "--report", type=Path, metavar="FILE", help="write an HTML page too; comes before PROGRAM"
    )
    lower = commands.add_parser(
        "lower", help="replace the autocast regions of an exported program by smart casts"
    )
    lower.add_argument("program", type=Path, help="a file that torch.export.save wrote")
    lower.add_argument("-o", "--output", type=Path, required=True, help="the lowered program")
    lower.add_argument(
        "--report", type=Path, metavar="FILE", help="an HTML page: what became of each call"
    )
    lower.add_argument(
        "--device",
        metavar="TYPE",
        help="whose policies to apply, such as cuda; default: that of the program's tensors",
    )
    return parser


def _lower(options: argparse.Namespace) -> int:
    from .export.command import CommandError, lower_file
    from .regions import RegionError

    try:
        print(lower_file(options.program, options.output, options.report, options.device))
    except (CommandError, RegionError, ValueError) as error:
        print(f"smart-autocast lower: {error}", file=sys.stderr)
        return 2
    return 0


def _explain(options: argparse.Namespace) -> int:
    """Run the program; what it ends with, an exception or an exit status, is how this ends."""
    from .files import replaced, unwritable

    program, page = options.program, options.report
    page = page and page.absolute()  # the program may change the folder
    problem: str | None
    if not program.is_file():
        problem = f"PROGRAM: there is no file {program}; expected a Python program"
    elif not os.access(program, os.R_OK):
        problem = f"PROGRAM: {program} may not be read; expected a Python program"
    else:
        problem = unwritable({"--report": page}, {"PROGRAM": program})
    if problem is not None:
        print(f"smart-autocast explain: {problem}", file=sys.stderr)
        return 2

    from .explaining import collecting

    sys.argv = [str(program), *options.arguments]
    sys.path[0] = str(program.resolve().parent)
    with collecting(stats=options.stats) as report:
        try:
            runpy.run_path(str(program), run_name="__main__")
        finally:
            try:
                if page is not None:
                    text = report.to_html(f"Casts of {program.name}")
                    with replaced(page) as new:
                        new.write_text(text, encoding="utf-8")
            finally:
                _print(str(report))
    return 0


def _print(text: str) -> None:
    """Print a report where the program has left the output that it was printed to, if it has.

    What goes wrong is said, and does not stand in the way of what the program ends with.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except (OSError, ValueError) as error:  # nobody reads it any more; it is closed
        print(f"smart-autocast explain: the report cannot be printed: {error}", file=sys.stderr)
        if isinstance(error, BrokenPipeError):  # Python would try once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _info() -> int:
    _print_columns(info().items())
    return 0


def _policies(device_type: str | None, check: bool) -> int:
    from .policies.table import ROWS, TABLES

    if device_type is not None and device_type not in ROWS:
        known = ", ".join(ROWS)
        print(
            f"smart-autocast policies: --device: expected one of {known}; got {device_type!r}",
            file=sys.stderr,
        )
        return 2
    chosen = list(ROWS) if device_type is None else [device_type]
    if check:
        return max([_check(device_type) for device_type in chosen])
    if device_type is not None:
        _print_columns((op, policy.value) for op, policy in TABLES[device_type].items())
        return 0
    ops = sorted(set().union(*TABLES.values()))
    rows = [[op, *(TABLES[d][op].value if op in TABLES[d] else "-" for d in chosen)] for op in ops]
    _print_columns([["", *chosen], *rows])
    return 0


def _check(device_type: str) -> int:
    import torch

    from .policies.table import differences

    found = differences(device_type)
    if not found:
        print(f"{device_type}: all {found.equal} registrations of torch are in the table")
        return 0
    print(f"{device_type}: the table and torch {torch.__version__} differ", file=sys.stderr)
    for op in found.missing:
        print(
            f"  {op} is registered, and has no row: add one to autocast_backend/policies/table.py, "
            "with the policy of ATen/autocast_mode.h, and the versions that have it",
            file=sys.stderr,
        )
    for op in found.gone:
        print(
            f"  {op} has a row, and is not registered: give the row the versions that have it, "
            "such as <2.14",
            file=sys.stderr,
        )
    return 1


def _print_columns(rows: Iterable[Sequence[str]]) -> None:
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


def info() -> dict[str, str]:
    """The facts that ``smart-autocast info`` prints, in its order.

    Raises:
        KernelTierError: as ``import autocast_backend.ops`` does where CUDA is initialised; this
            initialises it.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # so that the GPUs are looked at
    from .ops import KERNEL_TIER as tier

    built = tier.build_info
    return {
        "smart_autocast": _version("smart_autocast"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} (CUDA: {torch.version.cuda or 'none'})",
        "triton": _version("triton"),
        "backend": _backend_entry_point(),
        "kernel tier": f"{tier.name}: {tier.reason}",
        **{f"{device} kernels": str(own) for device, own in tier.devices.items()},
        "native library": str(tier.library or "none"),
        "built with": ", ".join(f"{what} {version}" for what, version in built.items()) or "none",
        "CPU capability": tier.cpu_capability or torch.backends.cpu.get_cpu_capability(),
        "CUDA library": f"{tier.cuda_library or 'none'}: {tier.cuda_reason}",
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _backend_entry_point() -> str:
    found = metadata.entry_points(group="torch_dynamo_backends", name="smart_autocast")
    return ", ".join(sorted({entry.value for entry in found})) or (
        "not registered: install the package so that torch.compile finds it by name"
    )


if __name__ == "__main__":
    sys.exit(main())
