"""The tables of benchmarks/README.md, and one of README.md, say what benchmarks/results says.

Numbers in running text are not read, but for those that tests after the tables' name. Those of
benchmarks/TRIED.md are of no file.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compile import OUR_PASSES

ROOT = Path(__file__).resolve().parents[2]
EPYC = "amd-epyc-family-26-avx512-2-cores"
GPU = "nvidia-h200"
OTHERS = {
    "Xeon": "intel-xeon-family-6-avx512-2-cores",
    "Zen 3": "amd-epyc-family-25-avx2-2-cores",
    "Zen 4": "amd-epyc-family-25-avx512-2-cores",
}

MACHINES = {"Zen 5": EPYC, **OTHERS, "H200": GPU}
"""Folders of results, by what the tables call a machine."""

Table = dict[str, dict[str, str]]
"""The cells of a table by its rows and columns, as they are called in it."""
Expected = Iterator[tuple[str, str, float]]
"""Row, column, and the number that belongs there."""


@functools.cache
def tables(document: str) -> tuple[Table, ...]:
    """Those of a document. A row is called by its first cell, and by its second one, too, where
    several begin alike."""
    lines = (ROOT / document).read_text().splitlines()
    found = []
    for number, line in enumerate(lines):
        if not re.fullmatch(r"\|( -+:? \|)+", line):
            continue
        columns, *rows = [_cells(lines[number - 1]), *_rows(lines[number + 1 :])]
        names = [row[0] for row in rows]
        named_by = 1 if len(set(names)) == len(names) else 2
        found.append(
            {", ".join(row[:named_by]): dict(zip(columns, row, strict=True)) for row in rows}
        )
    return tuple(found)


def _rows(lines: list[str]) -> Iterator[list[str]]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield _cells(line)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def table_with(row: str, column: str, document: str = "benchmarks/README.md") -> Table:
    (table,) = (table for table in tables(document) if column in table.get(row, {}))
    return table


@functools.cache
def sections(question: str, machine: str = EPYC) -> dict[str, Any]:
    file = ROOT / "benchmarks" / "results" / machine / f"{question}.json"
    return json.loads(file.read_text())["sections"]


def rows(section: dict[str, Any], key: str = "rows") -> dict[str, Any]:
    return {row["name"]: row for row in section[key]}


def casts() -> Expected:
    times = {
        ".to": ".to",
        "fresh": "multi_cast",
        "out": "multi_cast out",
        "foreach, out": "foreach out",
        ".to, grad": ".to grad",
        "fresh, grad": "multi_cast grad",
    }
    for name in table_with("1 x 1 KiB", "fresh x"):
        section = sections("casts")[f"{name}, float32 to bfloat16"]
        for column, candidate in times.items():
            yield name, column, rows(section)[candidate]["p50"] * 1e6
        yield name, "fresh x", 1 / rows(section)["multi_cast"]["ratio"]
        yield name, "out x", 1 / rows(section)["multi_cast out"]["ratio"]
        yield name, "copy", 100 / section["time_by_copy"]["multi_cast out"]


def casts_elsewhere() -> Expected:
    for row, cells in table_with("Xeon, fresh", "1 MiB").items():
        machine, what = row.split(", ")
        candidate = {"fresh": "multi_cast", "out": "multi_cast out"}[what]
        for column in filter(None, cells):
            name = re.sub(r"^(?=\d+ .iB)", "1 x ", re.sub("^x", "150 x", column))
            section = sections("casts", OTHERS[machine])[f"{name}, float32 to bfloat16"]
            yield row, column, 1 / rows(section)[candidate]["ratio"]


FUSED = {
    "cast_with_stats": ("stats", "cast_with_stats"),
    "unscale_cast": ("unscale", "unscale_cast"),
    "stochastic rounding": ("stochastic", "stochastic"),
    "* 2, relu, cast": ("neighbours", "compiled"),
}
"""How rows of a table begin, and what they are called in the file."""


def fused() -> Expected:
    for row in table_with("stochastic rounding by nearest", "1 MiB"):
        (found,) = (FUSED[start] for start in FUSED if row.startswith(start))
        yield from _fused(row, *found, EPYC)


def fused_elsewhere() -> Expected:
    for row in table_with("stochastic rounding, Xeon", "1 MiB"):
        start, machine = row.rsplit(", ", 1)
        yield from _fused(row, *FUSED[start], MACHINES[machine])


def _fused(row: str, kind: str, candidate: str, machine: str) -> Expected:
    for name, section in sections("fused", machine).items():
        if name.startswith(f"{kind}, "):
            yield row, name.removeprefix(f"{kind}, "), rows(section)[candidate]["ratio"]


def launch() -> Expected:
    candidates = {
        ".to": ".to",
        "multi_cast": "multi_cast",
        "multi_cast, out": "multi_cast out",
        "_foreach_copy_": "foreach out",
        ".to, gradients on": ".to grad",
        "multi_cast, gradients on": "multi_cast grad",
    }
    for row, candidate in candidates.items():
        for column in table_with(row, "148")[row]:
            if not column:
                continue
            count = int(column.replace(",", ""))
            section = sections("launch")[f"{count} tensors of 1024 bytes, host"]
            yield row, column, rows(section)[candidate]["p50"] / count * 1e6


def first_steps() -> Expected:
    for row in table_with("mlp, ambient", "stock cold"):
        cold, warm = (
            sections("compile")[f"{phase} first step, {row}"] for phase in ("cold", "warm")
        )
        yield row, "stock cold", rows(cold)["stock"]["p50"]
        yield row, "ours cold", rows(cold)["ours"]["p50"]
        yield row, "cpu, cold", rows(cold, "cpu_rows")["ours"]["ratio"]
        (record,) = cold["records"]["ours"]
        passes = sum(record["stages"][stage] for stage in OUR_PASSES)
        yield row, "passes", 100 * passes / rows(cold)["stock"]["p50"]
        yield row, "stock warm", rows(warm)["stock"]["p50"]
        yield row, "ours warm", rows(warm)["ours"]["p50"]
        yield row, "ratio, warm", rows(warm)["ours"]["ratio"]
        yield row, "cpu, warm", rows(warm, "cpu_rows")["ours"]["ratio"]


def calls() -> Expected:
    for row in table_with("aot_eager, inference", "ambient"):
        inner, kind = row.split(", ")
        for column in ("off", "region", "ambient"):
            section = sections("compile")[f"call, {column}, {kind}, {inner}"]
            yield row, column, rows(section)["ours"]["difference"] * 1e6


def memory() -> Expected:
    candidates = {
        "eager autocast": "eager",
        "stock": "stock",
        "ours, scope": "ours, scope",
        "ours, version (2 more are there before)": "ours, version",
        "ours, off": "ours, off",
    }
    columns = {
        "1 call": "1 calls in one context",
        "4 calls in one context": "4 calls in one context",
    }
    for row, candidate in candidates.items():
        for column, name in columns.items():
            section = sections("memory")[name]
            yield row, column, section["peak_bytes"][candidate] / section["parameters"]


def decode() -> Expected:
    candidates = {
        "stock": "stock",
        "eager autocast": "eager",
        "limit: bfloat16 model": "limit",
        "ours, scope": "ours, scope",
        "ours, version": "ours, version",
        "ours, off": "ours, off",
    }
    for row, candidate in candidates.items():
        for column, speed in {
            "one context": "speed",
            "context per token": "speed, per token",
        }.items():
            measured = rows(sections("decode")[column])[candidate]
            yield row, column, measured["p50"] * 1e3
            yield row, speed, 1 / measured["ratio"]


def threshold_by_calls() -> Expected:
    for row, candidate in {"inside the graph": "inside", "outside": "outside"}.items():
        for count in (1, 2, 3, 4):
            section = sections("threshold")[f"{count} calls in a context"]
            yield row, f"{count} call{'s' * (count > 1)}", rows(section)[candidate]["p50"] * 1e3


def threshold_by_sizes() -> Expected:
    for row, candidate in {"inside the graph": "inside", "outside": "outside"}.items():
        for size in (1, 4, 8, 16, 32, 64, 256):
            section = sections("threshold")[f"one call in a context, a cast of {size} MiB"]
            yield row, f"{size} MiB", rows(section)[candidate]["p50"] * 1e3


def training() -> Expected:
    for row in table_with("each, 1", "casts: stock"):
        context, count = row.split(", ")
        section = sections("training")[f"{context} context, {count} micro-batches"]
        yield row, "casts: stock", section["casts"]["stock"]
        for name in ("control", "eager", "scope", "version", "off"):
            candidate = name if name in section["casts"] else f"ours, {name}"
            yield row, name, rows(section)[candidate]["ratio"]


def rounding() -> Expected:
    for machine in ("Zen 3", "Xeon"):
        for name, section in sections("rounding", OTHERS[machine]).items():
            row = f"{name}, {machine}"
            for way in ("stock", "not rounded", "rounded"):
                yield row, f"differing, {way}", section["differing"][way] * 100
            for way in ("stock", "rounded"):
                yield row, f"time, {way}", rows(section)[way]["ratio"]


def weights() -> Expected:
    for row, section in sections("weights", OTHERS["Xeon"]).items():
        yield row, "stock, us", rows(section)["stock"]["p50"] * 1e6
        for name in ("eager", "scope", "version", "off"):
            candidate = rows(section)[name if name == "eager" else f"ours, {name}"]
            yield row, name, candidate["difference"] / section["weights"] * 1e6


def casts_on_a_gpu() -> Expected:
    times = {
        ".to": ".to",
        "fresh": "multi_cast",
        "out": "multi_cast out",
        "foreach, out": "foreach out",
        "Triton's, fresh": "triton",
    }
    for row in table_with("1 x 1 GiB", "Triton's, fresh"):
        section = sections("casts", GPU)[f"{row}, float32 to bfloat16"]
        for column, candidate in times.items():
            yield row, column, rows(section)[candidate]["p50"] * 1e6
        yield row, "of the copy, out", 100 / section["time_by_copy"]["multi_cast out"]


def launch_on_a_gpu() -> Expected:
    candidates = {
        ".to": ".to",
        "multi_cast": "multi_cast",
        "multi_cast, out": "multi_cast out",
        "_foreach_copy_": "foreach out",
        "Triton's, out": "triton out",
    }
    for row, cells in table_with("Triton's, out, device", "148").items():
        name, where = row.rsplit(", ", 1)
        for column in cells:
            if column == "on an H200, us":
                continue
            title = f"{column.replace(',', '')} tensors of 1024 bytes, {where}"
            measured = rows(sections("launch", GPU)[title])[candidates[name]]
            yield row, column, measured["p50"] * 1e6


def decode_on_a_gpu() -> Expected:
    candidates = {"stock": "stock", "eager autocast": "eager", "limit": "limit"}
    columns = {
        "graphs, one context": ("decode-graphs", "one context"),
        "graphs, per token": ("decode-graphs", "context per token"),
        "one context, no graphs": ("decode", "one context"),
        "per token, no graphs": ("decode", "context per token"),
    }
    for row in table_with("stock, H200", "graphs, one context"):
        name = row.removesuffix(", H200")
        candidate = candidates.get(name, f"ours, {name}")
        for column, (question, form) in columns.items():
            yield row, column, rows(sections(question, GPU)[form])[candidate]["p50"] * 1e3


@pytest.mark.parametrize(
    ("expected", "row", "column"),
    [
        (casts, "1 x 1 KiB", "fresh x"),
        (casts_elsewhere, "Xeon, fresh", "1 MiB"),
        (fused, "stochastic rounding by nearest", "1 MiB"),
        (fused_elsewhere, "stochastic rounding, Xeon", "1 MiB"),
        (launch, ".to", "148"),
        (first_steps, "mlp, ambient", "stock cold"),
        (calls, "aot_eager, inference", "ambient"),
        (memory, "stock", "1 call"),
        (decode, "stock", "one context"),
        (threshold_by_calls, "outside", "1 call"),
        (threshold_by_sizes, "outside", "1 MiB"),
        (training, "each, 1", "casts: stock"),
        (rounding, "gpt, Zen 3", "time, rounded"),
        (weights, "whole, one context", "stock, us"),
        (casts_on_a_gpu, "1 x 1 GiB", "Triton's, fresh"),
        (launch_on_a_gpu, "Triton's, out, device", "148"),
        (decode_on_a_gpu, "stock, H200", "graphs, one context"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_table_has_the_numbers_of_its_file(
    expected: Callable[[], Expected], row: str, column: str
) -> None:
    assert not _wrong(table_with(row, column), expected())


Range = tuple[list[float], str]
"""The numbers of a cell, such as "2.82 to 8.13", and where a single one is from: "4 GiB"."""


def targets_of_casts(machine: str) -> dict[str, Range]:
    times_as_fast: dict[str, dict[str, float]] = {
        "by a copy's speed": {},
        "fresh": {},
        "out": {},
        "gradients": {},
    }
    for title, section in sections("casts", machine).items():
        name = title.partition(",")[0]
        times_as_fast["by a copy's speed"][name] = 1 / section["time_by_copy"]["multi_cast out"]
        of = rows(section)
        times_as_fast["fresh"][name] = 1 / of["multi_cast"]["ratio"]
        times_as_fast["out"][name] = 1 / of["multi_cast out"]["ratio"]
        by_rounds = zip(of[".to grad"]["samples"], of["multi_cast grad"]["samples"], strict=True)
        times_as_fast["gradients"][name] = statistics.median(to / ours for to, ours in by_rounds)

    def of_all(form: str, names: str) -> Range:
        values = [value for name, value in times_as_fast[form].items() if re.fullmatch(names, name)]
        return [min(values), max(values)], ""

    def lowest(form: str) -> Range:
        single = {name: of for name, of in times_as_fast[form].items() if name.startswith("1 x ")}
        name = min(single, key=single.__getitem__)
        return [single[name]], name.removeprefix("1 x ")

    large = r"1 x (64 MiB|256 MiB|. GiB)|[a-z].*"
    small, models = "150 x .*", "gpt2-small|vit-b16"
    return {
        "out by a copy's speed, 64 MiB and more": of_all("by a copy's speed", large),
        "lists of small tensors by .to, fresh": of_all("fresh", small),
        "lists of small tensors by .to, out": of_all("out", small),
        "GPT-2 small and the ViT by .to, fresh": of_all("fresh", models),
        "GPT-2 small and the ViT by .to, out": of_all("out", models),
        "one tensor by .to, fresh": lowest("fresh"),
        "one tensor by .to, gradients on": lowest("gradients"),
    }


def targets_of_weights(machine: str) -> dict[str, Range]:
    decode = sections("decode-graphs" if machine == GPU else "decode", machine)
    loop, each = rows(decode["one context"]), rows(decode["context per token"])
    one, four = (sections("memory", machine)[f"{n} calls in one context"] for n in (1, 4))
    found = {
        "a context around each token: time by stock's": [each["ours, scope"]["ratio"]],
        "a training step by stock's, scope and version": [],
    }
    if (ROOT / "benchmarks" / "results" / machine / "training.json").exists():
        steps = [
            rows(section)[f"ours, {name}"]["ratio"]
            for section in sections("training", machine).values()
            for name in ("scope", "version")
        ]
        found["a training step by stock's, scope and version"] = [min(steps), max(steps)]
    for name, suffix in {"scope": "", "version": ", version"}.items():
        ours = loop[f"ours, {name}"]
        by_limit = ours["p50"] / loop["limit"]["p50"]
        found[f"one context around the loop: time by the limit{suffix}"] = [by_limit]
        found[f"one context around the loop: speed by stock's{suffix}"] = [1 / ours["ratio"]]
    for name, section in {"one call": one, "four calls before one backward": four}.items():
        peaks = section["peak_bytes"]
        by_eager = peaks["ours, scope"] / peaks["eager"]
        found[f"peak by eager autocast's, {name}"] = [by_eager]
    return {row: (values, "") for row, values in found.items()}


@pytest.mark.parametrize(
    ("targets", "row"),
    [
        (targets_of_casts, "one tensor by .to, fresh"),
        (targets_of_weights, "peak by eager autocast's, one call"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("name", MACHINES)
def test_a_table_of_targets_has_the_numbers_of_the_files(
    targets: Callable[[str], dict[str, Range]], row: str, name: str
) -> None:
    """And those that miss the goal in bold."""
    table = table_with(row, name)
    measured = targets(MACHINES[name])
    assert measured.keys() == table.keys() - {"gradients ready in eager's order"}
    for target, (values, place) in measured.items():
        cell, goal = table[target][name], table[target]["goal"]
        numbers = re.findall(r"(\*\*)?(\d[\d.]*)", cell.partition(" at ")[0])
        assert cell.partition(" at ")[2] == place, target
        assert len(numbers) == len(values), target
        for (bold, number), value in zip(numbers, values, strict=True):
            assert _says(number, value), f"{target}: {number}, measured: {value:.6g}"
            relation, _, limit = goal.rpartition("= ")
            if not relation:  # not above the noise, by stock's
                relation, limit = "<", "1"
            compare = {">": operator.ge, "<": operator.le}[relation]
            assert compare(float(number), float(limit)) == (not bold), f"{target}: {cell}"


@pytest.mark.parametrize("name", MACHINES)
def test_gradients_are_ready_as_the_table_of_targets_says(name: str) -> None:
    cell = table_with("gradients ready in eager's order", name)["gradients ready in eager's order"]
    orders = [section["gradients_ready"] for section in sections("memory", MACHINES[name]).values()]
    assert {ready["ours, scope"] == ready["eager"] for ready in orders} == {cell[name] == "yes"}


def casts_in_the_readme() -> Expected:
    """Fresh results, with their own share of a copy's speed."""
    names = {
        "GPT-2 small, 148 tensors": "gpt2-small",
        "ViT-B/16, 152 tensors": "vit-b16",
        "a 1.3 B transformer, 219 tensors": "llama-1.3b",
        "150 tensors of 64 KiB": "150 x 64 KiB",
    }
    times = {
        ".to, one by one": ".to",
        "_foreach_copy_, out": "foreach out",
        "multi_cast": "multi_cast",
    }
    for row, name in names.items():
        section = sections("casts", GPU)[f"{name}, float32 to bfloat16"]
        for column, candidate in times.items():
            yield row, column, rows(section)[candidate]["p50"] * 1e6
        yield row, "its speed by a copy's", 100 / section["time_by_copy"]["multi_cast"]


