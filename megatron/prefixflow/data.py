"""Trajectories of a run, and the batches that its steps take.

Strategy of `group_batches`:

1. Groups stand in the order of their first appearance, files in the order of their names; the trajectories of a
   group are joined wherever they stand.
2. A batch takes groups until the next one would make it larger than `--global-batch-size`.
   A group is never cut: it waits for the next batch, and is a batch of its own where it is larger than that.
3. The last batch of an epoch takes what is left. The next epoch starts from the first group again, so no batch holds
   a group twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.prefixflow.arguments import Arguments, shape_of
from megatron.prefixflow.routing import RoutingReplay
from prefixflow.trajectories.reader import read_trajectories
from prefixflow.trajectories.types import Trajectory


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Which batch an update works on. Counts start at 0; `reuse` counts the updates on this batch before this one."""

    batch: int
    epoch: int
    reuse: int

    @classmethod
    def of(cls, step: int, num_batches: int, updates_per_batch: int) -> BatchPlace:
        """Place of optimizer step `step` (from 0)."""
        round_, reuse = divmod(step, updates_per_batch)
        epoch, batch = divmod(round_, num_batches)
        return cls(batch, epoch, reuse)


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
