"""Advantages against numbers worked out by hand, and what filters leave out."""

from __future__ import annotations

import re

import pytest

from prefixflow.trajectories import Trajectory, TrajectoryError
from prefixflow.trajectories.advantages import ESTIMATORS, batch_advantages, grpo_advantages, with_advantages
from prefixflow.trajectories.filters import without_overlong, without_zero_variance


def trajectory(name: str, group: str, reward: float | None, num_trained: int = 2) -> Trajectory:
    mask = [0] + [1] * num_trained
    return Trajectory(name, group, list(range(len(mask))), mask, 7.0, reward=reward)


def test_grpo_is_centred_and_scaled_by_the_unbiased_deviation() -> None:
    # Mean 2, deviations -2, 0, 2, sum of squares 8, variance 8 / 2.
    assert grpo_advantages([0.0, 2.0, 4.0]) == pytest.approx([-1.0, 0.0, 1.0], rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Others' means: (2 + 7) / 2, (0 + 7) / 2, (0 + 2) / 2.
        ("rloo", [[-4.5, -1.5, 6.0], [-10.0, 10.0]]),
        # Means 3 and 10.
        ("dr-grpo", [[-3.0, -1.0, 4.0], [-5.0, 5.0]]),
        # Deviations as above, variances 26 / 2 and 50 / 1.
        ("grpo", [[-3 / 13**0.5, -1 / 13**0.5, 4 / 13**0.5], [-(0.5**0.5), 0.5**0.5]]),
        # Mean of all 29 / 5, squares of deviations sum up to 134.8, variance 134.8 / 4.
        ("reinforce++", [[-5.8 / 33.7**0.5, -3.8 / 33.7**0.5, 1.2 / 33.7**0.5], [-0.8 / 33.7**0.5, 9.2 / 33.7**0.5]]),
    ],
)
def test_estimators(estimator: str, expected: list[list[float]]) -> None:
    got = batch_advantages(estimator, [[0.0, 2.0, 7.0], [5.0, 15.0]])
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("rewards", [[], [5.0], [0.1, 0.1, 0.1]])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_without_contrast_has_no_advantage(estimator: str, rewards: list[float]) -> None:
    assert batch_advantages(estimator, [rewards]) == [[0.0] * len(rewards)]


def test_members_of_a_group_are_found_wherever_they_stand() -> None:
    batch = [
        trajectory("a", "x", 0.0),
        trajectory("b", "y", 5.0),
        trajectory("c", "x", 4.0),
        trajectory("d", "y", 25.0),
    ]
    advantages = [t.advantages.tolist() for t in with_advantages(batch, "dr-grpo")]
    assert advantages == [[-2.0] * 3, [-10.0] * 3, [2.0] * 3, [10.0] * 3]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++"])
def test_rewards_that_overflow_are_named(estimator: str) -> None:
    batch = [trajectory("a", "g", 1.0), trajectory("b", "g", 1e308), trajectory("c", "g", 1e308)]
    with pytest.raises(TrajectoryError, match=rf"trajectory 'b'.*reward.*{re.escape(estimator)}.*Scale"):
        with_advantages(batch, estimator)


def test_a_missing_reward_is_named() -> None:
    with pytest.raises(TrajectoryError, match=r"trajectory 'b'.*reward"):
        with_advantages([trajectory("a", "x", 0.0), trajectory("b", "x", None)], "grpo")


def test_filters() -> None:
    batch = [
        trajectory("a", "x", 1.0),
        trajectory("b", "same", 3.0),
        trajectory("c", "x", 2.0, num_trained=5),
        trajectory("d", "same", 3.0),
        trajectory("e", "x", 2.0, num_trained=5),
    ]
    assert "".join(t.id for t in without_zero_variance(batch)) == "ace"
    assert "".join(t.id for t in without_overlong(batch, 5, finished=["e"])) == "abde"
