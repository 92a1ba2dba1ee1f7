"""Planting a fault in a process and taking it out again, for tests of what catches it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_undo: list[Callable[[], None]] = []


def on_restore(undo: Callable[[], None]) -> None:
    """Call `undo` at the next `restore` in this process."""
    _undo.append(undo)


def patch(owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute until the next `restore` in this process."""
    on_restore(functools.partial(setattr, owner, name, vars(owner)[name]))
    setattr(owner, name, replacement)


def restore() -> None:
    while _undo:
        _undo.pop()()


@dataclass(frozen=True, slots=True)
class Setup:
    """Puts back the last mutant of a process and makes another; None: none."""

    mutant: Callable[[], None] | None = None

    def __call__(self) -> None:
        restore()
        if self.mutant is not None:
            self.mutant()
