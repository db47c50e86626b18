"""`python -m benchmarks <question> [--flags]`; without a question, the list of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

QUESTIONS = (
    "casts",
    "fused",
    "launch",
    "roofline",
    "compile",
    "validation",
    "decode",
    "threshold",
    "training",
    "rounding",
    "memory",
    "weights",
    "gpu",
)


def listing() -> str:
    """One line per question: its name and the first line of its file."""
    lines = []
    for name in QUESTIONS:
        what = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
        lines.append(f"  {name:<10} {what}")
    return "\n".join(["usage: python -m benchmarks <question> [--help | --flags]", "", *lines])


def main(arguments: Sequence[str]) -> int:
    """Run one question and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    question, *flags = arguments
    if question not in QUESTIONS:
        print(f"no question {question!r}\n\n{listing()}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"benchmarks.{question}").main(flags))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
