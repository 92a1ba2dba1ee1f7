"""Context parallelism with sharded K/V: what a rank attends to in each hop of the ring, and what the hops move.

Words. The *shard* of a microbatch on a rank: K/V of the microbatch's positions that the rank holds (`plan.context`), then of
every cached block that the microbatch reads, in each the positions that the rank held when the block was written. In *hop* j
rank r works on the shard of rank (r - j) mod cp, and passes it on to rank r + 1.

Strategy
1. A full slice becomes one of the rank's queries and what the shard has of its keys.
2. A causal slice becomes, for each chunk of queries that the rank holds, what the shard has of the keys before the chunk, in
   full; and in hop 0 the chunk itself, causal. What comes later than the chunk is skipped.
3. Neighbouring chunks that meet the same keys are one slice.

Queries are counted among the positions that the rank holds, keys within the shard.

Invariants
1. Over all hops each query meets the keys that it meets in the slices of `ContextShard`, each once.
2. In hop 0 the causal slices have equal queries and keys and cover the rank's positions in order; no other hop has one.
3. The shards of all ranks together are the physical tokens of the microbatch and the tokens of the blocks it reads.
4. All ranks make the same hops, those too for which a rank has no query or a shard no key: only slices differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from prefixflow.plan.context import ContextShard, context_shards
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.slices import LocalSlice
from prefixflow.ranges import Range

Shares = Mapping[int, tuple[int, ...]]
"""By block: how many of its positions each context-parallel rank holds."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The hops of one microbatch on one rank.

    hops: by hop, the slices of the rank's queries and the shard's keys, causal ones first. shard_tokens: by rank, positions
    of its shard. blocks: cached ones, in the order in which they stand behind own positions in every shard.
    """

    rank: int
    hops: tuple[tuple[LocalSlice, ...], ...]
    shard_tokens: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.hops)

    def source(self, hop: int) -> int:
        """Rank whose shard this rank works on; hop `size` is home again."""
        return (self.rank - hop) % self.size

    @classmethod
    def of(cls, microbatch: Microbatch, shards: Sequence[ContextShard], rank: int, shares: Shares) -> Ring:
        """shards: of the microbatch, by rank. shares: of all blocks that it reads (`block_shares`)."""
        blocks = _blocks(microbatch)
        assert len(set(blocks)) == len(blocks), f"microbatch {microbatch.id} reads a block in two slices: {blocks}"
        size = len(shards)
        return cls(
            rank=rank,
            hops=tuple(_hop(microbatch, shards, rank, (rank - hop) % size, shares) for hop in range(size)),
            shard_tokens=shard_tokens(microbatch, size, shares),
            blocks=blocks,
        )


def block_shares(microbatches: Sequence[Microbatch], size: int) -> dict[int, tuple[int, ...]]:
    """Shares of all blocks that `microbatches` write, on `size` ranks."""
    return {
        block: tuple(len(shard.own(m.span_of(block))) for shard in shards)
        for m in microbatches
        if m.writes
        for shards in (context_shards(m, size),)
        for block in m.writes
    }


def shard_tokens(microbatch: Microbatch, size: int, shares: Shares) -> tuple[int, ...]:
    """Positions of each rank's shard of `microbatch`."""
    blocks = _blocks(microbatch)
    own = microbatch.num_physical_tokens // size
    return tuple(own + sum(shares[block][rank] for block in blocks) for rank in range(size))


def _blocks(microbatch: Microbatch) -> tuple[int, ...]:
    return tuple(block for piece in microbatch.cached for block in piece.blocks)


def _hop(
    microbatch: Microbatch, shards: Sequence[ContextShard], rank: int, source: int, shares: Shares
) -> tuple[LocalSlice, ...]:
    own, other = shards[rank], shards[source]
    causal: list[LocalSlice] = []
    full: list[LocalSlice] = []
    for piece in microbatch.local:
        if not piece.causal:
            _append(full, own.own(piece.queries), other.own(piece.keys))
            continue
        for chunk in own.held_in(piece.queries):
            queries = own.own(chunk)
            if source == rank:
                causal.append(LocalSlice(queries, queries, causal=True))
            _append(full, queries, other.own(Range(piece.keys.start, chunk.start)))
    offset = other.num_tokens
    for part in microbatch.cached:
        keys = Range(offset, offset + sum(shares[block][source] for block in part.blocks))
        _append(full, own.own(part.queries), keys)
        offset = keys.stop
    return (*sorted(causal, key=lambda piece: piece.queries.start), *full)


def _append(full: list[LocalSlice], queries: Range, keys: Range) -> None:
    """Append a full slice unless it is empty; queries that go on with the same keys join the slice before."""
    if not len(queries) or not len(keys):
        return
    last = full[-1] if full else None
    if last is not None and last.keys == keys and last.queries.joins(queries):
        full[-1] = LocalSlice(Range(last.queries.start, queries.stop), keys, causal=False)
    else:
        full.append(LocalSlice(queries, keys, causal=False))


@dataclass(frozen=True, slots=True)
class RingTraffic:
    """What the hops cost. Unlike `KVTraffic` it grows with the microbatches that read a block.

    kv_bytes: K and V of one position on one rank, summed over layers and turns of the ring: one in F, one where a backward
    recomputes attention, one in B. gradient_bytes: their gradients in the precision of gradient sums, over layers; 0 without a
    backward. tail_kv_bytes, tail_gradient_bytes: the part of the last layer of the model, where a microbatch without rows
    runs no attention; 0 where it does.
    """

    kv_bytes: int
    gradient_bytes: int
    tail_kv_bytes: int = 0
    tail_gradient_bytes: int = 0

    def num_bytes(
        self,
        microbatches: Sequence[Microbatch],
        size: int,
        rank: int,
        rowless: Collection[int],
        *,
        counted: Sequence[Microbatch] | None = None,
    ) -> int:
        """Bytes that context-parallel rank `rank` of `size` receives; rowless: ids of microbatches without rows.

        K/V of the other ranks' shards pass by; gradients of every shard do, the rank's own at last. counted: of which
        microbatches, by default of all, which the blocks that they read are from.
        """
        shares = block_shares(microbatches, size)
        total = 0
        for m in microbatches if counted is None else counted:
            tokens = shard_tokens(m, size, shares)
            is_rowless = m.id in rowless
            foreign = sum(tokens) - tokens[rank]
            total += foreign * (self.kv_bytes - is_rowless * self.tail_kv_bytes)
            total += sum(tokens) * (self.gradient_bytes - is_rowless * self.tail_gradient_bytes)
        return total


def rowless(microbatches: Sequence[Microbatch], rows: Sequence[int]) -> frozenset[int]:
    """Ids of the microbatches that score nothing; `rows[i]`: head rows of segment i."""
    return frozenset(m.id for m in microbatches if not any(rows[s] for s in m.segments))
