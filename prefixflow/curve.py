"""A picture of how the mean reward of one or more runs went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

COLOURS = ("#1f66ad", "#d9601a", "#17926a", "#8a4fa3", "#7a7a7a")
Curve = Sequence[tuple[int, float]]


def draw_rewards(curves: Mapping[str, Curve], path: str | Path, *, title: str = "", window: int = 5) -> None:
    """Write a picture to `path` (its suffix is the format): points are steps, lines the means of the last `window`.

    curves: (step, mean reward) by the name of the run.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        steps, rewards = np.asarray(curve, np.float64).T
        axes.plot(steps, rewards, ".", color=colour, alpha=0.35, markersize=4)
        axes.plot(steps, running_mean(rewards, window), color=colour, label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.25)
    if len(curves) > 1:
        axes.legend(loc="lower right", fontsize=8)
    if title:
        axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Means of each value and up to `window` - 1 before it, [n]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
