"""Files that appear whole or not at all."""

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
