"""Draws casts.json: GB/s over bytes per call, under the speed of a copy, as roofline.png."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.answer import RESULTS, Answer
from benchmarks.flags import check_device
from benchmarks.harness import Row
from benchmarks.machine import machine_slug

SHOWN = {
    ".to": "o",
    "multi_cast": "s",
    "foreach out": "^",
    "multi_cast out": "D",
}
"""The candidates of `benchmarks casts`, and their marks."""


def parser() -> argparse.ArgumentParser:
    """The question's flags."""
    parse = argparse.ArgumentParser(prog="python -m benchmarks roofline", description=__doc__)
    parse.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parse.add_argument("--out", type=Path, help="the folder of casts.json (default: by machine)")
    return parse


def main(arguments: Sequence[str]) -> int:
    """Draw; 2 where there is nothing to draw from, or nothing to draw with."""
    parse = parser()
    flags = parse.parse_args(arguments)
    if flags.out is None:
        check_device(parse, flags.device)  # it names the folder
    source = (flags.out or RESULTS / machine_slug(flags.device)) / "casts.json"
    if not source.exists():
        print(f"no {source}: run `python -m benchmarks casts` first", file=sys.stderr)
        return 2
    answer = Answer.load(source)
    missing = {"copy", *SHOWN}.difference(points(answer))
    if missing:
        print(
            f"{source}: expected single tensors, cast by {sorted(SHOWN)} and copied, got none by "
            f"{sorted(missing)}: run `python -m benchmarks casts`, of --sets '1 x' at the least",
            file=sys.stderr,
        )
        return 2
    try:
        print(draw(answer, source.with_name("roofline.png")))
    except ImportError as error:
        print(f"{error}: pip install 'smart_autocast[demo]'", file=sys.stderr)
        return 2
    return 0


def points(answer: Answer) -> dict[str, list[tuple[int, float]]]:
    """(bytes per call, GB/s) of each candidate, for single tensors in the order of their sizes."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, section in answer.sections.items():
        assert isinstance(section, dict)
        if not name.startswith("1 x "):
            continue
        size = section["bytes"]
        for row in (Row(**row) for row in section["rows"]):
            found.setdefault(row.name, []).append((size, size / row.p50 / 1e9))
    return {name: sorted(some) for name, some in found.items()}


def _device_name(answer: Answer) -> object:
    gpu = answer.machine["gpu"]
    return (
        gpu["name"] if answer.device == "cuda" and isinstance(gpu, dict) else answer.machine["cpu"]
    )


def draw(answer: Answer, path: Path) -> Path:
    """The picture of one answer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = points(answer)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(*zip(*found["copy"], strict=True), "k--", label="a copy of as many bytes: the limit")
    for name, mark in SHOWN.items():
        axes.plot(*zip(*found[name], strict=True), marker=mark, markersize=5, label=name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bytes read and written by a call",
        ylabel="GB/s, median",
        title=f"Casts of one tensor, {_device_name(answer)}",
    )
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
