"""Whole tables as CSV, so that a change of schedule is seen cell by cell in review.

Written anew by `python -m tests.schedule.test_golden` from the root of the repository.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.schedule.search import rank_table
from prefixflow.schedule.table import OpTable, validate
from prefixflow.testing.generate import edge_cases, stepwise_chains, trees, two_level_groups
from prefixflow.trajectories import Trajectory

FOLDER = Path(__file__).parent / "golden"

BATCHES: dict[str, tuple[Trajectory, ...]] = {
    "flat": two_level_groups(9, 1, 12, 4),
    "two_level": two_level_groups(3, 4, 17, 8),
    "chain": stepwise_chains(2, 5, 14, 6),
    "deep_tree": trees(2, 4, 2, 7),
    "edge_cases": edge_cases(),
}
# (batch, pipeline ranks, chunks a rank)
CASES = [
    ("flat", 4, 1),
    ("flat", 2, 2),
    ("two_level", 1, 1),
    ("two_level", 2, 1),
    ("two_level", 4, 1),
    ("two_level", 2, 2),
    ("chain", 2, 1),
    ("chain", 4, 2),
    ("deep_tree", 4, 1),
    ("deep_tree", 8, 1),
    ("deep_tree", 2, 2),
    ("edge_cases", 2, 1),
]


def table_of(batch: str, num_ranks: int, num_chunks: int) -> OpTable:
    plan = build_plan(BATCHES[batch], PlanConfig(16, pipeline_size=num_ranks, num_chunks=num_chunks))
    return rank_table(plan, 0)


def golden_file(batch: str, num_ranks: int, num_chunks: int) -> Path:
    return FOLDER / f"{batch}_p{num_ranks}_v{num_chunks}.csv"


@pytest.mark.parametrize("case", CASES, ids=lambda case: golden_file(*case).stem)
def test_tables_are_as_recorded(case: tuple[str, int, int]) -> None:
    table = table_of(*case)
    validate(table)
    recorded = golden_file(*case).read_text(encoding="utf-8")
    assert OpTable.from_csv(recorded, table.reads) == table
    assert recorded == table.to_csv()


def test_no_recorded_table_is_forgotten() -> None:
    assert {path.name for path in FOLDER.glob("*.csv")} == {golden_file(*case).name for case in CASES}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        golden_file(*case).write_text(table_of(*case).to_csv(), encoding="utf-8")


if __name__ == "__main__":
    main()
