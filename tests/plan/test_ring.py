"""Hops of the ring: what each query meets against the microbatch's own slices, shard sizes, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import Forest, build_forest
from prefixflow.plan.context import context_shards
from prefixflow.plan.microbatch import Microbatch, pack_microbatches
from prefixflow.plan.ring import Ring, RingTraffic, block_shares, rowless
from prefixflow.testing.generate import trees
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, batches

Key = tuple[int, int]
"""(block, place in it), or (-1, place in the microbatch)."""


def shard_keys(
    m: Microbatch, writers: Mapping[int, Microbatch], blocks: Sequence[int], size: int, rank: int
) -> list[Key]:
    """What stands where in the shard of `rank`."""
    keys = [(-1, place) for place in context_shards(m, size)[rank].index.tolist()]
    for block in blocks:
        span = writers[block].span_of(block)
        index = context_shards(writers[block], size)[rank].index
        keys += [(block, place - span.start) for place in index.tolist() if place in span]
    return keys


def met_in_microbatch(m: Microbatch, lengths: Mapping[int, int]) -> Counter[tuple[int, Key]]:
    met: Counter[tuple[int, Key]] = Counter()
    for piece in m.local:
        for number, query in enumerate(range(piece.queries.start, piece.queries.stop)):
            stop = piece.keys.start + number + 1 if piece.causal else piece.keys.stop
            met.update((query, (-1, key)) for key in range(piece.keys.start, stop))
    for part in m.cached:
        keys = [(block, place) for block in part.blocks for place in range(lengths[block])]
        met.update((query, key) for query in range(part.queries.start, part.queries.stop) for key in keys)
    return met


def assert_invariants(m: Microbatch, writers: Mapping[int, Microbatch], size: int) -> None:
    """The invariants at the top of `prefixflow.plan.ring`."""
    lengths = {block: len(writer.span_of(block)) for block, writer in writers.items()}
    shares = block_shares(list(writers.values()), size)
    shards = context_shards(m, size)
    met: Counter[tuple[int, Key]] = Counter()
    for rank in range(size):
        ring = Ring.of(m, shards, rank, shares)
        index = shards[rank].index
        assert ring.size == size
        assert ring.source(size) == rank
        for hop, slices in enumerate(ring.hops):
            keys = shard_keys(m, writers, ring.blocks, size, ring.source(hop))
            assert len(keys) == ring.shard_tokens[ring.source(hop)]
            causal = [piece.queries for piece in slices if piece.causal]
            covered = [place for queries in causal for place in range(queries.start, queries.stop)]
            assert covered == ([*range(len(index))] if hop == 0 else [])
            assert [piece.causal for piece in slices] == sorted((p.causal for p in slices), reverse=True)
            for piece in slices:
                assert not piece.causal or piece.queries == piece.keys
                for number, query in enumerate(index[piece.queries.slice].tolist()):
                    stop = piece.keys.start + number + 1 if piece.causal else piece.keys.stop
                    met.update((query, key) for key in keys[piece.keys.start : stop])
    assert met == met_in_microbatch(m, lengths)
    assert sum(ring.shard_tokens) == m.num_physical_tokens + sum(lengths[block] for block in ring.blocks)


@settings(deadline=None)
@given(batches(max_groups=2), st.integers(2, 4), st.integers(1, 2))
def test_invariants(trajectories: list[Trajectory], size: int, budget: int) -> None:
    forest = build_forest(trajectories)
    longest = max((len(segment) for segment in forest.segments), default=0)
    assert_all(forest, size, -(-longest // (2 * size)) * 2 * size * budget or 2 * size)


def test_a_microbatch_reads_several_ancestors() -> None:
    packed = assert_all(build_forest(trees(1, 4, 2, (5, 9), seed=4)), size=3, max_tokens=30)
    assert max(len(m.cached) for m in packed) > 1


def assert_all(forest: Forest, size: int, max_tokens: int) -> Sequence[Microbatch]:
    every_tree = sorted({segment.tree for segment in forest.segments})
    packed = pack_microbatches(forest, every_tree, max_tokens=max_tokens, multiple=2 * size)
    writers = {block: m for m in packed for block in m.writes}
    for m in packed:
        assert_invariants(m, writers, size)
    return packed


def test_later_chunks_are_skipped_and_neighbours_joined() -> None:
    """16 tokens on 2 ranks: rank 0 holds 0:4 and 12:16, rank 1 holds 4:12."""
    forest = build_forest(batch_of([*range(17)]))
    (m,) = pack_microbatches(forest, [0], max_tokens=16, multiple=4)
    shards = context_shards(m, 2)
    rings = [Ring.of(m, shards, rank, {}) for rank in range(2)]
    shown = [[[(str(p.queries), str(p.keys), p.causal) for p in hop] for hop in ring.hops] for ring in rings]
    assert shown[0] == [[("0:4", "0:4", True), ("4:8", "4:8", True), ("4:8", "0:4", False)], [("4:8", "0:8", False)]]
    assert shown[1] == [[("0:8", "0:8", True)], [("0:8", "0:4", False)]]


def test_traffic_grows_with_the_readers() -> None:
    """A prefix of 8, read by three suffixes of 4 in two microbatches: on 2 ranks 4 positions of it come each time."""
    forest = build_forest(batch_of(*([1] * 9 + [10 * i, 2, 3, 4] for i in range(2, 5))))
    packed = pack_microbatches(forest, [0], max_tokens=8, multiple=4)
    assert [m.num_physical_tokens for m in packed] == [8, 8, 4]
    kv, gradient = 10, 3
    traffic = RingTraffic(kv, gradient, tail_kv_bytes=4, tail_gradient_bytes=1)
    for rank in range(2):
        writer = 4 * kv + 8 * gradient
        readers = (4 + 4) * kv + 16 * gradient + (2 + 4) * kv + 12 * gradient
        assert traffic.num_bytes(packed, 2, rank, frozenset()) == writer + readers
        assert traffic.num_bytes(packed, 2, rank, {0}) == writer + readers - 4 * 4 - 8 * 1
    assert rowless(packed, [0, 1, 1, 1]) == {0}
    # What a reader moves follows from the shares of blocks that others wrote.
    counted = [traffic.num_bytes(packed, 2, 0, frozenset(), counted=[m]) for m in packed]
    assert sum(counted) == traffic.num_bytes(packed, 2, 0, frozenset())
    assert counted[2] == (2 + 4) * kv + 12 * gradient
