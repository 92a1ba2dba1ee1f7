"""Positions and slices of context-parallel ranks, against the microbatch's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import build_forest
from prefixflow.plan.context import ContextShard, KVTraffic, context_shards, num_regathered
from prefixflow.plan.microbatch import Microbatch, pack_microbatches
from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batches


def microbatch(*lengths: int, num_physical: int) -> Microbatch:
    """Unrelated segments of these lengths, then padding."""
    bounds = np.cumsum([0, *lengths]).tolist()
    spans = tuple(Range(a, b) for a, b in pairwise(bounds))
    runs = (*spans, Range(bounds[-1], num_physical)) if bounds[-1] < num_physical else spans
    return Microbatch(
        id=0,
        segments=tuple(range(len(lengths))),
        spans=spans,
        num_physical_tokens=num_physical,
        parent=None,
        reads=(),
        writes=(),
        local=tuple(LocalSlice(r, r, causal=True) for r in runs),
        cached=(),
    )


def pairs(local: Sequence[LocalSlice], cached: Sequence[CachedSlice], index: np.ndarray) -> Counter[tuple[int, object]]:
    """(query, key) pairs of slices, queries by their place in the microbatch; a key of the cache is its block."""
    found: Counter[tuple[int, object]] = Counter()
    for piece in local:
        for number, query in enumerate(range(piece.queries.start, piece.queries.stop)):
            stop = piece.keys.start + number + 1 if piece.causal else piece.keys.stop
            found.update((int(index[query]), key) for key in range(piece.keys.start, stop))
    for part in cached:
        for query in range(part.queries.start, part.queries.stop):
            found.update((int(index[query]), ("block", block)) for block in part.blocks)
    return found


def assert_invariants(m: Microbatch, shards: Sequence[ContextShard]) -> None:
    """The invariants at the top of `prefixflow.plan.context`."""
    size = len(shards)
    held = np.concatenate([shard.index for shard in shards])
    assert sorted(held.tolist()) == list(range(m.num_physical_tokens))
    for shard in shards:
        assert shard.num_tokens == m.num_physical_tokens // size
        assert (np.diff(shard.index) > 0).all()
        shares = [int(((shard.index >= s.start) & (shard.index < s.stop)).sum()) for s in m.spans]
        for span, share in zip(m.spans, shares, strict=True):
            assert share in (len(span) // size, -(-len(span) // size))
        assert sum(shares) in (m.num_tokens // size, -(-m.num_tokens // size))
    whole = pairs(m.local, m.cached, np.arange(m.num_physical_tokens))
    parts: Counter[tuple[int, object]] = Counter()
    for shard in shards:
        local = shard.local_slices(m.local)
        causal = sorted(piece.queries for piece in local if piece.causal)
        assert [r.start for r in causal] == [0, *(r.stop for r in causal)][:-1]
        parts.update(pairs(local, shard.cached_slices(m.cached), shard.index))
    assert parts == whole


@settings(deadline=None)
@given(batches(max_groups=2), st.integers(2, 4), st.integers(1, 2), st.integers(1, 3))
def test_invariants(trajectories: list[Trajectory], size: int, tp: int, budget: int) -> None:
    multiple = 2 * size * tp
    forest = build_forest(trajectories)
    longest = max((len(segment) for segment in forest.segments), default=0)
    max_tokens = -(-longest // multiple) * multiple * budget or multiple
    trees = sorted({segment.tree for segment in forest.segments})
    for m in pack_microbatches(forest, trees, max_tokens=max_tokens, multiple=multiple):
        assert_invariants(m, context_shards(m, size))


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 8))
def test_any_lengths(lengths: list[int], size: int) -> None:
    num_physical = -(-max(sum(lengths), 1) // size) * size
    m = microbatch(*lengths, num_physical=num_physical)
    assert_invariants(m, context_shards(m, size))


def test_a_rank_takes_a_chunk_from_the_front_and_one_from_the_back() -> None:
    shards = context_shards(microbatch(16, num_physical=16), 2)
    assert [shard.held for shard in shards] == [(Range(0, 4), Range(12, 16)), (Range(4, 12),)]
    shards = context_shards(microbatch(16, num_physical=16), 4)
    assert shards[1].held == (Range(2, 4), Range(12, 14))
    assert shards[1].local_slices((LocalSlice(Range(0, 16), Range(0, 16), causal=True),)) == (
        LocalSlice(Range(0, 2), Range(2, 4), causal=True),
        LocalSlice(Range(0, 2), Range(0, 2), causal=False),
        LocalSlice(Range(2, 4), Range(12, 14), causal=True),
        LocalSlice(Range(2, 4), Range(0, 12), causal=False),
    )


def test_a_long_segment_costs_every_rank_about_the_same() -> None:
    m = microbatch(4001, num_physical=4008)
    costs = [
        sum(len(p.queries) * len(p.keys) * (0.5 if p.causal else 1.0) for p in shard.local_slices(m.local))
        for shard in context_shards(m, 4)
    ]
    assert max(costs) < 1.01 * min(costs)


def test_segments_of_one_token_go_round() -> None:
    shards = context_shards(microbatch(1, 1, 1, 1, 1, num_physical=8), 4)
    assert [shard.index.tolist() for shard in shards] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_traffic_is_of_own_positions_only() -> None:
    traffic = KVTraffic(gathered_bytes=10, regathered_bytes=0, reduced_bytes=3)
    assert traffic.num_bytes([microbatch(16, num_physical=16)], 4) == 4 * 3 * 13
    assert traffic.num_bytes([microbatch(16, num_physical=16)] * 3, 4) == 3 * 4 * 3 * 13


def test_recomputation_moves_what_is_not_in_the_cache() -> None:
    traffic = KVTraffic(gathered_bytes=10, regathered_bytes=100, reduced_bytes=3)
    m = microbatch(9, 3, num_physical=16)
    assert traffic.num_bytes([m], 4) == 4 * 3 * 113
    # Rank 0 holds three of the nine; the second segment goes on at rank 1.
    first, second = (replace(m, writes=writes) for writes in ((0,), (1,)))
    assert [num_regathered(x, 4) for x in (first, second, replace(m, writes=(0, 1)))] == [2, 4, 1]
    assert traffic.num_bytes([first], 4) == 3 * (4 * 13 + 2 * 100)
    whole = replace(microbatch(16, num_physical=16), writes=(0,))
    assert traffic.num_bytes([whole], 4) == 4 * 3 * 13
