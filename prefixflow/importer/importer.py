"""`prefixflow import`: other people's rollouts to trajectory files.

A source line is an object in one of two forms:

* prompt form: `{"group", "prompt", "response", "reward"}`;
* message form: `{"group", "messages": [{"role", "content", ...}], "reward"}`, the assistant turns
  are the trained ones.

Invariants:

1. Ids are `<line>` (mode `whole`) or `<line>/<turn>` (mode `steps`); lines count from 1 as in an
   editor, turns count the assistant's from 1. A prompt-form line is one turn.
2. Groups stand in the order of their first appearance, each with its lines in the source's order.
3. `steps`: sample k of a line is sample k+1's prefix, and only its newest turn is trained.
4. Nothing is cut: a trajectory longer than the limit is dropped and counted.
5. Advantages are computed over source lines, before anything is dropped, so a line with more turns
   weighs no more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from prefixflow.importer.encoders import Encoder, Turn, load_encoder, parse_messages
from prefixflow.trajectories.advantages import grpo_advantages
from prefixflow.trajectories.reader import json_lines, write_trajectories
from prefixflow.trajectories.types import Trajectory, TrajectoryError, describe, finite_number

T = TypeVar("T")


class Mode(Enum):
    WHOLE = "whole"
    STEPS = "steps"


class Advantage(Enum):
    REWARD = "reward"
    GRPO = "grpo"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    mode: Mode = Mode.WHOLE
    group_key: str = "group"
    advantage: Advantage = Advantage.REWARD
    max_groups: int | None = None
    max_length_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Trajectories in output order, and how many were left out for their length."""

    trajectories: tuple[Trajectory, ...]
    num_lines: int
    num_dropped: int


@dataclass(frozen=True, slots=True)
class _SourceLine:
    number: int
    group: str
    reward: float
    record: dict[str, Any]


def import_trajectories(source: str | Path, encoder: Encoder, options: ImportOptions = ImportOptions()) -> ImportResult:
    """Read `source` and encode it.

    Raises TrajectoryError at the first malformed line, ValueError where nothing is there to import.
    """
    source = Path(source)
    if not source.is_file():
        raise ValueError(f"{source}: expected a JSON-lines file to import, got no such file.")
    groups = _read_groups(source, options)
    lines = [line for group in groups for line in group]
    advantages = [advantage for group in groups for advantage in _advantages(group, options.advantage)]
    kept: list[Trajectory] = []
    num_dropped = 0
    for line, advantage in _progress(list(zip(lines, advantages, strict=True)), "encoding"):
        for trajectory in _encode_line(source, line, advantage, encoder, options):
            limit = options.max_length_tokens
            if limit is not None and len(trajectory) > limit:
                num_dropped += 1
            else:
                kept.append(trajectory)
    if not kept:
        raise ValueError(
            f"{source}: expected at least one trajectory, got none from {len(lines)} lines:"
            f" {num_dropped} trajectories are longer than --max-length."
        )
    return ImportResult(tuple(kept), len(lines), num_dropped)


def _read_groups(source: Path, options: ImportOptions) -> list[list[_SourceLine]]:
    groups: dict[str, list[_SourceLine]] = {}
    for number, record in json_lines(source):
        try:
            line = _parse_line(number, record, options.group_key)
        except TrajectoryError as error:
            raise error.at(f"{source}, line {number}") from None
        groups.setdefault(line.group, []).append(line)
    if not groups:
        raise TrajectoryError("", "at least one line to import", "an empty file", where=str(source))
    return list(groups.values())[: options.max_groups]


def _parse_line(number: int, record: dict[str, Any], group_key: str) -> _SourceLine:
    group = record.get(group_key)
    if isinstance(group, bool) or not isinstance(group, (str, int)) or group == "":
        raise TrajectoryError(
            group_key,
            "a string or an integer that names the group",
            describe(group) if group_key in record else "no such field",
            "Name another field with --group-key.",
        )
    if "reward" not in record:
        raise TrajectoryError("reward", "the reward of the line, a number", "no such field")
    is_prompt = "prompt" in record or "response" in record
    if is_prompt == ("messages" in record):
        raise TrajectoryError(
            "messages",
            'either "prompt" and "response" or "messages"',
            "both" if is_prompt else "neither",
        )
    return _SourceLine(number, str(group), finite_number("reward", record["reward"]), record)


def _advantages(group: list[_SourceLine], advantage: Advantage) -> list[float]:
    """One advantage for each source line of a group."""
    rewards = [line.reward for line in group]
    return rewards if advantage is Advantage.REWARD else grpo_advantages(rewards)


def _encode_line(
    source: Path, line: _SourceLine, advantage: float, encoder: Encoder, options: ImportOptions
) -> Iterator[Trajectory]:
    try:
        turns = _encode_turns(line.record, encoder)
        for name, tokens, mask in _samples(str(line.number), turns, options.mode):
            yield Trajectory(
                id=name,
                group=line.group,
                tokens=tokens,
                loss_mask=mask,
                advantages=np.broadcast_to(np.float64(advantage), tokens.shape),
                reward=line.reward,
            )
    except TrajectoryError as error:
        field = "" if error.field in ("tokens", "loss_mask") else error.field
        raise error.at(f"{source}, line {line.number}", field) from None


