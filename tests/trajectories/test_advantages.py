"""Group advantages against numbers worked out by hand."""

from __future__ import annotations

import pytest

from prefixflow.trajectories.advantages import grpo_advantages


def test_grpo_is_centred_and_scaled_by_the_unbiased_deviation() -> None:
    # Mean 2, deviations -2, 0, 2, sum of squares 8, variance 8 / 2.
    assert grpo_advantages([0.0, 2.0, 4.0]) == pytest.approx([-1.0, 0.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("rewards", [[], [5.0], [0.1, 0.1, 0.1]])
def test_a_group_without_contrast_has_no_advantage(rewards: list[float]) -> None:
    assert grpo_advantages(rewards) == [0.0] * len(rewards)
