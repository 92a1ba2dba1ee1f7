"""Advantages from rewards (formulas and sources: docs/numerics.md).

Invariants:

1. Where all rewards that are compared are equal, every advantage is exactly 0, also where their mean is rounded.
2. A lone member of a group has advantage 0; only `reinforce++`, which compares over the whole batch, knows better.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from prefixflow.trajectories.types import Trajectory, TrajectoryError

EPSILON = 1e-6


def grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) of one group, with the unbiased std (GRPO, arXiv 2402.03300)."""
    values = np.asarray(rewards, np.float64)
    if _are_equal(values):
        return [0.0] * values.size
    return ((values - values.mean()) / (values.std(ddof=1) + EPSILON)).tolist()


def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the other members of the group (RLOO, arXiv 2402.14740)."""
    values = np.asarray(rewards, np.float64)
    if _are_equal(values):
        return [0.0] * values.size
    return (values - (values.sum() - values) / (values.size - 1)).tolist()


def dr_grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """r - mean of one group, without the division by the std (Dr. GRPO, arXiv 2503.20783)."""
    values = np.asarray(rewards, np.float64)
    if _are_equal(values):
        return [0.0] * values.size
    return (values - values.mean()).tolist()


_WITHIN_GROUP: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "dr-grpo": dr_grpo_advantages,
}
ESTIMATORS = (*_WITHIN_GROUP, "reinforce++")


def batch_advantages(estimator: str, groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Advantages of a batch from the rewards of its groups; `estimator` is one of `ESTIMATORS`.

    `reinforce++` (arXiv 2501.03262) is GRPO's formula over all trajectories of the batch.
    """
    if estimator in _WITHIN_GROUP:
        return [_WITHIN_GROUP[estimator](group) for group in groups]
    if estimator not in ESTIMATORS:
        raise ValueError(f"Advantage estimator {estimator!r}: expected one of {', '.join(ESTIMATORS)}.")
    flat = iter(grpo_advantages(list(itertools.chain(*groups))))
    return [list(itertools.islice(flat, len(group))) for group in groups]


def with_advantages(trajectories: Sequence[Trajectory], estimator: str) -> tuple[Trajectory, ...]:
    """The batch with advantages from its rewards, one for all tokens of a trajectory.

    Raises TrajectoryError for a trajectory without a reward, and for rewards that are too large to be compared.
    """
    places: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        places.setdefault(trajectory.group, []).append(index)
    rewards = [[reward_of(trajectories[i]) for i in group] for group in places.values()]
    found = list(trajectories)
    try:
        # Sums and squares that overflow would make advantages of 0 or infinity.
        with np.errstate(over="raise", invalid="raise"):
            computed = batch_advantages(estimator, rewards)
    except FloatingPointError:
        largest = max(trajectories, key=lambda trajectory: abs(reward_of(trajectory)))
        raise TrajectoryError(
            "reward",
            f"rewards from which --advantage-estimator {estimator} can work in float64",
            f"{reward_of(largest)}",
            "Scale the rewards down.",
            f"trajectory {largest.id!r}",
        ) from None
    for group, advantages in zip(places.values(), computed, strict=True):
        for index, advantage in zip(group, advantages, strict=True):
            tokens = len(trajectories[index])
            found[index] = replace(trajectories[index], advantages=np.broadcast_to(np.float64(advantage), tokens))
    return tuple(found)


def reward_of(trajectory: Trajectory) -> float:
    """Its reward; TrajectoryError where it brings none."""
    if trajectory.reward is None:
        raise TrajectoryError(
            "reward",
            "a reward, from which --advantage-estimator and --filter work",
            "none",
            "Write rewards into the file, or leave these arguments out.",
            f"trajectory {trajectory.id!r}",
        )
    return trajectory.reward


def _are_equal(values: np.ndarray) -> bool:
    return not values.size or bool((values == values[0]).all())
