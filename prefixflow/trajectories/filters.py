"""What a step leaves out (DAPO, arXiv 2503.14476): groups that teach nothing, and responses that were cut off.

`zero-variance` is judged before a batch is formed, on the rewards of whole groups; `overlong` after advantages are known,
so that a response that was cut off still counts in its group's statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from prefixflow.trajectories.advantages import reward_of
from prefixflow.trajectories.types import Trajectory

FILTERS = ("zero-variance", "overlong")


def without_zero_variance(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Groups in which rewards differ. Raises TrajectoryError for a trajectory without a reward."""
    rewards: dict[str, set[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.group, set()).add(reward_of(trajectory))
    return tuple(t for t in trajectories if len(rewards[t.group]) > 1)


def without_overlong(
    trajectories: Sequence[Trajectory], max_response_tokens: int, finished: Collection[str] = ()
) -> tuple[Trajectory, ...]:
    """Trajectories with fewer trained tokens than `max_response_tokens`; ids in `finished` ended by themselves and stay."""
    kept = set(finished)
    return tuple(t for t in trajectories if t.num_trained < max_response_tokens or t.id in kept)
