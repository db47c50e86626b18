"""What commands write is whole or not written, and nothing else is lost for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autocast_backend.files import replaced, unwritable


def test_a_file_is_replaced_when_all_is_written(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("before")
    file.chmod(0o640)
    with replaced(file) as new:
        new.write_text("half")
        assert file.read_text() == "before"
        new.write_text("after")
    assert file.read_text() == "after"
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [file]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    usual, file = tmp_path / "usual", tmp_path / "page.html"
    usual.touch()
    with replaced(file) as new:
        new.touch()
    assert file.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("existed", [True, False])
def test_an_error_leaves_what_was_there(existed: bool, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    if existed:
        file.write_text("before")

    def fail(new: Path) -> None:
        new.write_text("half")
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"), replaced(file) as new:
        fail(new)
    assert [f.read_text() for f in tmp_path.iterdir()] == ["before"] * existed


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "page.html", tmp_path / "page.html"
    link.symlink_to(file)
    with replaced(link) as new:
        new.write_text("after")
    assert link.is_symlink()
    assert file.read_text() == "after"


def test_a_device_is_written_to() -> None:
    assert unwritable({"--report": Path("/dev/null")}, {}) is None
    with replaced(Path("/dev/null")) as new:
        new.write_text("page")
    assert Path("/dev/null").is_char_device()


def test_a_folder_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    problem = unwritable({"--report": tmp_path / "page.html"}, {})
    assert problem == f"--report: no file can be written in {tmp_path}; name another folder"


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    file = tmp_path / ("a" * 300)
    problem = unwritable({"--output": file}, {})
    assert problem == f"--output: expected a file; {file}: File name too long. Name another"
