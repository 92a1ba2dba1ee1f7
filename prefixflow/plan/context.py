"""Which positions of a microbatch each context-parallel rank holds, and its part of the attention slices.

Strategy
1. Every segment of n tokens is cut into 2 * cp near-equal chunks in order; rank r takes chunks r and 2 * cp - 1 - r, a cheap one
   and a dear one of the causal triangle.
2. What does not divide is dealt one token a rank, round after round, and each segment goes on where the one before it stopped.
3. The padding of the microbatch is dealt likewise, so that all ranks hold equally many positions.
4. A rank keeps its positions in the order of the microbatch. So a run of queries of the microbatch is one run of its own, and
   a slice of the microbatch becomes one slice of the rank, a causal one two for each chunk: the chunk itself, and
   in full what comes before it.

Queries are counted among the positions that the rank holds, keys among those of the whole microbatch (K/V are gathered).

Invariants
1. Every position of the microbatch, padding included, is held by exactly one rank; all hold num_physical_tokens / cp.
2. A rank holds floor(n / cp) or ceil(n / cp) positions of a segment of n tokens, and of all segments together.
3. Over all ranks each query meets the keys that it meets in the microbatch's own slices.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.slices import CachedSlice, LocalSlice
from prefixflow.ranges import Range


class ContextKV(enum.Enum):
    """Where K/V of a microbatch are: whole on each context-parallel rank, or sharded and passed round (`plan.ring`)."""

    GATHER = "gather"
    RING = "ring"


@dataclass(frozen=True, slots=True)
class ContextShard:
    """The positions of a microbatch that one context-parallel rank holds: `held`, disjoint and ascending."""

    held: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.held))

    @property
    def index(self) -> np.ndarray:
        """Place in the microbatch of each position held, [T/cp] int64, ascending."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(r.start, r.stop) for r in self.held)])

    def own(self, flat: Range) -> Range:
        """What the rank holds of a range of the microbatch, counted among the positions that it holds."""
        return Range(self._num_before(flat.start), self._num_before(flat.stop))

    def local_slices(self, slices: Sequence[LocalSlice]) -> tuple[LocalSlice, ...]:
        """This rank's part of `slices`; queries are its own, keys are those of the microbatch."""
        taken: list[LocalSlice] = []
        for piece in slices:
            if piece.causal:
                taken += self._causal(piece.queries)
            elif len(own := self.own(piece.queries)):
                taken.append(replace(piece, queries=own))
        return tuple(taken)

    def cached_slices(self, slices: Sequence[CachedSlice]) -> tuple[CachedSlice, ...]:
        """This rank's part of `slices`."""
        own = (replace(piece, queries=self.own(piece.queries)) for piece in slices)
        return tuple(piece for piece in own if len(piece.queries))

    def held_in(self, run: Range) -> list[Range]:
        """The runs of positions within `run`, a range of the microbatch, that the rank holds."""
        cut = (Range(max(r.start, run.start), max(min(r.stop, run.stop), r.start, run.start)) for r in self.held)
        return [chunk for chunk in cut if len(chunk)]

    def _causal(self, run: Range) -> list[LocalSlice]:
        taken: list[LocalSlice] = []
        for chunk in self.held_in(run):
            queries = self.own(chunk)
            taken.append(LocalSlice(queries, chunk, causal=True))
            if chunk.start > run.start:
                taken.append(LocalSlice(queries, Range(run.start, chunk.start), causal=False))
        return taken

    def _num_before(self, flat: int) -> int:
        return sum(min(max(flat - r.start, 0), len(r)) for r in self.held)


def context_shards(microbatch: Microbatch, size: int) -> tuple[ContextShard, ...]:
    """The shards of `microbatch` on `size` context-parallel ranks, by rank.

    `microbatch.num_physical_tokens` must be a multiple of `size` (`ParallelLayout.token_multiple`).
    """
    num_physical = microbatch.num_physical_tokens
    assert num_physical % size == 0, f"microbatch of {num_physical} tokens on {size} context-parallel ranks"
    held: list[list[Range]] = [[] for _ in range(size)]
    offset = 0
    for span in microbatch.spans:
        assert span.start == offset, f"segments of microbatch {microbatch.id} leave out token {offset}"
        for rank, chunk in _chunks(span, size, first=offset % size):
            _append(held[rank], chunk)
        offset = span.stop
    for ranges in held:
        missing = num_physical // size - sum(map(len, ranges))
        _append(ranges, Range(offset, offset + missing))
        offset += missing
    assert offset == num_physical, f"{offset} of {num_physical} positions are held"
    return tuple(ContextShard(tuple(ranges)) for ranges in held)


def _chunks(span: Range, size: int, first: int) -> list[tuple[int, Range]]:
    """(rank, chunk) in the order of `span`; ranks `first`, `first` + 1, ... hold one token more where it does not divide."""
    shares = [len(span) // size + ((rank - first) % size < len(span) % size) for rank in range(size)]
    cuts = [(rank, (shares[rank] + 1) // 2) for rank in range(size)]
    cuts += [(rank, shares[rank] // 2) for rank in reversed(range(size))]
    chunks, start = [], span.start
    for rank, length in cuts:
        chunks.append((rank, Range(start, start + length)))
        start += length
    return chunks


def _append(ranges: list[Range], new: Range) -> None:
    """Append a range, joining adjacent ones."""
    if ranges and ranges[-1].joins(new):
        ranges[-1] = Range(ranges[-1].start, new.stop)
    elif len(new):
        ranges.append(new)


@dataclass(frozen=True, slots=True)
class KVTraffic:
    """What moving own K/V costs, whatever later microbatches read them. Bytes of one position, summed over layers.

    gathered_bytes: its K and V, in a forward. regathered_bytes: the same, over the layers whose backward runs attention again;
    written segments are in the cache then and are not moved. reduced_bytes: its gK and gV, in the precision of
    gradient sums; 0 without a backward.
    """

    gathered_bytes: int
    regathered_bytes: int
    reduced_bytes: int

    def num_bytes(self, microbatches: Sequence[Microbatch], size: int, *, reads_own: bool = True) -> int:
        """Bytes that each of `size` context-parallel ranks receives, over all microbatches.

        reads_own: a recomputation takes what a microbatch wrote from the cache.
        """
        total = 0
        for m in microbatches:
            total += m.num_physical_tokens // size * (self.gathered_bytes + self.reduced_bytes)
            if self.regathered_bytes:
                again = num_regathered(m, size) if reads_own else m.num_physical_tokens // size
                total += again * self.regathered_bytes
        return total * (size - 1)


def num_regathered(microbatch: Microbatch, size: int) -> int:
    """Positions that each rank sends where K/V of all but written segments are gathered: as many as any rank holds."""
    if not microbatch.writes:
        return microbatch.num_physical_tokens // size
    written = [microbatch.span_of(segment) for segment in microbatch.writes]
    shards = context_shards(microbatch, size)
    return max(shard.num_tokens - sum(len(shard.own(span)) for span in written) for shard in shards)
