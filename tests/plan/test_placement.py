"""Trees to data-parallel ranks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan.placement import place_trees


def test_largest_first_to_the_least_loaded() -> None:
    """8 and 7 open the ranks; 6 joins 7, 5 joins 8, and 4 finds 13 on both: the lower rank."""
    assert place_trees([4.0, 8.0, 7.0, 6.0, 5.0], 2) == ((0, 1, 4), (2, 3))


def test_equal_loads_alternate_by_tree_and_rank() -> None:
    assert place_trees([1.0] * 5, 2) == ((0, 2, 4), (1, 3))


def test_more_ranks_than_trees() -> None:
    assert place_trees([3.0], 3) == ((0,), (), ())


def test_trees_without_work_have_a_home() -> None:
    assert sorted(t for rank in place_trees([0.0, 5.0, 0.0], 2) for t in rank) == [0, 1, 2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6)), st.integers(1, 5))
def test_every_tree_once_and_no_rank_overloaded(loads: list[float], num_ranks: int) -> None:
    ranks = place_trees(loads, num_ranks)
    assert sorted(t for rank in ranks for t in rank) == list(range(len(loads)))
    busiest = max(sum(loads[t] for t in rank) for rank in ranks)
    mean, largest = sum(loads) / num_ranks, max(loads, default=0.0)
    assert busiest <= (mean + largest) * (1 + 1e-9)
