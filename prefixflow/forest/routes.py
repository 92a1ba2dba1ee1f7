"""Routes of a batch for routing replay: fill in missing rows, count conflicts in shared positions, settle them.

Words. *Row*: the top-k experts of one input token in one MoE layer; its order means nothing. With a -1 in it, it is unknown.

Strategy
1. A missing row is copied from a trajectory of the same group that knows it and has the same tokens up to and with that
   input token: the one that shares most tokens, the first in the batch among equals. Rollout engines with a prefix cache omit
   rows that they did not compute. What nobody knows stays -1 and is routed natively.
2. A position that trajectories share by its tokens is *mismatched* when their rows differ in any layer. Rollouts differ there
   for numerical reasons alone.
3. `exact` leaves such a position unshared: routes are part of the trie symbol (`prefixflow.forest.build`). `first` gives it
   the rows of the first trajectory of the batch that has it. That is settled on trajectories, before any plan: it does not
   depend on budgets, splits or folding.

Invariants
1. Known rows change under `first` only, and only at mismatched positions. No row is invented: each is a row of the same
   token path in the group.
2. Under `first` trajectories that share a position have equal rows there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from prefixflow.forest.build import build_forest, common_tokens, first_equal
from prefixflow.trajectories.types import Trajectory


class RouteMismatch(enum.Enum):
    """`EXACT`: positions with conflicting routes are not shared; `FIRST`: the first trajectory's routes hold for all."""

    EXACT = "exact"
    FIRST = "first"


@dataclass(frozen=True, slots=True)
class RouteReport:
    """num_positions: shared by their tokens, each counted once; num_mismatched: those of them with conflicting routes;
    num_filled: (position, MoE layer) rows taken from another trajectory."""

    num_positions: int
    num_mismatched: int
    num_filled: int

    @property
    def rate(self) -> float:
        return self.num_mismatched / self.num_positions if self.num_positions else 0.0


def resolve_routes(
    trajectories: Sequence[Trajectory], policy: RouteMismatch
) -> tuple[tuple[np.ndarray, ...], RouteReport]:
    """The routes that each trajectory is run with, [positions, moe layers, top-k], and how they came about.

    Raises ValueError where a trajectory has no routes, or others than [*, moe layers, top-k] of the first one.
    """
    routes = _checked(trajectories)
    num_filled = _fill(trajectories, routes)
    num_positions = num_mismatched = 0
    for segment in build_forest(trajectories).segments:
        if not segment.is_shared:
            continue
        span = segment.span.slice
        first = first_equal([routes[m][span] for m in segment.members])
        num_positions += len(segment)
        num_mismatched += int(first.any(axis=0).sum())
        if policy is RouteMismatch.FIRST:
            for member, numbers in zip(segment.members, first, strict=True):
                differing = segment.span.start + np.flatnonzero(numbers)
                _copy_rows(routes, member, segment.source, (differing,))
    return tuple(routes), RouteReport(num_positions, num_mismatched, num_filled)


def _fill(trajectories: Sequence[Trajectory], routes: list[np.ndarray]) -> int:
    """Fill the missing rows of `routes` in place; their number."""
    # What is filled is no source for others: the order of trajectories would otherwise count.
    known: list[np.ndarray] = [array[..., 0] >= 0 for array in routes]
    incomplete = {i for i, rows in enumerate(known) if not rows.all()}
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(index)
    num_filled = 0
    for members in groups.values():
        if incomplete.isdisjoint(members):
            continue
        order = sorted(members, key=lambda i: trajectories[i].tokens.astype(">u8").tobytes())
        neighbours = [common_tokens(trajectories[a].tokens, trajectories[b].tokens) for a, b in pairwise(order)]
        for place, index in enumerate(order):
            if index in incomplete:
                num_filled += _fill_one(index, order, _reach(neighbours, place), known, routes)
    return num_filled


def _reach(neighbours: Sequence[int], place: int) -> np.ndarray:
    """Tokens that the trajectory at `place` of the sorted order shares with each; none with itself."""
    after = np.minimum.accumulate(np.array(neighbours[place:], np.int64))
    before = np.minimum.accumulate(np.array(neighbours[:place][::-1], np.int64))[::-1]
    return np.concatenate([before, [0], after])


def _fill_one(
    index: int, order: Sequence[int], reach: np.ndarray, known: Sequence[np.ndarray], routes: list[np.ndarray]
) -> int:
    missing = ~known[index]
    num_filled = 0
    for shared, donor in sorted(zip(reach.tolist(), order, strict=True), key=lambda pair: (-pair[0], pair[1])):
        if not missing[:shared].any():
            # The others share no more.
            break
        stop = min(shared, len(missing), len(known[donor]))
        fillable = np.nonzero(missing[:stop] & known[donor][:stop])
        _copy_rows(routes, index, donor, fillable)
        missing[fillable] = False
        num_filled += len(fillable[0])
    return num_filled


def _copy_rows(routes: list[np.ndarray], target: int, donor: int, rows: tuple[np.ndarray, ...]) -> None:
    """Copy `rows` of one trajectory to another; arrays are read-only and are replaced."""
    if len(rows[0]):
        changed = routes[target].copy()
        changed[rows] = routes[donor][rows]
        changed.flags.writeable = False
        routes[target] = changed


def _checked(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The routes in one integer type."""
    routes: list[np.ndarray] = []
    for trajectory in trajectories:
        if trajectory.routes is None:
            raise ValueError(
                f"Trajectory {trajectory.id!r} has no routes, but they are to be replayed; read the file with its "
                "a.routes.safetensors, or use --routing-replay record or off."
            )
        if routes and trajectory.routes.shape[1:] != routes[0].shape[1:]:
            raise ValueError(
                f"Trajectory {trajectory.id!r} has routes of [moe layers, top-k] {list(trajectory.routes.shape[1:])}, "
                f"the first trajectory of {list(routes[0].shape[1:])}; all must come from one model."
            )
        routes.append(trajectory.routes)
    dtype = np.result_type(*routes)
    return [_without_partial_rows(array.astype(dtype, copy=False)) for array in routes]


def _without_partial_rows(routes: np.ndarray) -> np.ndarray:
    if routes.min(initial=0) == 0:
        return routes
    unknown = routes < 0
    partial: np.ndarray = np.any(unknown, axis=2) & ~np.all(unknown, axis=2)
    return np.where(partial[..., None], np.asarray(-1, routes.dtype), routes) if partial.any() else routes
