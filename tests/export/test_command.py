"""`smart-autocast lower`."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from autocast_backend import cli
from autocast_backend.export import lower
from autocast_backend.reports.rows import rows_of
from tests.export.models import Case, Mlp, numbers
from tests.support import assert_same_bits

MLP = Case(Mlp, (numbers(4, 8),))


def saved(case: Case, folder: Path) -> Path:
    path = folder / "model.pt2"
    torch.export.save(case.export(), path)
    return path


def test_a_file_in_a_file_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report = tmp_path / "lowered.pt2", tmp_path / "cast-report.html"
    command = ["lower", str(saved(MLP, tmp_path)), "-o", str(output), "--report", str(report)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{output}: 6 nodes lowered, 4 untouched, 0 bracketed; 15 casts")
    lowered = torch.export.load(output)
    assert_same_bits(lowered.module()(*MLP.inputs), MLP.model()(*MLP.inputs))

    page = report.read_text()
    assert "<title>Casts of model.pt2</title>" in page
    assert page.count("<tr class=") == len(list(rows_of(lowered.graph_module)))
    assert "Stays under autocast" not in page
    assert "linear.py" in page  # the user's line


def test_the_rows_of_a_report() -> None:
    """One for each call, with the casts it was given and the dtypes before and after."""
    rows = {row.call: row for row in rows_of(lower(MLP.export()).graph_module)}
    linear = rows["linear.default"]  # the last one, in float16
    assert (linear.arguments, linear.results) == (("float16",) * 3, ("float16",))
    assert [cast.op for cast in linear.casts] == ["autocast_to_fp16.default"] * 3
    assert [str(cast) for cast in linear.casts][1:] == [
        "p_down_weight: float32 -> float16",
        "p_down_bias: float32 -> float16",
    ]
    assert (rows["gelu.default"].casts, rows["gelu.default"].under) == ((), "")
    loss = {cast.op for cast in rows["mse_loss.default"].casts}
    assert loss == {"autocast_to_full_precision.default"}
    assert {cast.op for cast in rows["cat.default"].casts} == {"promote.default"}


def test_what_stays_under_autocast_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Kept(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.hstack([x, x + 1])

    path, report = saved(Case(Kept, (numbers(2, 2),)), tmp_path), tmp_path / "report.html"
    assert cli.main(["lower", str(path), "-o", str(path), "--report", str(report)]) == 0
    assert "  stays under autocast: getitem = hstack" in capsys.readouterr().out
    assert "Stays under autocast" in report.read_text()
    (kept,) = [row for row in rows_of(torch.export.load(path).graph_module) if row.under]
    assert (kept.call, kept.under) == ("hstack.default", "cpu: bfloat16")


def test_for_another_device_type(tmp_path: Path) -> None:
    output = tmp_path / "lowered.pt2"
    command = ["lower", str(saved(MLP, tmp_path)), "-o", str(output), "--device", "cuda"]
    assert cli.main(command) == 0
    casts = {row.call: row.casts for row in rows_of(torch.export.load(output).graph_module)}
    assert casts["cat.default"] == ()  # a policy of the CPU alone


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("none.pt2", [], "there is no such file"),
        ("text.pt2", [], "this is no archive at all"),
        ("other.pt2", [], "this archive holds no program"),
        ("model.pt2", ["-o", "nowhere/lowered.pt2"], "--output: there is no folder"),
        ("model.pt2", ["--report", "nowhere/page.html"], "--report: there is no folder"),
        ("model.pt2", ["-o", "."], "--output: expected a file; . is a folder"),
        ("model.pt2", ["--report", "."], "--report: expected a file; . is a folder"),
        ("model.pt2", ["--device", "gpu"], "--device: expected one of"),
        ("decomposed.pt2", [], "Lower it first"),
    ],
)
def test_what_is_refused(
    name: str,
    options: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit status 2, one line on stderr, and no file written."""
    (tmp_path / "text.pt2").write_text("no program")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("other/data/x.json", "{}")
    if name == "model.pt2":
        saved(MLP, tmp_path)
    if name == "decomposed.pt2":
        torch.export.save(MLP.export().run_decompositions(), tmp_path / name)
    output = tmp_path / "lowered.pt2"
    assert cli.main(["lower", str(tmp_path / name), "-o", str(output), *options]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.startswith("smart-autocast lower: ")
    assert not output.exists()
