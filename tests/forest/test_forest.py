"""The forest: hand-made trees, and properties of random ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import Forest, build_forest, may_share
from prefixflow.forest.build import common_positions
from prefixflow.ranges import Range
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, batches, brute_force_positions, omitted_of, trajectory


def shape(forest: Forest) -> list[tuple[int | None, tuple[int, int], tuple[int, ...]]]:
    return [(s.parent, (s.span.start, s.span.stop), s.members) for s in forest.segments]


def test_last_prompt_token_falls_into_each_branch() -> None:
    """Prompt 1 2 3: position 2 (token 3) predicts 7 in one branch and 8 in the other."""
    forest = build_forest(batch_of([1, 2, 3, 7, 7], [1, 2, 3, 8]))
    assert shape(forest) == [(None, (0, 2), (0, 1)), (0, (2, 4), (0,)), (0, (2, 3), (1,))]
    assert (forest.logical_tokens, forest.computed_tokens) == (7, 5)


def test_identical_trajectories_are_one_segment() -> None:
    forest = build_forest(batch_of([1, 2, 3], [1, 2, 3], [1, 2, 3]))
    assert shape(forest) == [(None, (0, 2), (0, 1, 2))]


def test_strict_prefix_ends_at_an_inner_segment() -> None:
    forest = build_forest(batch_of([5, 6, 7, 8], [5, 6, 7]))
    assert shape(forest) == [(None, (0, 2), (0, 1)), (0, (2, 3), (0,))]


def test_three_levels_in_preorder_by_first_appearance() -> None:
    forest = build_forest(batch_of([1, 1, 9, 9, 9], [1, 1, 2, 2, 5], [1, 1, 9, 9, 4], [1, 1, 2, 2, 6]))
    assert shape(forest) == [
        (None, (0, 1), (0, 1, 2, 3)),
        (0, (1, 3), (0, 2)),
        (1, (3, 4), (0,)),
        (1, (3, 4), (2,)),
        (0, (1, 3), (1, 3)),
        (4, (3, 4), (1,)),
        (4, (3, 4), (3,)),
    ]
    assert forest.depth == 3
    assert forest.num_shared_segments == 3
    assert forest.children()[1] == [2, 3]
    assert forest.path(6) == (0, 4, 6)


def test_equal_tokens_of_other_groups_are_not_shared() -> None:
    forest = build_forest([*batch_of([1, 2, 3], group="a"), *batch_of([1, 2, 3], group="b")])
    assert forest.num_trees == 2
    assert forest.computed_tokens == forest.logical_tokens == 4


def test_first_tokens_alone_share_nothing() -> None:
    """Equal first tokens with different successors are different positions."""
    assert build_forest(batch_of([1, 2], [1, 3])).num_shared_segments == 0


def test_single_tokens_are_counted_and_not_run() -> None:
    forest = build_forest(batch_of([3], [3, 4]))
    assert forest.omitted == {0}
    assert forest.lengths == (0, 1)
    assert shape(forest) == [(None, (0, 1), (1,))]


def test_ids_beyond_32_bits_still_share() -> None:
    """Only the low halves of the middle trajectory lie between the others."""
    high = 1 << 32
    forest = build_forest(batch_of([1, 1, 5], [high + 1, 1, 6], [1, 1, 7]))
    assert forest.computed_tokens == 5


def test_dense_trees_are_chosen_one_by_one() -> None:
    trajectories = [*batch_of([1, 2, 3], [1, 2, 4], group="a"), *batch_of([1, 2, 3], [1, 2, 4])]
    forest = build_forest(trajectories, dense_trees={1})
    assert [s.is_shared for s in forest.segments if s.tree == 0] == [True, False, False]
    assert [s.is_shared for s in forest.segments if s.tree == 1] == [False, False]
    assert build_forest(trajectories, dense_trees=None).computed_tokens == 8


def test_common_positions_are_one_less_than_common_tokens() -> None:
    cases = [([1, 2, 3], [1, 2, 3, 4], 2), ([1, 2], [1, 3], 0), ([1], [2], 0), ([1], [1], 0)]
    for left, right, expected in cases:
        assert common_positions(np.array(left), np.array(right)) == expected


def test_empty_batch() -> None:
    forest = build_forest([])
    forest.assert_invariants()
    assert (forest.depth, forest.reuse_ratio, forest.computed_tokens) == (0, 1.0, 0)


@settings(max_examples=50, deadline=None)
@given(batches(), st.data())
def test_every_position_stands_once(trajectories: list[Trajectory], data: st.DataObject) -> None:
    omit = data.draw(omitted_of(trajectories))
    forest = build_forest(trajectories, omit=omit)
    forest.assert_invariants()
    assert forest.computed_tokens == brute_force_positions(trajectories, omit)
    logical = sum(len(t) - 1 for i, t in enumerate(trajectories) if i not in omit)
    assert forest.logical_tokens == logical
    for segment in forest.segments:
        start, stop = segment.span.start, segment.span.stop
        tokens = {tuple(trajectories[m].tokens[start : stop + 1]) for m in segment.members}
        assert len(tokens) == 1, "members disagree on a token or on the last label"


@settings(max_examples=50, deadline=None)
@given(batches())
def test_dense_forest_runs_every_trajectory_whole(trajectories: list[Trajectory]) -> None:
    forest = build_forest(trajectories, dense_trees=None)
    forest.assert_invariants()
    assert forest.computed_tokens == forest.logical_tokens
    assert all(s.parent is None and len(s.members) == 1 for s in forest.segments)


@settings(max_examples=50, deadline=None)
@given(batches())
def test_order_of_members_changes_no_count(trajectories: list[Trajectory]) -> None:
    forward, backward = build_forest(trajectories), build_forest(trajectories[::-1])
    assert forward.computed_tokens == backward.computed_tokens
    assert len(forward.segments) == len(backward.segments)


THREE_LEVELS = build_forest(batch_of([1, 1, 9, 9, 9], [1, 1, 2, 2, 5], [1, 1, 9, 9, 4]))


@pytest.mark.parametrize(
    ("segment", "change", "reason"),
    [
        (1, {"span": Range(2, 3)}, "does not continue"),
        (0, {"span": Range(1, 2)}, "starts late"),
        (2, {"span": Range(3, 5)}, "positions"),
        (2, {"members": (1,)}, "gains members"),
        (3, {"members": (0,)}, "siblings"),
        (3, {"parent": None}, "starts late"),
        (3, {"tree": 1}, "leaves its parent's tree"),
        (2, {"id": 3}, "stands at place"),
        (1, {"members": ()}, "is empty"),
    ],
)
def test_invariants_see_a_broken_segment(segment: int, change: dict, reason: str) -> None:
    segments = list(THREE_LEVELS.segments)
    segments[segment] = replace(segments[segment], **change)
    with pytest.raises(AssertionError, match=reason):
        replace(THREE_LEVELS, segments=tuple(segments)).assert_invariants()


def test_invariants_see_a_lost_trajectory() -> None:
    lost = replace(THREE_LEVELS, lengths=(*THREE_LEVELS.lengths, 4))
    with pytest.raises(AssertionError, match="trajectory 3: 0 of 4 positions"):
        lost.assert_invariants()


def test_repeated_temperature_or_mask_does_not_split_a_segment() -> None:
    """Only tokens and the group decide what is shared; rows are a matter of the batch."""
    forest = build_forest(
        [
            trajectory([1, 2, 3, 4], name="a", trained=[3], temperature=0.5),
            trajectory([1, 2, 3, 4], name="b", trained=[], temperature=2.0),
        ]
    )
    assert shape(forest) == [(None, (0, 3), (0, 1))]


@settings(max_examples=60, deadline=None)
@given(batches())
def test_may_share_tells_whether_anything_is_shared(trajectories: list[Trajectory]) -> None:
    forest = build_forest(trajectories)
    shares = any(s.is_shared for s in forest.segments)
    assert may_share(trajectories) == shares
    if not shares:
        assert forest == build_forest(trajectories, dense_trees=None)