def test_the_readme_has_the_numbers_of_casts_on_a_gpu() -> None:
    table = table_with("150 tensors of 64 KiB", "multi_cast", "README.md")
    assert not _wrong(table, casts_in_the_readme())


def test_the_readme_has_the_cost_of_tiny_layers() -> None:
    """With the default `weight_cache`, of a model compiled whole and block by block."""
    text = " ".join((ROOT / "README.md").read_text().split())
    (found,) = re.findall(
        r"each weight takes about (\S+) us more of the host's time a step, "
        r"(\S+) compiled block by block \(`weights`\): "
        r"where layers are 8 wide, a step is (\S+) to (\S+) times as long\.",
        text,
    )
    steps = [
        sections("weights", OTHERS["Xeon"])[f"{form}, training step"]
        for form in ("whole", "block by block")
    ]
    ours = [rows(step)["ours, scope"] for step in steps]
    expected = [
        *(row["difference"] / step["weights"] * 1e6 for row, step in zip(ours, steps, strict=True)),
        *(row["ratio"] for row in ours),
    ]
    for written, value in zip(found, expected, strict=True):
        assert _says(written, value), f"{written}, measured: {value:.6g}"


@pytest.mark.parametrize(
    ("question", "machine", "pattern"),
    [
        ("casts", GPU, r"(\d+)(?: rounds \(| from 64 MiB on)"),
        ("fused", EPYC, r"(\d+) rounds"),
        ("fused", GPU, r"(\d+) rounds"),
        ("launch", GPU, r"(\d+) rounds"),
        ("weights", OTHERS["Xeon"], r"(\d+) rounds"),
        ("decode", EPYC, r"(\d+) rounds"),
        ("decode-graphs", GPU, r"(\d+) rounds\) and"),
        ("threshold", EPYC, r"(\d+) rounds"),
        ("rounding", OTHERS["Zen 3"], r"(\d+) rounds on the Zen 3"),
        ("rounding", OTHERS["Xeon"], r"(\d+) rounds on the Xeon"),
        ("training", EPYC, r"(\d+) trials of (\d+) rounds"),
    ],
)
def test_as_many_rounds_as_in_the_file(question: str, machine: str, pattern: str) -> None:
    """What they multiply to, where there are trials, too."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    path = f"`results/{machine}/{question}.json`"
    written = {
        math.prod(map(int, match.groups()))
        for paragraph in (" ".join(lines.split()) for lines in text.split("\n\n"))
        if path in paragraph
        for match in re.finditer(pattern, paragraph[paragraph.index(path) :])
    }
    measured = {
        len(row["samples"])
        for section in sections(question, machine).values()
        for row in section["rows"]
    }
    assert written == measured


def test_launch_on_a_gpu_is_as_many_times_as_fast() -> None:
    """As `_foreach_copy_`, into given tensors, by the target, and into new ones."""
    text = " ".join((ROOT / "benchmarks" / "README.md").read_text().split())
    (out,) = re.findall(
        r"by the device's clock (\S+) to (\S+) times as fast from 500 tensors on "
        r"\(target 3: met\), and (\S+) times for 148",
        text,
    )
    (fresh,) = re.findall(
        r"\*Fresh\* results, (\S+) times for 148, (\S+) for 500, and (\S+) and (\S+) beyond\.", text
    )

    def speed(count: int, candidate: str) -> float:
        section = sections("launch", GPU)[f"{count} tensors of 1024 bytes, device"]
        return 1 / rows(section)[candidate]["ratio"]

    expected = [
        *(speed(count, "multi_cast out") for count in (500, 2000, 148)),
        *(speed(count, "multi_cast") for count in (148, 500, 1360, 2000)),
    ]
    for written, value in zip([*out, *fresh], expected, strict=True):
        assert _says(written, value), f"{written} times, measured: {value:.6g}"


def test_the_guide_to_weights_has_the_numbers_of_decode() -> None:
    guide = (ROOT / "docs" / "weights.md").read_text()
    (paragraph,) = re.findall(
        r"^On two CPU cores a token .*?(?=\n\n)", guide, re.DOTALL | re.MULTILINE
    )
    expected = [
        rows(sections("decode")[context])[candidate]["p50"] * 1e3
        for context in ("one context", "context per token")
        for candidate in ("stock", "ours, scope", "ours, version", "limit")
    ]
    for written, value in zip(re.findall(r"(\S+) ms", paragraph), expected, strict=True):
        assert _says(written, value), f"{written} ms, measured: {value:.6g}"


def _wrong(table: Table, expected: Expected) -> dict[tuple[str, str], str]:
    return {
        (name, heading): f"{table[name][heading]}, measured: {value:.6g}"
        for name, heading, value in expected
        if not _says(table[name][heading], value)
    }


def _says(written: str, value: float) -> bool:
    """Whether a number is a value, rounded to the digits that it has."""
    text = written.replace(",", "").removesuffix("%").strip()
    return abs(value - float(text)) <= 0.5 * 10 ** -len(text.partition(".")[2]) * (1 + 1e-6)
