"""Measured and simulated makespans from events written by hand."""

from __future__ import annotations

import pytest

from megatron.prefixflow.bench_makespan import measured_makespan, simulated_makespan
from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.runtime.trace import Event
from prefixflow.schedule.ops import Op
from prefixflow.schedule.search import rank_table
from tests.plan.groups import batch_of

# Two unrelated trajectories on two stages: 0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1.
PLAN = build_plan(batch_of(range(9), range(10, 19)), PlanConfig(8, pipeline_size=2))
# Start and end of each operation; every message takes 0.5 to arrive.
TIMES = {
    "0F0": (0.0, 1.0),
    "1F0": (1.5, 3.5),
    "0F1": (1.0, 2.0),
    "1B0": (3.5, 7.5),
    "0B0": (8.0, 10.0),
    "1F1": (7.5, 9.5),
    "1B1": (9.5, 13.5),
    "0B1": (14.0, 16.0),
}


def events(step: int, shift: float, stretched: str = "") -> list[Event]:
    """TIMES from `shift` on; operation `stretched` ends 100 late."""
    return [
        Event(step, 0, Op.parse(name), shift + start, shift + end + (100.0 if name == stretched else 0.0))
        for name, (start, end) in TIMES.items()
    ]


def test_the_table_is_as_drawn() -> None:
    assert rank_table(PLAN, 0).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_the_measured_makespan_is_the_median_step() -> None:
    assert measured_makespan(events(1, 100.0)) == 16.0
    assert measured_makespan(events(1, 100.0) + events(2, 5000.0, "0B1") + events(3, 300.0)) == 16.0


def test_the_simulated_makespan_takes_median_times_and_no_messages() -> None:
    """1 + 2 + 4 + 2 + 4 + 2, whatever one step's longest operation was."""
    assert simulated_makespan(PLAN, events(1, 100.0)) == pytest.approx(15.0)
    steps = events(1, 100.0) + events(2, 5000.0, "1B0") + events(3, 300.0)
    assert simulated_makespan(PLAN, steps) == pytest.approx(15.0)
    assert simulated_makespan(PLAN, events(1, 100.0, "1B0")) == pytest.approx(115.0)
