"""`smart-autocast lower`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from autocast_backend import cli
from autocast_backend.export import lower
from autocast_backend.export.command import CommandError, lower_file
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
    assert printed[0].startswith(
        f"{output}: 6 nodes lowered, 4 untouched, 0 bracketed; 15 smart casts"
    )
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

    path, report = tmp_path / "lowered.pt2", tmp_path / "report.html"
    source = saved(Case(Kept, (numbers(2, 2),)), tmp_path)
    assert cli.main(["lower", str(source), "-o", str(path), "--report", str(report)]) == 0
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
        ("damaged.pt2", [], "this archive is damaged"),
        ("model.pt2", ["-o", "nowhere/lowered.pt2"], "--output: there is no folder"),
        ("model.pt2", ["--report", "nowhere/page.html"], "--report: there is no folder"),
        ("model.pt2", ["-o", "."], "--output: expected a file; . is a folder"),
        ("model.pt2", ["--report", "."], "--report: expected a file; . is a folder"),
        ("model.pt2", ["--report", "lowered.pt2"], "--report: expected a file of its own"),
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With exit status 2, one line on stderr, and no file written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt2").write_text("no program")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("other/data/x.json", "{}")
    whole = (tmp_path / "other.pt2").read_bytes()
    (tmp_path / "damaged.pt2").write_bytes(whole.replace(b"PK\x01\x02", b"PK\x00\x00"))
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


@pytest.mark.parametrize("option", ["-o", "--report"])
@pytest.mark.parametrize("through", ["its name", "a link"])
def test_the_program_is_not_written_over(
    option: str, through: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody could make it again from the lowered one."""
    source, output = saved(MLP, tmp_path), tmp_path / "lowered.pt2"
    before, target = source.read_bytes(), source
    if through == "a link":
        target = tmp_path / "link.pt2"
        target.symlink_to(source)
    assert cli.main(["lower", str(source), "-o", str(output), option, str(target)]) == 2
    assert f"expected a file of its own; {target} is the program" in capsys.readouterr().err
    assert source.read_bytes() == before
    assert not output.exists()


def test_a_program_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved(MLP, tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != source)  # root may read anything
    assert cli.main(["lower", str(source), "-o", str(tmp_path / "lowered.pt2")]) == 2
    assert f"{source}: it may not be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_save_that_fails_loses_nothing(tmp_path: Path) -> None:
    """Like a full disk: no file of the process may be longer than 8 KiB. (An exception while
    PyTorch's own writer writes would end the process.)"""
    source, output = saved(MLP, tmp_path), tmp_path / "lowered.pt2"
    output.write_text("an earlier one")
    program = """
import resource, sys
from autocast_backend import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
sys.exit(cli.main(["lower", *sys.argv[1:]]))
"""
    command = [sys.executable, "-c", program, str(source), "-o", str(output)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"smart-autocast lower: --output: {output} cannot be written: ")
    assert output.read_text() == "an earlier one"
    assert sorted(tmp_path.iterdir()) == [output, source]


@pytest.mark.parametrize("error", [EOFError, ImportError, pickle.UnpicklingError])
def test_a_program_whose_weights_cannot_be_unpickled(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(source: Path) -> None:
        raise error("as torch.load does")

    source = saved(MLP, tmp_path)
    monkeypatch.setattr(torch.export, "load", load)
    with pytest.raises(CommandError, match="does not read it: as torch"):
        lower_file(source, tmp_path / "lowered.pt2")


def test_a_damaged_program(tmp_path: Path) -> None:
    source, output = tmp_path / "damaged.pt2", tmp_path / "lowered.pt2"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("damaged/models/model.json", "{}")
    with pytest.raises(CommandError, match=f"^{source}: torch.export.load, of torch "):
        lower_file(source, output)
    assert not output.exists()


@pytest.mark.slow
def test_a_program_with_an_op_of_another_library(tmp_path: Path) -> None:
    """The command cannot know what defines it."""
    program = """
import sys, torch

@torch.library.custom_op("test_command::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)

class Twice(torch.nn.Module):
    def forward(self, x):
        return twice(x)

torch.export.save(torch.export.export(Twice(), (torch.ones(2),)), sys.argv[1])
"""
    source, output = tmp_path / "model.pt2", tmp_path / "lowered.pt2"
    subprocess.run([sys.executable, "-c", program, str(source)], check=True)
    with pytest.raises(CommandError, match=r"import that .* call autocast_backend.export.lower"):
        lower_file(source, output)


def test_a_program_that_another_device_type_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    source = saved(Case(Attention, (numbers(1, 1, 4, 4),)), tmp_path)
    output = tmp_path / "lowered.pt2"
    assert cli.main(["lower", str(source), "-o", str(output), "--device", "mps"]) == 2
    error = capsys.readouterr().err
    assert "smart-autocast lower: device_type='mps': the program does not run" in error
    assert not output.exists()
