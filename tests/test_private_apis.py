"""Private names of torch stand in `_torch/` alone, but for those of `_logging.py` and
`_op_namespace.py`: every process that imports torch loads these two, and nothing else of ours."""

from __future__ import annotations

import re
from pathlib import Path

import autocast_backend

PACKAGE = Path(autocast_backend.__file__).parent
COMMENT = re.compile(r"(?<!\S)#.*|`[^`\n]*`")
PRIVATE = re.compile(r"\btorch\._(?!_)\w+|\._schema\b|\._qualified_op_name\b")


def uses(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}: {found}"
        for path in sorted(folder.rglob("*.py"))
        for found in PRIVATE.findall(COMMENT.sub("", path.read_text()))
    ]


def test_they_have_one_home() -> None:
    assert len(uses(PACKAGE / "_torch")) > 20
    homes = ("_torch/", "_logging.py", "_op_namespace.py")
    assert [use for use in uses(PACKAGE) if not use.startswith(homes)] == []
