"""What is lowered and what is not: writes docs/coverage.md.

python -m tests.conformance.coverage            # prints the page
python -m tests.conformance.coverage --write    # writes it
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.testing._internal.common_methods_invocations import op_db

from autocast_backend.state import AutocastState
from tests.conformance.architectures import ARCHITECTURES, Count, count
from tests.conformance.calls import Tensors, arguments_of
from tests.conformance.one_call import call_under, lowered, tensors_of
from tests.conformance.test_registrations import REGISTERED
from tests.support import BF16

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
_SAMPLES = 4  # of each entry of op_db
_INTERNAL = re.compile(r" false INTERNAL ASSERT FAILED at .*, please report [\w ]+\.")


def registered_calls() -> Iterator[tuple[str, str, str, str]]:
    """(op, device type, fate, reason) of each registration that is not lowered: it is "bracketed",
    or eager raises."""
    for device_type, op in REGISTERED:
        packet, _, overload = op.partition(".")
        target = getattr(getattr(torch.ops.aten, packet), overload or "default")
        state = AutocastState.of({"device_type": device_type, "dtype": torch.bfloat16})
        with tensors_of(device_type):
            args, kwargs = arguments_of(op, Tensors(device_type, [torch.float32]))
            error = call_under(state, target, args, kwargs).error
            if error is None:
                _, report = lowered(target, args, kwargs, state)
                reasons = [("bracketed", b.reason) for b in report.bracketed]
            else:
                fate = "banned" if "unsafe to autocast" in error else "not callable"
                reasons = [(fate, _INTERNAL.sub("", error).partition(". This could be")[0])]
            yield from ((f"aten::{op}", device_type, *reason) for reason in reasons)


def op_db_calls() -> Iterator[tuple[str, str, str]]:
    """The same of PyTorch's `op_db`, on the CPU."""
    state = AutocastState.of(BF16)
    for op in op_db:
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        samples = op.sample_inputs("cpu", torch.float32)
        for sample, _ in zip(samples, range(_SAMPLES), strict=False):
            args = (sample.input, *sample.args)
            if call_under(state, op.op, args, sample.kwargs).values:
                _, report = lowered(op.op, args, sample.kwargs, state)
                yield from ((op.formatted_name, "cpu", b.reason) for b in report.bracketed)


def architectures() -> list[str]:
    """The table of architectures, in training under bfloat16 autocast on the CPU."""
    import transformers

    rows = [
        "| kind | model | graphs | lowered | bracketed | untouched |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for architecture in ARCHITECTURES:
        found = count(architecture, BF16)
        rows.append(row_of(architecture.kind, architecture.model, found))
    return [*rows, "", f"Counted with transformers {transformers.__version__}."]


def row_of(kind: str, model: str, found: Count) -> str:
    """One row of the table of architectures."""
    counts = (found.graphs, found.lowered, len(found.bracketed), found.untouched)
    return f"| {kind} | `{model}` | {' | '.join(map(str, counts))} |"


def registrations() -> list[str]:
    """How many registrations there are and are lowered, and the table of the others."""
    found = list(registered_calls())
    per_device = Counter(device_type for device_type, _ in REGISTERED)
    counts = ", ".join(f"{n} on {device_type}" for device_type, n in per_device.items())
    others = Counter(fate for _, _, fate, _ in found)
    rows = [
        f"{len(REGISTERED)} registrations ({counts}): {len(REGISTERED) - len(found)} lowered, "
        + ", ".join(f"{n} {fate}" for fate, n in others.most_common())
        + ".",
        "",
        "| registration | on | is | why |",
        "| --- | --- | --- | --- |",
    ]
    return rows + _table((op, where, f"{fate} | {why}") for op, where, fate, why in found)


def not_lowered() -> list[str]:
    """The table of calls that stay under autocast: op, device types, why."""
    return ["| call | on | why |", "| --- | --- | --- |", *_table(op_db_calls())]


def _table(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """One row for each (op, reason), with its device types."""
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for op, device_type, reason in found:
        if device_type not in where[op, reason]:
            where[op, reason].append(device_type)
    rows = sorted(where.items())
    return [f"| `{op}` | {', '.join(on)} | {reason} |" for (op, reason), on in rows]


def with_section(page: str, name: str, lines: list[str]) -> str:
    """The page with one of its generated sections replaced."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return head + begin + "\n".join(lines) + "\n" + end + tail


def section(page: str, name: str) -> list[str]:
    """The lines of one of the page's generated sections."""
    _, _, rest = page.partition(f"<!-- {name}: generated -->\n")
    return rest.partition(f"<!-- {name}: end -->")[0].splitlines()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m tests.conformance.coverage")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md, not print it")
    write = parser.parse_args(arguments).write
    if importlib.util.find_spec("transformers") is None:
        parser.exit(
            1, "the models are those of transformers: pip install 'smart_autocast[models]'\n"
        )
    page = PAGE.read_text()
    page = with_section(page, "registrations", registrations())
    page = with_section(page, "not lowered", not_lowered())
    page = with_section(page, "architectures", architectures())
    if write:
        PAGE.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
