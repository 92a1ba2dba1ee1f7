"""Files that appear whole or not at all, and whether they can appear."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` when the block ends, or vanishes when it raises.

    A symbolic link is written through. Raises ValueError where `path` names something else than a
    file or its folder is missing.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ValueError(f"{path}: cannot be written, its folder does not exist. Create it first.")
    if target.exists() and not target.is_file():
        # A rename would replace a device or a pipe by a plain file.
        raise ValueError(f"{path}: expected the name of a file, got something else of that name.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def why_unwritable(path: str | Path) -> str | None:
    """Why neither a file nor a folder can be made at `path`, folders above it included; None where nothing speaks against it."""
    place = Path(path).absolute()
    while not os.path.exists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is no folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"
