"""The table of the guide is the one the example prints."""

from __future__ import annotations

from pathlib import Path

import backward_states
import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "backward.md"


@pytest.mark.slow
def test_the_table_in_the_guide() -> None:
    rows = list(backward_states.rows())
    head, body = rows[0].keys(), [row.values() for row in rows]
    printed = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    lines = GUIDE.read_text().splitlines()
    start = lines.index(printed[0])
    assert [lines[start], *lines[start + 2 : start + 2 + len(body)]] == printed
    assert all(row['"auto"'] == row["eager"] == row["backward"] for row in rows)
    assert any(row["stock"] != row["eager"] for row in rows)
