"""Folding small shared segments: what is folded, and that nothing is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import Forest, build_forest
from prefixflow.plan.cost import UNMEASURED_SHARING, SharingOverhead
from prefixflow.plan.fold import fold_small_segments
from prefixflow.plan.plan import PlanConfig, PrefixReuse, build_plan
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, batches


def spans(forest: Forest) -> list[tuple[int | None, str, tuple[int, ...]]]:
    return [(s.parent, str(s.span), s.members) for s in forest.segments]


def savings(forest: Forest) -> list[int]:
    """For each shared inner segment, the computed tokens that it saves: (branches - 1) * length."""
    children = forest.children()
    result = []
    for segment in forest.segments:
        below = children[segment.id]
        going_on = {m for child in below for m in forest.segments[child].members}
        if segment.is_shared and below:
            branches = len(below) + (set(segment.members) != going_on)
            result.append((branches - 1) * len(segment))
    return result


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(0, 30))
def test_folding_is_exact(trajectories: list[Trajectory], overhead_tokens: int) -> None:
    """Every position still stands on its trajectory's path, and only segments worth their overhead are left."""
    forest = build_forest(trajectories)
    folded = fold_small_segments(forest, SharingOverhead(overhead_tokens))
    folded.assert_invariants()
    assert folded.logical_tokens == forest.logical_tokens
    assert folded.computed_tokens >= forest.computed_tokens
    assert all(saved > overhead_tokens for saved in savings(folded))
    if all(saved > overhead_tokens for saved in savings(forest)):
        assert folded is forest
    assert {s.span.stop for s in folded.segments} <= {s.span.stop for s in forest.segments}, "a segment was cut"


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(8, 80), st.integers(1, 3))
def test_auto_scores_every_token_once(trajectories: list[Trajectory], budget: int, ranks: int) -> None:
    config = PlanConfig(budget, data_parallel_size=ranks, prefix_reuse=PrefixReuse.AUTO)
    build_plan(trajectories, config).assert_invariants(trajectories)


def test_a_forest_with_nothing_to_fold_is_returned_unchanged() -> None:
    """One shared segment of 17 positions, more than the overhead of 16; and trajectories by themselves."""
    prefix = list(range(int(UNMEASURED_SHARING.segment_tokens) + 2))
    forest = build_forest(batch_of([*prefix, 100], [*prefix, 200]))
    assert fold_small_segments(forest) is forest
    apart = build_forest(batch_of([1, 2, 3], [4, 5, 6]))
    assert fold_small_segments(apart) is apart


def test_a_trajectory_that_ends_at_a_folded_node_keeps_its_positions() -> None:
    """Positions 0:2 are shared by a, b and c, where a ends; folding gives a, b and c two positions each."""
    forest = build_forest(batch_of([1, 2, 3], [1, 2, 3, 40, 50], [1, 2, 3, 60]))
    assert spans(forest) == [(None, "0:2", (0, 1, 2)), (0, "2:4", (1,)), (0, "2:3", (2,))]
    folded = fold_small_segments(forest)
    assert spans(folded) == [(None, "0:2", (0,)), (None, "0:4", (1,)), (None, "0:3", (2,))]


def test_identical_trajectories_that_end_at_a_folded_node_stay_together() -> None:
    forest = build_forest(batch_of([1, 2, 3], [1, 2, 3], [1, 2, 3, 40]))
    assert spans(fold_small_segments(forest)) == [(None, "0:2", (0, 1)), (None, "0:3", (2,))]


def test_a_folded_child_gives_its_branches_to_its_parent() -> None:
    """A root of 9 positions saves 9 with two branches, 18 when one of them is folded into two.

    The inner node has 3 positions and saves 3. With an overhead of 10 it is folded, and the root stays.
    """
    root = list(range(10))
    trajectories = batch_of([*root, 20, 21, 22, 30], [*root, 20, 21, 22, 31], [*root, 40])
    forest = build_forest(trajectories)
    assert [str(s.span) for s in forest.segments] == ["0:9", "9:12", "12:13", "12:13", "9:10"]
    assert spans(fold_small_segments(forest, SharingOverhead(10))) == [
        (None, "0:9", (0, 1, 2)),
        (0, "9:13", (0,)),
        (0, "9:13", (1,)),
        (0, "9:10", (2,)),
    ]