def _encode_turns(record: dict[str, Any], encoder: Encoder) -> list[Turn]:
    if "messages" in record:
        messages = parse_messages(record["messages"])
        turns = encoder.encode_messages(messages)
        if not any(message.is_trained for message in messages):
            raise TrajectoryError(
                "messages",
                "at least one message of the assistant, which is what is trained",
                f"only messages of {', '.join(sorted({message.role for message in messages}))}",
                "Leave the line out.",
            )
        return turns
    for field in ("prompt", "response"):
        if not isinstance(record.get(field), str):
            raise TrajectoryError(field, "a string", describe(record.get(field)))
    turn = encoder.encode_prompt(record["prompt"], record["response"])
    if not turn.context:
        raise TrajectoryError(
            "prompt",
            "at least one token before the response, which its first token is predicted from",
            "an empty prompt and a tokenizer without a begin token",
        )
    return [turn]


def _samples(line: str, turns: list[Turn], mode: Mode) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(id, tokens int64 [n], loss mask bool [n]) of each sample; steps are views of one array."""
    tokens = np.array([token for turn in turns for token in turn.context + turn.trained], np.int64)
    tokens.flags.writeable = False
    mask = np.zeros(tokens.size, bool)
    stop, num_turns = 0, 0
    for turn in turns:
        start = stop + len(turn.context)
        stop = start + len(turn.trained)
        mask[start:stop] = True
        if mode is Mode.STEPS and turn.trained:
            num_turns += 1
            newest = np.arange(stop) >= start
            yield f"{line}/{num_turns}", tokens[:stop], newest
    if mode is Mode.WHOLE:
        yield line, tokens, mask


def _progress(items: list[T], description: str) -> Iterable[T]:
    """A progress bar on stderr when a person is watching."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description, console=Console(stderr=True), transient=True)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `prefixflow import`, read by `run_import`."""
    parser.add_argument("source", metavar="IN.jsonl", help="prompt form or message form, one object a line")
    parser.add_argument("output", metavar="OUT.jsonl", help="the trajectory file to write")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR|bytes",
        help="folder with a Hugging Face tokenizer, or the built-in byte tokenizer (ids below 512)",
    )
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        default=Mode.WHOLE.value,
        help="whole: one trajectory a line; steps: one cumulative sample per assistant turn, of"
        " which only the newest turn is trained (default: %(default)s)",
    )
    parser.add_argument(
        "--group-key",
        default="group",
        metavar="K",
        help="field that names the group (default: %(default)s)",
    )
    parser.add_argument(
        "--advantage",
        choices=[advantage.value for advantage in Advantage],
        default=Advantage.REWARD.value,
        help="reward: copied; grpo: (r - mean) / (std + 1e-6) over the lines of the group (default: %(default)s)",
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="keep the first N groups, whole")
    parser.add_argument("--max-length", type=_positive, metavar="N", help="drop trajectories of more than N tokens")


def run_import(args: argparse.Namespace) -> int:
    """Import as `args` say, print a summary line and return the exit status.

    On failure the status is 2, as of the other commands, and stderr has the sentence.
    """
    try:
        print(_import_file(args))
    except (ValueError, OSError) as error:
        print(f"prefixflow import: {error}", file=sys.stderr)
        return 2
    return 0


def _import_file(args: argparse.Namespace) -> str:
    output = Path(args.output)
    if output.exists() and output.resolve() == Path(args.source).resolve():
        raise ValueError(f"{output}: is the source as well. Write to another file.")
    options = ImportOptions(
        mode=Mode(args.mode),
        group_key=args.group_key,
        advantage=Advantage(args.advantage),
        max_groups=args.limit,
        max_length_tokens=args.max_length,
    )
    result = import_trajectories(args.source, load_encoder(args.tokenizer), options)
    write_trajectories(output, _progress(list(result.trajectories), "writing"))
    return _summary(output, result, options)


def _summary(output: Path, result: ImportResult, options: ImportOptions) -> str:
    trajectories = result.trajectories
    num_groups = len({trajectory.group for trajectory in trajectories})
    num_tokens = sum(len(trajectory) for trajectory in trajectories)
    num_trained = sum(trajectory.num_trained for trajectory in trajectories)
    text = (
        f"wrote {output}: {len(trajectories):,} trajectories in {num_groups:,} groups"
        f" from {result.num_lines:,} lines, {num_tokens:,} tokens, {num_trained:,} of them trained,"
        f" the longest {max(map(len, trajectories)):,}"
    )
    if options.max_length_tokens is None:
        return text
    return f"{text}; dropped {result.num_dropped:,} longer than {options.max_length_tokens:,} tokens"


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return value
