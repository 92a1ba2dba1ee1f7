"""Trajectory files: JSON lines, one trajectory each, with optional routes beside them.

Invariants:

1. A file is read whole or not at all: a malformed line raises TrajectoryError with the file, the
   line (from 1), the field in the file's own spelling, what was expected, what was got, and the
   way out.
2. Ids are unique over all the files read together.
3. `write_trajectories` followed by `read_trajectories` gives equal trajectories, bit for bit; a
   file being written never stands half-written under its name.

Strategy: the standard library parses a line, numpy converts its arrays; no loop over tokens runs
in Python.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prefixflow.trajectories.files import atomic_write
from prefixflow.trajectories.types import (
    LOGPROB_FIELDS,
    RouteShape,
    Trajectory,
    TrajectoryError,
    check_limits,
    check_routes,
    describe,
)

REQUIRED_FIELDS = ("id", "group", "tokens", "loss_mask", "advantages")
OPTIONAL_FIELDS = (*LOGPROB_FIELDS, "reward", "temperature", "routes")

#: verl's spellings. Its `uid` names the prompt, which all samples of a group share.
ALIASES = {
    "input_ids": "tokens",
    "response_mask": "loss_mask",
    "uid": "group",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "routed_experts": "routes",
}
_KNOWN_FIELDS = (*REQUIRED_FIELDS, *OPTIONAL_FIELDS, *ALIASES)
# Names shorter than this are too alike for a guess to be fair: "idx" is no misspelt "id".
_MIN_GUESSED_LENGTH = 4
_MISSPELLING_SIMILARITY = 0.82


def trajectory_files(path: str | Path) -> tuple[Path, ...]:
    """The file itself, or the `*.jsonl` files of a folder in the order of their names.

    Raises ValueError where there is none.
    """
    path = Path(path)
    if path.is_dir():
        files = tuple(sorted(file for file in path.glob("*.jsonl") if file.is_file()))
        if not files:
            raise ValueError(f"{path}: expected trajectory files (*.jsonl) in this folder, got none.")
        return files
    if not path.is_file():
        raise ValueError(f"{path}: expected a trajectory file or a folder of them, got no such file.")
    return (path,)


def routes_path(path: str | Path) -> Path:
    """Where the routes of a trajectory file lie: `a.jsonl` -> `a.routes.safetensors`."""
    return Path(path).with_suffix(".routes.safetensors")


def read_trajectories(
    path: str | Path,
    *,
    vocab_size: int | None = None,
    max_positions: int | None = None,
    routes: bool = False,
    route_shape: RouteShape | None = None,
) -> tuple[Trajectory, ...]:
    """Read a trajectory file, or all the `*.jsonl` of a folder in the order of their names.

    vocab_size: token ids at or above it are an error; None does not check.
    max_positions: trajectories with more positions (tokens - 1) are an error; None does not check.
    routes: also read the expert routes, from the file beside or from the lines themselves; without
    it they are None.
    route_shape: routes that do not fit the model are an error; None does not check.

    Raises TrajectoryError at the first malformed line, ValueError where no file is found.
    """
    trajectories: list[Trajectory] = []
    place_of: dict[str, str] = {}
    for file in trajectory_files(path):
        sidecar = _open_routes(file) if routes else None
        for where, fields, spelling in _records(file):
            try:
                trajectory, inline = _build(fields, sidecar)
                check_limits(trajectory, vocab_size=vocab_size, max_positions=max_positions)
                if routes:
                    trajectory = _with_routes(trajectory, inline, sidecar, route_shape)
                _check_new(trajectory.id, where, place_of)
            except TrajectoryError as error:
                raise error.at(where, spelling.get(error.field)) from None
            trajectories.append(trajectory)
    return tuple(trajectories)


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a trajectory file, and its routes beside it where there are some; both appear whole.

    The iterable is consumed once, one line at a time. Raises ValueError on a repeated id, no
    trajectory at all, or routes that only some trajectories have.
    """
    place_of: dict[str, str] = {}
    routes: dict[str, np.ndarray] = {}
    with atomic_write(path) as file:
        for number, trajectory in enumerate(trajectories, start=1):
            where = f"{path}, line {number}"
            _check_new(trajectory.id, where, place_of)
            file.write(_to_line(trajectory).encode())
            if trajectory.routes is not None:
                routes[trajectory.id] = trajectory.routes
            if len(routes) not in (0, number):
                raise TrajectoryError("routes", "routes on all trajectories or on none", "both", where=where)
        if not place_of:
            raise TrajectoryError("", "at least one trajectory to write", "none", where=str(path))
        if routes:
            _write_routes(routes_path(path), routes)


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object on one line of UTF-8 text; TrajectoryError where it is anything else."""
    expected = "one JSON object a line"
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_fields)
    except _RepeatedField as error:
        raise TrajectoryError(error.field, "the field once", "it twice", where=where) from None
    except UnicodeDecodeError as error:
        raise TrajectoryError("", expected, f"bytes that are not UTF-8 at byte {error.start}", where=where) from None
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(
            "",
            expected,
            f"no JSON ({error})",
            "Each object must stand on a line of its own, with no commas between the lines.",
            where,
        ) from None
    if not isinstance(record, dict):
        raise TrajectoryError("", expected, describe(record), where=where)
    return record


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers, from 1; blank lines are skipped."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if line.strip():
                yield number, parse_object(line, f"{path}, line {number}")


class _RepeatedField(Exception):
    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedField(next(name for name in names if names.count(name) > 1))
    return fields


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """For each line: its place, its fields by our names, and how the line spells each of them."""
    empty = True
    for number, record in json_lines(path):
        empty = False
        where = f"{path}, line {number}"
        try:
            spelling = _spellings(record)
            _check_required(spelling)
        except TrajectoryError as error:
            raise error.at(where) from None
        yield where, {field: record[name] for field, name in spelling.items()}, spelling
    if empty:
        raise TrajectoryError("", "at least one trajectory", "an empty file", where=str(path))


def _spellings(record: dict[str, Any]) -> dict[str, str]:
    """Our name of each known field -> the name in the record; a misspelt field is refused."""
    spelling: dict[str, str] = {}
    for name in record:
        if name not in _KNOWN_FIELDS:
            _refuse_misspelling(name)
            continue
        field = ALIASES.get(name, name)
        if field in spelling:
            raise TrajectoryError(
                field,
                "the field once",
                f'it twice, as "{spelling[field]}" and "{name}"',
                f'"{name if name in ALIASES else spelling[field]}" is verl\'s spelling: keep one.',
            )
        spelling[field] = name
    return spelling


def _refuse_misspelling(name: str) -> None:
    folded = name.lower().replace("-", "_")
    candidates = [known for known in _KNOWN_FIELDS if len(known) >= _MIN_GUESSED_LENGTH]
    near = difflib.get_close_matches(folded, candidates, n=1, cutoff=_MISSPELLING_SIMILARITY)
    if near:
        raise TrajectoryError(
            name,
            f'a known field, the nearest is "{near[0]}"',
            "an unknown one",
            "Fields of your own are passed over when their names are less like a known one.",
        )


def _check_required(spelling: dict[str, str]) -> None:
    for field in REQUIRED_FIELDS:
        if field not in spelling:
            way_out = f"A trajectory has the fields {', '.join(REQUIRED_FIELDS)}."
            if field == "id" and spelling.get("group") == "uid":
                way_out = "verl's uid names the prompt and is read as the group: add an id of its own."
            raise TrajectoryError(field, "this required field", "none", way_out)


def _build(fields: dict[str, Any], sidecar: _RoutesFile | None) -> tuple[Trajectory, Any]:
    """The trajectory without its routes, and what stands for them in the line."""
    given = {name: value for name, value in fields.items() if value is not None or name in REQUIRED_FIELDS}
    inline = given.pop("routes", None)
    if sidecar is not None and inline is not None:
        raise TrajectoryError("routes", f"routes in the line or in {sidecar.path}", "both")
    return Trajectory(**given), inline


def _with_routes(
    trajectory: Trajectory, inline: Any, sidecar: _RoutesFile | None, shape: RouteShape | None
) -> Trajectory:
    if inline is not None:
        return _routed(trajectory, inline, shape)
    if sidecar is None:
        raise TrajectoryError(
            "routes",
            "the routes of every trajectory",
            "none in the line and no file beside it",
            "Routes of a.jsonl lie in a.routes.safetensors, one tensor per id.",
        )
    routes = sidecar.read(trajectory.id)
    try:
        return _routed(trajectory, routes, shape)
    except TrajectoryError as error:
        got = f"{error.got} in tensor {trajectory.id!r} of {sidecar.path}"
        raise TrajectoryError(error.field, error.expected, got, error.way_out) from None


def _routed(trajectory: Trajectory, routes: Any, shape: RouteShape | None) -> Trajectory:
    routed = replace(trajectory, routes=routes)
    if shape is not None:
        check_routes(routed, shape)
    return routed


def _check_new(trajectory_id: str, where: str, place_of: dict[str, str]) -> None:
    first = place_of.setdefault(trajectory_id, where)
    if first != where:
        raise TrajectoryError(
            "id",
            "an id of its own for every trajectory",
            f"{trajectory_id!r}, the id of {first}",
            where=where,
        )


class _RoutesFile:
    """The routes beside a trajectory file: one tensor per id, all with the same [layers, top-k]."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self.path = path
        try:
            self._file = safe_open(str(path), framework="numpy")
        except Exception as error:
            raise TrajectoryError(
                "routes",
                "a safetensors file",
                f"one that cannot be read ({error})",
                where=str(path),
            ) from None
        self._ids = frozenset(self._file.keys())
        self._shape: tuple[int, ...] | None = None

    def read(self, trajectory_id: str) -> np.ndarray:
        if trajectory_id not in self._ids:
            raise TrajectoryError(
                "routes",
                f"a tensor named {trajectory_id!r} in {self.path}",
                f"{len(self._ids)} others",
                "A position whose route is unknown is -1; the tensor itself must be there.",
            )
        try:
            routes = self._file.get_tensor(trajectory_id)
        except Exception as error:
            # Numpy lacks some of the format's types.
            got = f"a tensor {trajectory_id!r} in {self.path} that cannot be read ({error})"
            raise TrajectoryError("routes", "signed integers of 16 bits or more", got) from None
        if self._shape is None:
            self._shape = routes.shape[1:]
        if routes.shape[1:] != self._shape:
            raise TrajectoryError(
                "routes",
                f"the moe layers and top-k of the tensors before it, {list(self._shape)}",
                f"{list(routes.shape[1:])} in tensor {trajectory_id!r} of {self.path}",
            )
        return routes


def _open_routes(path: Path) -> _RoutesFile | None:
    sidecar = routes_path(path)
    return _RoutesFile(sidecar) if sidecar.is_file() else None


def _write_routes(path: Path, routes: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save

    with atomic_write(path) as file:
        file.write(save({name: np.ascontiguousarray(array) for name, array in routes.items()}))


def _to_line(trajectory: Trajectory) -> str:
    record: dict[str, Any] = {
        "id": trajectory.id,
        "group": trajectory.group,
        "tokens": trajectory.tokens.tolist(),
        "loss_mask": trajectory.loss_mask.astype(np.int8).tolist(),
        "advantages": _scalar_or_list(trajectory.advantages),
    }
    for name in LOGPROB_FIELDS:
        values = getattr(trajectory, name)
        if values is not None:
            record[name] = values.tolist()
    if trajectory.reward is not None:
        record["reward"] = trajectory.reward
    if trajectory.temperature != 1.0:
        record["temperature"] = trajectory.temperature
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _scalar_or_list(values: np.ndarray) -> float | list[float]:
    """One number where all are the same bit for bit (0.0 and -0.0 are not)."""
    bits = np.ascontiguousarray(values).view(np.int64)
    return float(values[0]) if (bits == bits[0]).all() else values.tolist()
