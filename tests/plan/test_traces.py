"""Plans of recorded trajectories: counts against a brute-force set, ratios, balance."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixflow.forest import build_forest
from prefixflow.importer import ImportOptions, Mode, import_trajectories
from prefixflow.importer.encoders import ByteEncoder
from prefixflow.plan.placement import place_forest
from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.trajectories import Trajectory


def load(traces: Path, name: str, mode: Mode = Mode.WHOLE, limit: int | None = None) -> list[Trajectory]:
    options = ImportOptions(mode=mode, max_groups=limit)
    return list(import_trajectories(traces / f"{name}.jsonl", ByteEncoder(), options).trajectories)


def count_pairs(trajectories: list[Trajectory]) -> int:
    """Distinct (group, prefix through t, token t + 1), with a number for each prefix seen."""
    prefixes: dict[tuple[object, int], int] = {}
    firsts: set[tuple[str, int]] = set()
    for t in trajectories:
        prefix: object = t.group
        firsts.add((t.group, int(t.tokens[0])))
        for token in t.tokens.tolist():
            prefix = prefixes.setdefault((prefix, token), len(prefixes))
    return len(prefixes) - len(firsts)


@pytest.mark.parametrize(
    ("name", "mode", "limit", "ratios"),
    [
        ("tau_bench_airline", Mode.WHOLE, 12, (1.1, 1.6)),
        ("tau_bench_airline", Mode.STEPS, 6, (8.0, 16.0)),
        ("game24_samples_g16", Mode.WHOLE, None, (1.5, 8.0)),
        ("crosswords_tree_search", Mode.WHOLE, None, (4.0, 24.0)),
        ("xquad_articles", Mode.WHOLE, None, (10.0, 20.0)),
    ],
)
def test_positions_agree_with_a_brute_force_set(
    traces: Path, name: str, mode: Mode, limit: int | None, ratios: tuple[float, float]
) -> None:
    """Tokens are bytes here, so ratios only lie near those counted with a tokenizer."""
    trajectories = load(traces, name, mode, limit)
    plan = build_plan(trajectories, PlanConfig(8192))
    assert plan.forest.logical_tokens == sum(len(t) - 1 for t in trajectories)
    assert plan.forest.computed_tokens == count_pairs(trajectories)
    assert ratios[0] < plan.forest.reuse_ratio < ratios[1]


def test_stepwise_samples_are_balanced_over_eight_ranks(traces: Path) -> None:
    """The most loaded rank is within 5 % of the mean, or of the longest trajectory, which cannot be split."""
    trajectories = load(traces, "tau_bench_airline", Mode.STEPS)
    forest = build_forest(trajectories)
    placement = place_forest(forest, [float(len(s)) for s in forest.segments], 8)
    loads = [sum(len(s) for s in placement.forest.segments if s.tree in set(trees)) for trees in placement.trees]
    assert max(loads) <= 1.05 * max(sum(loads) / 8, max(forest.lengths))
