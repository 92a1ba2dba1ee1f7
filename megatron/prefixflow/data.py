"""Trajectories of a run, and the batches that its steps take.

Strategy of `group_batches`:

1. Groups stand in the order of their first appearance, files in the order of their names; the trajectories of a
   group are joined wherever they stand.
2. A batch takes groups until the next one would make it larger than `--global-batch-size`.
   A group is never cut: it waits for the next batch, and is a batch of its own where it is larger than that.
3. The last batch of an epoch takes what is left. The next epoch starts from the first group again, so no batch holds
   a group twice.

`--filter` and `--advantage-estimator` act around it: groups whose rewards are all equal leave before batches are formed,
advantages are those of a batch, and responses that were cut off leave after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.prefixflow.arguments import Arguments, shape_of
from megatron.prefixflow.routing import RoutingReplay
from prefixflow.trajectories.advantages import with_advantages
from prefixflow.trajectories.filters import without_overlong, without_zero_variance
from prefixflow.trajectories.reader import read_trajectories
from prefixflow.trajectories.types import Trajectory


def load_trajectories(args: Arguments) -> tuple[Trajectory, ...]:
    """Read `--trajectories` (with routes, where they are replayed), check every line, and apply `--temperature`.

    Raises TrajectoryError at the first line that cannot be used, ValueError where there is no file.
    """
    replays = args.routing_replay == RoutingReplay.ROLLOUT.value and args.num_experts is not None
    trajectories = read_trajectories(
        args.trajectories,
        vocab_size=args.vocab_size,
        max_positions=args.seq_length,
        routes=replays,
        route_shape=shape_of(args).route_shape if replays else None,
    )
    return with_temperature(trajectories, args.temperature)


def with_temperature(trajectories: Sequence[Trajectory], temperature: float | None) -> tuple[Trajectory, ...]:
    """All trajectories at `temperature`; None keeps each trajectory's own.

    A file cannot say that a temperature is unknown (absent means 1), so a given one holds for all.
    """
    if temperature is None:
        return tuple(trajectories)
    return tuple(t if t.temperature == temperature else replace(t, temperature=temperature) for t in trajectories)


def group_batches(trajectories: Sequence[Trajectory], max_trajectories: int) -> tuple[tuple[Trajectory, ...], ...]:
    """Batches of one epoch, see the module docstring."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    batches: list[list[Trajectory]] = []
    for group in groups.values():
        if batches and len(batches[-1]) + len(group) <= max_trajectories:
            batches[-1] += group
        else:
            batches.append(list(group))
    return tuple(map(tuple, batches))


def step_batches(args: Arguments, trajectories: Sequence[Trajectory]) -> tuple[tuple[Trajectory, ...], ...]:
    """Batches of training steps on files: filtered, and with advantages from rewards, where that was asked for.

    No batch is empty; there may be none. Raises TrajectoryError for a trajectory that lacks a reward which is needed.
    """
    if "zero-variance" in args.filter:
        trajectories = without_zero_variance(trajectories)
    batches = group_batches(trajectories, args.global_batch_size)
    if args.advantage_estimator is not None:
        batches = tuple(with_advantages(batch, args.advantage_estimator) for batch in batches)
    if "overlong" in args.filter:
        batches = tuple(without_overlong(batch, args.max_response_length) for batch in batches)
    return tuple(batch for batch in batches if batch)
