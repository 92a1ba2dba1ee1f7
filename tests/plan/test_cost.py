"""Cost model and chunking, against figures worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import build_forest
from prefixflow.plan.chunk import chunk_segments
from prefixflow.plan.cost import MOST_PIECES, CostModel, attended_pairs
from prefixflow.ranges import Range
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, batches


def test_flops_by_hand() -> None:
    """4 positions after 10: 4 * 10 + 4 * 4 / 2 = 48 pairs."""
    model, span = CostModel(linear=1.0, head=100.0, attention=10_000.0), Range(10, 14)
    assert attended_pairs(span) == 48
    assert model.forward_flops(span, num_rows=2) == 4 + 200 + 480_000
    assert model.training_flops(span, num_rows=2) == 3 * (4 + 200) + 3.5 * 480_000


def test_forest_flops_add_up_segments() -> None:
    forest = build_forest(batch_of([1, 2, 3, 7], [1, 2, 3, 8]))
    model = CostModel(1.0, 100.0, 10_000.0)
    pairs = 2 * 2 / 2 + 2 * (1 * 2 + 1 / 2)
    assert model.forest_flops(forest, [5, 1, 2]) == 3 * (4 + 800) + 3.5 * 10_000 * pairs


def test_linear_cost_is_cut_evenly() -> None:
    assert CostModel().equal_cost_cuts(Range(5, 15), 4) == (
        Range(5, 8),
        Range(8, 12),
        Range(12, 15),
    )


def test_a_span_within_the_budget_is_left_whole() -> None:
    assert CostModel().equal_cost_cuts(Range(5, 9), 4) == (Range(5, 9),)


def test_attention_alone_is_cut_at_square_roots() -> None:
    """Cost up to x is x^2 / 2, so quarters of it end at 50, 71, 87 and 100 of 100."""
    cuts = CostModel(1e-9, 0.0, 1.0).equal_cost_cuts(Range(0, 100), 50)
    assert [c.stop for c in cuts] == [50, 71, 87, 100]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 500),
    st.integers(1, 400),
    st.integers(1, 450),
    st.sampled_from([0.0, 1e-3, 0.1, 10.0]),
)
def test_cuts_cover_the_span_within_the_budget(start: int, length: int, max_tokens: int, attention: float) -> None:
    span = Range(start, start + length)
    cuts = CostModel(1.0, 0.0, attention).equal_cost_cuts(span, max_tokens)
    assert (cuts[0].start, cuts[-1].stop) == (span.start, span.stop)
    assert all(a.joins(b) for a, b in pairwise(cuts))
    assert all(1 <= len(c) <= max_tokens for c in cuts)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 100_000), st.integers(4096, 100_000), st.sampled_from([0.0, 1e-5, 1e-3]))
def test_cuts_cost_the_same(start: int, length: int, attention: float) -> None:
    model = CostModel(1.0, 0.0, attention)
    costs = [model.training_flops(c) for c in model.equal_cost_cuts(Range(start, start + length), 4096)]
    if len(costs) == MOST_PIECES * math.ceil(length / 4096):
        return
    per_token = max(costs) / min(4096, length)
    assert max(costs) - min(costs) <= max(0.02 * max(costs), 10 * per_token)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 40_000), st.integers(1, 5000), st.sampled_from([0.0, 1e-3, 0.1, 10.0]))
def test_attention_does_not_multiply_the_pieces(start: int, length: int, max_tokens: int, attention: float) -> None:
    cuts = CostModel(1.0, 0.0, attention).equal_cost_cuts(Range(start, start + length), max_tokens)
    assert len(cuts) <= MOST_PIECES * math.ceil(length / max_tokens)
    assert all(a.joins(b) and len(a) <= max_tokens for a, b in pairwise([*cuts, Range(start + length, start + length)]))


def test_the_first_pieces_fill_the_budget_where_costs_cannot_be_equal() -> None:
    """Attention alone over 8 budgets: equal costs would take 64 pieces, and 16 have to do.

    The first ones have the budget, the others cost the same.
    """
    model = CostModel(1e-9, 0.0, 1.0)
    cuts = model.equal_cost_cuts(Range(0, 32_768), 4096)
    lengths = [len(c) for c in cuts]
    assert len(cuts) == 16
    num_full = lengths.count(4096)
    assert 1 <= num_full < 8
    assert lengths[:num_full] == [4096] * num_full
    costs = [model.training_flops(c) for c in cuts[num_full:]]
    assert max(costs) <= 1.01 * min(costs)
    assert max(map(model.training_flops, cuts[:num_full])) <= max(costs)


def test_pieces_cost_no_more_than_they_may() -> None:
    """100 positions, half of them rows that cost three positions each: 3 * 250 in pieces of at most 100."""
    forest = build_forest(batch_of(range(101)))
    chunked = chunk_segments(forest, 4096, CostModel(1.0, 3.0), rows=[50], max_cost=100.0)
    lengths = [len(s) for s in chunked.segments]
    assert len(lengths) == 8
    assert set(lengths) == {12, 13}
    assert chunk_segments(forest, 4096, CostModel(1.0, 3.0), rows=[50], max_cost=750.0) == forest


def test_a_position_is_the_smallest_piece() -> None:
    assert len(CostModel().equal_cost_cuts(Range(0, 5), 4096, max_cost=0.5)) == 5


def test_pieces_form_a_chain_and_children_hang_from_the_last() -> None:
    trajectories = batch_of([*range(11), 50, 51], [*range(11), 60, 61, 62])
    forest = chunk_segments(build_forest(trajectories), 4, CostModel())
    assert [(s.parent, str(s.span), s.members) for s in forest.segments] == [
        (None, "0:3", (0, 1)),
        (0, "3:7", (0, 1)),
        (1, "7:10", (0, 1)),
        (2, "10:12", (0,)),
        (2, "10:13", (1,)),
    ]


@settings(max_examples=50, deadline=None)
@given(batches(), st.integers(1, 30))
def test_chunking_keeps_the_forest(trajectories: list[Trajectory], max_tokens: int) -> None:
    forest = build_forest(trajectories)
    chunked = chunk_segments(forest, max_tokens, CostModel())
    chunked.assert_invariants()
    assert chunked.computed_tokens == forest.computed_tokens
    assert chunked.lengths == forest.lengths
    assert all(len(s) <= max_tokens for s in chunked.segments)


def test_bound_of_nothing_shared_is_the_dense_cost() -> None:
    model = CostModel(2.0, 0.0, 0.5)
    forest = build_forest(batch_of(range(9), range(9, 20)))
    expected = 3 * 2 * 18 + 3.5 * 0.5 * (32 + 50)
    assert model.forest_flops(forest, [0, 0]) == pytest.approx(expected)
