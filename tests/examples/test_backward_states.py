"""The table of the guide is the one the example prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_table_in_the_guide() -> None:
    program = [sys.executable, ROOT / "examples" / "backward_states.py"]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    head, _, *body = (line.strip("| ").split(" | ") for line in result.stdout.splitlines())
    assert result.stdout in (ROOT / "docs" / "backward.md").read_text()
    rows = [dict(zip(head, cells, strict=True)) for cells in body]
    assert len(rows) == 9
    assert all(row['"auto"'] == row["eager"] == row["backward"] for row in rows)
    assert any(row["stock"] != row["eager"] for row in rows)
