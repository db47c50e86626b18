"""docs/export.md: its program runs, and each row of its table is a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.export import test_comparison
from tests.regions import test_hops

GUIDE = Path(__file__).parents[2] / "docs" / "export.md"


@pytest.mark.slow
def test_the_program_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["torch.bfloat16"] * 3
    assert (tmp_path / "lowered.pt2").exists()


def test_each_row_of_the_table_is_a_test() -> None:
    _, table = GUIDE.read_text().split("| --- | --- | --- | --- | --- |\n")
    rows = [line for line in table.splitlines() if line.startswith("|")]
    named = [re.search(r"`(\w+)`\S* \|$", row) for row in rows]
    assert len(rows) >= 14
    for row, name in zip(rows, named, strict=True):
        assert name is not None, row
        test = f"test_{name[1]}"
        assert hasattr(test_comparison, test) or hasattr(test_hops, test), row
