"""Trajectory files for parity tests: every shape that reuse has to get right, with fields that make each loss term act."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from prefixflow.testing.generate import (
    Style,
    edge_cases,
    mixed_workload,
    stepwise_chains,
    trees,
    two_level_groups,
    with_routes,
)
from prefixflow.trajectories import RouteShape, Trajectory, write_trajectories

VOCAB_SIZE = 509
"""Odd, and below that of `tiny`: padded under tensor parallelism where it is the model's own."""

STYLE = Style(vocab_size=VOCAB_SIZE, per_token_advantages=True)


def near_policy(trajectories: Sequence[Trajectory], seed: int = 0) -> tuple[Trajectory, ...]:
    """With old, reference and rollout log-probabilities near those of a freshly initialised `tiny`.

    Such a model is close to uniform, so ratios fall on both sides of a clip range of 0.1 or 0.2 and inside it.
    """
    rng = np.random.default_rng(seed)
    uniform = -math.log(VOCAB_SIZE)

    def noisy(size: int) -> np.ndarray:
        return uniform + rng.normal(0.0, 0.3, size)

    return tuple(
        replace(t, old_logprobs=noisy(len(t)), ref_logprobs=noisy(len(t)), rollout_logprobs=noisy(len(t)))
        for t in trajectories
    )


def with_temperatures(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Members of a group differ in temperature, so that shared rows are scored at several."""
    return tuple(replace(t, temperature=(0.5, 1.0, 1.7)[i % 3]) for i, t in enumerate(trajectories))


def some_without_advantage(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(replace(t, advantages=np.zeros(len(t))) if i % 3 == 0 else t for i, t in enumerate(trajectories))


def some_without_old(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(
        replace(t, old_logprobs=None, ref_logprobs=None) if i % 3 == 1 else t for i, t in enumerate(trajectories)
    )


def write_files(folder: Path) -> dict[str, str]:
    """Name to path of every file."""
    mixed = mixed_workload(seed=1, style=STYLE)
    groups = two_level_groups(3, 4, (20, 33), (3, 9), seed=2, style=STYLE)
    deep = trees(1, 4, 2, (2, 9), seed=4, style=STYLE)
    batches = {
        "mixed": mixed,
        "mixed-near": near_policy(mixed),
        "mixed-partly-old": some_without_old(near_policy(mixed)),
        "groups": groups,
        "groups-near": near_policy(groups),
        "chains": stepwise_chains(seed=3, style=STYLE),
        "deep": deep,
        "deep-near": near_policy(deep),
        "few-words": two_level_groups(4, 8, (40, 50), (30, 40), seed=10, style=Style(vocab_size=3)),
        "edges": edge_cases(seed=5, style=STYLE),
        "temperatures": with_temperatures(near_policy(trees(2, 3, 2, seed=6, style=STYLE))),
        "two-groups": two_level_groups(2, 3, seed=7, style=STYLE),
        "some-zero": some_without_advantage(near_policy(mixed)),
        "all-zero": tuple(replace(t, advantages=np.zeros(len(t))) for t in groups),
        "groups-and-trees": near_policy(groups) + with_temperatures(near_policy(trees(2, 3, 2, seed=9, style=STYLE))),
        "apart": two_level_groups(5, 1, seed=8, style=STYLE),
    }
    shape = RouteShape(num_layers=2, topk=2, num_experts=8)
    batches |= {
        "mixed-routes": with_routes(near_policy(mixed), shape, seed=11, missing=0.1),
        "mixed-conflicts": with_routes(near_policy(mixed), shape, seed=12, missing=0.02, conflicting=0.05),
        # As much work on one rank as in nine groups on another.
        "one-against-nine": (
            *stepwise_chains(1, 9, prompt_tokens=60, turn_tokens=12, style=STYLE),
            *two_level_groups(9, 3, 8, 6, seed=14, style=STYLE),
        ),
        "one-group": two_level_groups(1, 4, seed=15, style=STYLE),
    }
    paths = {}
    for name, batch in batches.items():
        paths[name] = str(folder / f"{name}.jsonl")
        write_trajectories(paths[name], batch)
    return paths


def write_small_files(folder: Path) -> dict[str, str]:
    """Name to path of two-level groups, chains and trees of a few dozen tokens."""
    style = Style(logprobs=True)
    batches = {
        "groups": two_level_groups(4, 4, seed=1, style=style),
        "chains": stepwise_chains(3, 4, prompt_tokens=24, turn_tokens=12, seed=3, style=style),
        "trees": trees(3, 3, 2, seed=4, style=style),
    }
    for name, batch in batches.items():
        write_trajectories(folder / f"{name}.jsonl", batch)
    return {name: str(folder / f"{name}.jsonl") for name in batches}
