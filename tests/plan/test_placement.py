"""Trees to data-parallel ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import Forest, build_forest
from prefixflow.plan import placement
from prefixflow.plan.placement import NEARLY_BEST, Placement, place_forest, place_trees
from prefixflow.testing.generate import stepwise_chains
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, batches


def loads_of(ranks: tuple[tuple[int, ...], ...], loads: list[float]) -> list[float]:
    return [sum(loads[t] for t in trees) for trees in ranks]


def test_largest_first_then_a_swap() -> None:
    """8 and 7 open the ranks; 6 joins 7, 5 joins 8, and 4 finds 13 on both: 17 to 13. Swapping 8 for 6 makes it 15."""
    loads = [4.0, 8.0, 7.0, 6.0, 5.0]
    assert loads_of(place_trees(loads, 2), loads) == [15.0, 15.0]


def test_a_swap_that_greedy_misses() -> None:
    """Greedy: 3 + 2 + 2 = 7 beside 3 + 2 = 5; the best is 3 + 3 beside 2 + 2 + 2."""
    loads = [3.0, 3.0, 2.0, 2.0, 2.0]
    assert loads_of(place_trees(loads, 2), loads) == [6.0, 6.0]


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


def placed(trajectories: list[Trajectory], num_ranks: int) -> tuple[Forest, Placement, list[float]]:
    """The forest, its placement by tokens, and the computed tokens of each rank."""
    forest = build_forest(trajectories)
    result = place_forest(forest, [float(len(s)) for s in forest.segments], num_ranks)
    rank_of = {tree: rank for rank, trees in enumerate(result.trees) for tree in trees}
    tokens = [0.0] * num_ranks
    for segment in result.forest.segments:
        tokens[rank_of[segment.tree]] += len(segment)
    return forest, result, tokens


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 5))
def test_splitting_keeps_every_trajectory_once(trajectories: list[Trajectory], num_ranks: int) -> None:
    forest, result, tokens = placed(trajectories, num_ranks)
    split = result.forest
    split.assert_invariants()
    assert sorted(t for rank in result.trees for t in rank) == list(range(split.num_trees))
    assert split.lengths == forest.lengths
    whole = [0.0] * forest.num_trees
    for segment in forest.segments:
        whole[segment.tree] += len(segment)
    without_splits = max(sum(whole[t] for t in trees) for trees in place_trees(whole, num_ranks))
    assert max(tokens) <= NEARLY_BEST * without_splits
    if num_ranks == 1:
        assert split is forest


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 4), st.data())
def test_predicted_loads_are_those_of_the_split_forest(
    trajectories: list[Trajectory], num_ranks: int, data: st.DataObject
) -> None:
    """Any assignment of trajectories to ranks: the walk's sums against the forest that `_split` makes of it."""
    forest = build_forest(trajectories)
    walk = placement._Walk.of(forest, [float(len(s)) for s in forest.segments])
    assert sorted(walk.members) == [i for i in range(len(trajectories)) if i not in forest.omitted]
    ranks = [data.draw(st.integers(0, num_ranks - 1)) for _ in walk.members]
    split = placement._split(forest, dict(zip(walk.members, ranks, strict=True)), num_ranks)
    split.forest.assert_invariants()
    rank_of = {tree: rank for rank, trees in enumerate(split.trees) for tree in trees}
    tokens = [0.0] * num_ranks
    for segment in split.forest.segments:
        tokens[rank_of[segment.tree]] += len(segment)
    assert walk.rank_loads(ranks, num_ranks) == tokens


def test_a_tree_is_cut_at_the_node_that_loses_least() -> None:
    """Two branches of 102 positions below a root of 1, each with two leaves: the root is repeated, no branch is."""
    trajectories = batch_of(*([1, 2, *[10 * b] * 100, b, 1000 + leaf] for b in (3, 4) for leaf in range(2)))
    forest, result, tokens = placed(trajectories, 2)
    assert result.forest.computed_tokens - forest.computed_tokens == 1
    assert tokens[0] == tokens[1]
    assert [s.members for s in result.forest.segments if s.parent is None] == [(0, 1), (2, 3)]


def test_a_node_that_branches_no_more_joins_its_child() -> None:
    _, result, _ = placed(batch_of([1, *range(10, 50)], [1, *range(50, 90)]), 2)
    assert [len(s.members) for s in result.forest.segments] == [1, 1]


def test_balanced_trees_stay_whole() -> None:
    groups = [t for g in range(4) for t in batch_of([1, 2, 3, 4], [1, 2, 3, 5], group=str(g))]
    forest, result, _ = placed(groups, 4)
    assert result.forest is forest


@pytest.mark.parametrize("num_chains", [3, 30, 50])
def test_stepwise_samples_are_balanced_over_eight_ranks(num_chains: int) -> None:
    """Within 5 % of the mean, or of the largest trajectory, which cannot be split."""
    trajectories = list(stepwise_chains(num_chains, 12, (500, 1500), (50, 600)))
    forest, _, tokens = placed(trajectories, 8)
    assert max(tokens) <= 1.05 * max(sum(tokens) / 8, max(forest.lengths))
