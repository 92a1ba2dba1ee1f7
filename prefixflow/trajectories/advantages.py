"""Advantages from the rewards of a group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GRPO_EPSILON = 1e-6


def grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) of one group, with the unbiased std (GRPO, arXiv 2402.03300); 0 for a lone member.

    Exactly 0 where all rewards are equal, also where their mean is rounded.
    """
    values = np.asarray(rewards, np.float64)
    if not values.size or (values == values[0]).all():
        return [0.0] * values.size
    return ((values - values.mean()) / (values.std(ddof=1) + GRPO_EPSILON)).tolist()
