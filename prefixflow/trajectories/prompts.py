"""Prompt files: JSON lines, one prompt each, from which responses are sampled.

A line is `{"id": .., "tokens": [..], ...}`; other fields go to the reward function. Lines of trajectory files serve as
well: `group` names the prompt, which is what comes before the first token with a `loss_mask` of 1, and further lines of a
group add nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prefixflow.trajectories.reader import ALIASES, json_lines, trajectory_files
from prefixflow.trajectories.types import Trajectory, TrajectoryError, check_limits, describe


@dataclass(frozen=True, slots=True, eq=False)
class PromptRecord:
    """tokens: int64 [P], P >= 1. fields: what else stood on the line, for the reward function."""

    id: str
    tokens: np.ndarray
    fields: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(
    path: str | Path, *, vocab_size: int | None = None, max_prompt_tokens: int | None = None
) -> tuple[PromptRecord, ...]:
    """The prompts of a file, or of all `*.jsonl` of a folder in the order of their names, each once.

    Raises TrajectoryError at the first line that is no prompt, ValueError where there is no file.
    """
    found: dict[str, PromptRecord] = {}
    for file in trajectory_files(path):
        for number, record in json_lines(file):
            where = f"{file}, line {number}"
            try:
                prompt = _prompt(record, vocab_size, max_prompt_tokens)
                same = found.setdefault(prompt.id, prompt)
                if not np.array_equal(same.tokens, prompt.tokens):
                    raise TrajectoryError("id", "one prompt under one name", f"two different ones of {prompt.id!r}")
            except TrajectoryError as error:
                raise error.at(where) from None
    if not found:
        raise TrajectoryError("", "at least one prompt", "none", where=str(path))
    return tuple(found.values())


def _prompt(record: Mapping[str, Any], vocab_size: int | None, max_prompt_tokens: int | None) -> PromptRecord:
    fields = {ALIASES.get(name, name): value for name, value in record.items()}
    name = fields.get("group", fields.get("id"))
    if not isinstance(name, str) or not name:
        raise TrajectoryError("id", "a string that names the prompt (or its group)", describe(name))
    tokens = fields.pop("tokens", None)
    if not isinstance(tokens, list):
        raise TrajectoryError("tokens", "a list of token ids", describe(tokens))
    # The constructor checks what is true of any list of tokens.
    whole = Trajectory(name, name, tokens, fields.pop("loss_mask", [0] * len(tokens)), 0.0)
    trained = np.flatnonzero(whole.loss_mask)
    prompt = whole.tokens[: trained[0]] if trained.size else whole.tokens
    check_limits(Trajectory(name, name, prompt, [0] * len(prompt), 0.0), vocab_size=vocab_size)
    if max_prompt_tokens is not None and len(prompt) > max_prompt_tokens:
        raise TrajectoryError(
            "tokens",
            f"a prompt of at most {max_prompt_tokens} tokens, so that a response has room",
            f"{len(prompt)}",
            "Shorten the prompt, raise --seq-length, or lower --max-response-length.",
        )
    return PromptRecord(name, prompt, fields)
