"""Reward functions: `module:function` or `file.py:function`, called as `function(sample)` for each sampled response."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefixflow.trajectories.types import TrajectoryError, finite_number


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What a reward function sees.

    prompt_id, prompt_tokens (int64 [P]) and fields: of the prompt's line, `fields` without its tokens.
    response_tokens: int64 [S], with the stop token where there was one.
    is_stopped: False where the response was cut off at its longest length.
    """

    prompt_id: str
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    is_stopped: bool
    fields: Mapping[str, Any]


class RewardFunction:
    """A function named on the command line; a call gives a finite number, or one sentence as ValueError, whatever went wrong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = _load(name)

    def __call__(self, sample: Sample) -> float:
        try:
            value = self._function(sample)
        except Exception as error:
            raise ValueError(
                f"--reward-function {self.name}: {type(error).__name__} for the response to prompt {sample.prompt_id!r}: "
                f"{error}"
            ) from error
        try:
            # A number of numpy or torch has `item`.
            return finite_number("reward", value.item() if hasattr(value, "item") else value)
        except TrajectoryError as error:
            raise ValueError(
                f"--reward-function {self.name}: expected a finite number for the response to prompt "
                f"{sample.prompt_id!r}, got {error.got}."
            ) from None


def _load(name: str) -> Callable[[Sample], Any]:
    place, separator, attribute = name.rpartition(":")
    if not separator or not place or not attribute:
        raise ValueError(
            f"--reward-function {name}: expected module:function or file.py:function, such as my_rewards:exact_match."
        )
    function = getattr(_module(name, place), attribute, None)
    if not callable(function):
        raise ValueError(f"--reward-function {name}: expected a function {attribute!r} in {place}, got none.")
    return function


def _module(name: str, place: str) -> Any:
    if place.endswith(".py"):
        return _module_of_file(name, Path(place))
    # `python file.py` looks beside the file, and not where the user stands.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with _importing(name, place, " Name a module on PYTHONPATH or in this folder, or a file that ends in .py."):
        return importlib.import_module(place)


def _module_of_file(name: str, file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"--reward-function {name}: expected a Python file {file}, got no such file.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the module look it up by name.
    sys.modules.setdefault(file.stem, module)
    with _importing(name, place=str(file)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importing(name: str, place: str, way_out: str = "") -> Iterator[None]:
    """A module that fails runs code of its own: anything may come out of it, an exit too."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--reward-function {name}: {place} cannot be imported ({type(error).__name__}: {error}).{way_out}"
        ) from error
