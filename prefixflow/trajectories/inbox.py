"""Trajectory files that another process writes while training runs: each is used once, across restarts too.

Invariants:

1. A file is its name and its content: the same name with other content is another file, and is used.
2. Of the files that are there, the first by name is next.
3. What has been used is in `state()`, JSON-able; an inbox that is restored from it goes on where that one stood.

The writer must rename a complete file into place (`write_trajectories` does), routes before the file itself.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


class Inbox:
    """A file that is replaced from time to time, or a folder into which `*.jsonl` files are put.

    current: the file that is being used, with the number of its batches that are done; None before the first.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._used: set[str] = set()
        self._current: str | None = None
        self._num_done = 0
        # Content is hashed once while a file stays as it is.
        self._keys: dict[tuple[str, int, int, int], str] = {}

    @property
    def num_done(self) -> int:
        """Batches of the file that is being used that are done."""
        return self._num_done

    def state(self) -> dict[str, Any]:
        return {"used": sorted(self._used), "current": self._current, "num_done": self._num_done}

    def restore(self, state: dict[str, Any]) -> None:
        self._used = set(state["used"])
        self._current = state["current"]
        self._num_done = state["num_done"]

    def reopen(self) -> Path | None:
        """The file that was being used when the state was taken; None where there was none, or it is gone."""
        return next((file for file in self._files() if self.is_current(file)), None)

    def is_current(self, file: Path) -> bool:
        """False where `file` has been replaced since it was opened, or is gone."""
        try:
            return self._key(file) == self._current
        except FileNotFoundError:
            return False

    def open_next(self) -> Path | None:
        """The first file that is new, which is used from now on; None where there is none yet."""
        for file in self._files():
            try:
                key = self._key(file)
            except FileNotFoundError:
                continue
            if key not in self._used:
                self._used.add(key)
                self._current, self._num_done = key, 0
                return file
        return None

    def finish_batch(self) -> None:
        """One more batch of the file that is being used is done."""
        self._num_done += 1

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return sorted(file for file in self.path.glob("*.jsonl") if file.is_file())
        return [self.path] if self.path.is_file() else []

    def _key(self, file: Path) -> str:
        status = file.stat()
        seen = (file.name, status.st_ino, status.st_size, status.st_mtime_ns)
        if seen not in self._keys:
            self._keys[seen] = f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"
        return self._keys[seen]
