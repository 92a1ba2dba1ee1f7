"""The simulator: makespans by hand, and a deadlock that is named."""

from __future__ import annotations

import pytest

from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.simulate import Timeline, simulate
from prefixflow.schedule.table import LeadPolicy, OpTable, build_table


def duration(op: Op) -> float:
    """A forward takes 1, a backward 2."""
    return 1.0 if op.kind is Kind.FORWARD else 2.0


def test_an_empty_table_takes_no_time() -> None:
    timeline = simulate(build_table([]), duration)
    assert (timeline.makespan, timeline.efficiency) == (0.0, 1.0)


def test_one_rank_is_always_busy() -> None:
    timeline = simulate(build_table([(), (0,), (0,)]), duration)
    assert (timeline.makespan, timeline.efficiency) == (9.0, 1.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("n", [4, 8])
def test_1f1b_takes_the_textbook_time(n: int, num_ranks: int) -> None:
    """(n + p - 1) forwards and backwards: each rank idles for p - 1 of both."""
    timeline = simulate(build_table([()] * n, num_ranks=num_ranks), duration)
    assert timeline.makespan == 3.0 * (n + num_ranks - 1)
    assert timeline.efficiency == pytest.approx(n / (n + num_ranks - 1))


def test_interleaved_1f1b_halves_the_bubble() -> None:
    """Two chunks a rank, half as long: the bubble of p - 1 = 1 becomes one of half an operation."""
    table = build_table([()] * 8, num_ranks=2, num_chunks=2, policy=LeadPolicy.CONSTANT)
    assert simulate(table, lambda op: duration(op) / 2).makespan == 3.0 * (8 + 0.5)


def test_two_stages_by_hand() -> None:
    """One prefix and one suffix: 0F0 0:1, 0F1 1:2, 1F0 1:2, 1F1 2:3, 1B1 3:5, 1B0 and 0B1 5:7, 0B0 7:9."""
    table = build_table([(), (0,)], num_ranks=2)
    timeline = simulate(table, duration)
    named = [{str(op): (start, end) for op, start, end in row} for row in timeline.spans]
    assert named == [
        {"0F0": (0.0, 1.0), "0F1": (1.0, 2.0), "0B1": (5.0, 7.0), "0B0": (7.0, 9.0)},
        {"1F0": (1.0, 2.0), "1F1": (2.0, 3.0), "1B1": (3.0, 5.0), "1B0": (5.0, 7.0)},
    ]


def test_a_deadlock_names_where_each_rank_is_stuck() -> None:
    """The first rank wants its backward before the forward that the second one waits for."""
    table = OpTable.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", [(), ()])
    with pytest.raises(ValueError, match=r"deadlocks.*\{0: '0B0', 1: '1F1'\}"):
        simulate(table, duration)


def test_efficiency_is_the_busy_share() -> None:
    op = Op(0, Kind.FORWARD, 0)
    assert Timeline((((op, 0.0, 3.0),), ((op, 3.0, 4.0),))).efficiency == 0.5
