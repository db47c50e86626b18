"""What a question found: printed as tables, judged against targets, kept as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.machine import kernel_tier, load_average, machine_facts, machine_slug

RESULTS = Path(__file__).resolve().parent / "results"
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A goal, the number that was measured for it, and whether that is `met` or `missed`."""

    name: str
    goal: str
    measured: str
    verdict: str


def table(rows: Sequence[Row], *, unit: str = "s") -> str:
    """The rows as text: percentiles and paired difference in `unit`, and the paired ratio."""
    scale = UNITS[unit]
    head = ["", f"p20 {unit}", f"p50 {unit}", f"p80 {unit}", "ratio", f"diff {unit}", "n"]
    body = []
    for row in rows:
        times = [f"{value * scale:.2f}" for value in (row.p20, row.p50, row.p80)]
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        difference = "" if row.difference is None else f"{row.difference * scale:+.2f}"
        body.append([row.name, *times, ratio, difference, str(len(row.samples))])
    return text_table(head, body)


def text_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [list(head), *(list(line) for line in body)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  ".join([first, *others]).rstrip())
    return "\n".join(text)


@dataclass(kw_only=True)
class Answer:
    """What a question measured.

    Attributes:
        question: its name; also the name of its file.
        settings: the flags it ran with.
        device: "cpu" or "cuda"; decides which machine name the results are kept under.
        machine: `machine_facts()` when it began; the load average is added again at the end, and as
            `kernels` the tier of this package's kernels on the device.
        sections: the measurements by name, JSON-ready.
        targets: what they were compared with.
        complete: whether it holds all that was asked for; not while the question goes on.
    """

    question: str
    settings: dict[str, object]
    device: str = "cpu"
    machine: dict[str, object] = field(default_factory=machine_facts)
    sections: dict[str, object] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    complete: bool = True

    @classmethod
    def to(cls, question: str, flags: argparse.Namespace) -> Answer:
        """An empty answer to a question that was asked with these flags.

        Raises:
            RuntimeError: there are no such kernels as SMART_AUTOCAST_KERNELS names.
        """
        kernel_tier(flags.device)
        settings = {name: value for name, value in vars(flags).items() if name != "out"}
        return cls(question=question, settings=settings, device=flags.device)

    def add(self, section: str, rows: Sequence[Row], **facts: object) -> None:
        """Keep a comparison under `section`, with any further facts about it."""
        self.sections[section] = {"rows": [asdict(row) for row in rows], **facts}

    def judge(self, name: str, *, goal: str, measured: str, met: bool) -> None:
        """Keep how a number compares with its target."""
        verdict = "met" if met else "missed"
        self.targets.append(Target(name=name, goal=goal, measured=measured, verdict=verdict))

    def targets_table(self) -> str:
        """The targets beside their numbers, as text."""
        body = [[t.name, t.goal, t.measured, t.verdict] for t in self.targets]
        return text_table(["target", "goal", "measured", "verdict"], body)

    def save(self, folder: Path | None = None, *, complete: bool = True) -> Path:
        """Write `<folder>/<question>.json`; the folder defaults to this machine's results.

        Questions save after each of their sections, not `complete` yet: a time limit, or a kernel
        that takes the process with it, leaves what was measured before.
        """
        self.complete = complete
        folder = folder if folder is not None else RESULTS / machine_slug(self.device)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.question}.json"
        self.machine["load_average_after"] = load_average()
        self.machine["kernels"] = kernel_tier(self.device)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @staticmethod
    def load(path: Path) -> Answer:
        """Read what `save` wrote."""
        content = json.loads(path.read_text())
        content["targets"] = [Target(**target) for target in content["targets"]]
        return Answer(**content)
