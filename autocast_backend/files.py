"""Files that commands write: refused before work starts where they cannot be, and whole or not at
all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


def unwritable(targets: Mapping[str, Path | None], sources: Mapping[str, Path]) -> str | None:
    """What is wrong with the files that a command is to write; None: nothing.

    Args:
        targets: the files to write, by the argument that names each.
        sources: the files that the command reads, by what the user knows each as.
    """
    taken = {path.resolve(): name for name, path in sources.items()}
    for argument, file in targets.items():
        if file is None:
            continue
        folder = file.resolve().parent
        try:
            is_folder = file.is_dir()
        except OSError as error:  # its name is too long
            return f"{argument}: expected a file; {file}: {error.strerror}. Name another"
        if is_folder:
            return f"{argument}: expected a file; {file} is a folder. Name a file in it"
        if not folder.is_dir():
            return f"{argument}: there is no folder {folder}; make it, or name another"
        if not (os.access(folder, os.W_OK) or _is_special(file)):
            return f"{argument}: no file can be written in {folder}; name another folder"
        other = taken.setdefault(file.resolve(), argument)
        if other != argument:
            return f"{argument}: expected a file of its own; {file} is {other}. Name another"
    return None


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Where to write what is to become `file` when the `with` block ends without an error. Until
    then, and after an error, `file` is what it was."""
    if _is_special(file):
        yield file
        return
    file = file.resolve()  # a link stays one
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".smart-autocast-") as folder:
        new = Path(folder) / file.name
        yield new
        if file.exists():
            shutil.copymode(file, new)
        new.replace(file)


def _is_special(file: Path) -> bool:
    """Whether this is a device or a pipe, `/dev/stdout` say: it has nothing to lose, and another
    file in its place would be one less device."""
    return file.exists() and not file.is_file()
