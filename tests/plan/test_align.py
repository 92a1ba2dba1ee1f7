"""Trees of ranks that exchange tokens begin together."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan import align
from prefixflow.plan.align import aligned_places
from prefixflow.plan.microbatch import Microbatch, placed


def microbatches(sizes: list[int]) -> tuple[Microbatch, ...]:
    """Trees of so many microbatches each, of which the first is read by the others."""
    starts = [0, *accumulate(sizes)]
    return tuple(
        Microbatch(
            id=m,
            segments=(m,),
            spans=(),
            num_physical_tokens=1,
            parent=None if m == start else start,
            reads=() if m == start else (start,),
            writes=(),
            local=(),
            cached=(),
        )
        for start, stop in pairwise(starts)
        for m in range(start, stop)
    )


def test_trees_begin_together_and_dummies_fill_the_rounds() -> None:
    places, count = aligned_places([microbatches([2, 3, 1, 3]), microbatches([3, 1, 3, 2])])
    assert count == 9
    assert places == ((6, 7, 0, 1, 2, 8, 3, 4, 5), (0, 1, 2, 8, 3, 4, 5, 6, 7))
    assert aligned_places([microbatches([2]), ()]) == (((0, 1), ()), 2)
    assert aligned_places([microbatches([2, 3])]) == (((0, 1, 2, 3, 4),), 5)
    assert aligned_places([(), ()]) == (((), ()), 0)


@pytest.mark.parametrize(("stretch", "num_places"), [(1.25, 11), (1.05, 9)])
def test_longer_rounds_where_short_ones_need_many_dummies(monkeypatch, stretch: float, num_places: int) -> None:
    monkeypatch.setattr(align, "MAX_STRETCH", stretch)
    _, count = aligned_places([microbatches([3, 3, 3]), microbatches([2, 2, 2, 2])])
    assert count == num_places


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=4))
def test_invariants(sizes: list[list[int]]) -> None:
    ranks = [microbatches(of_rank) for of_rank in sizes]
    places, count = aligned_places(ranks)
    assert count <= align.MAX_STRETCH * max(map(len, ranks))
    for of_rank, rank, to in zip(sizes, ranks, places, strict=True):
        moved = placed(rank, to, count, num_tokens=2)
        assert [m.id for m in moved] == list(range(count))
        assert sorted(m.segments[0] for m in moved if not m.is_dummy) == list(range(len(rank)))
        # A tree's microbatches stand side by side, behind the one they read.
        widths = [sum(read == m.id for other in moved for read in other.reads) + 1 for m in moved]
        assert all(m.id - read < widths[read] for m in moved for read in m.reads)
        assert sorted(widths[m.id] for m in moved if not m.is_dummy and not m.reads) == sorted(of_rank)
