"""What one operation has to do, in counts: what costs are multiplied with, and what a calibration fits times to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixflow.forest.forest import Forest
from prefixflow.plan.cost import Rates, attended_pairs
from prefixflow.plan.microbatch import Microbatch


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of a whole microbatch.

    pairs: query-key pairs that are attended to. rows: LM-head rows. slices: calls of the attention kernel in a layer.
    merged: queries of the slices that are merged into others, a query once for each.
    """

    tokens: int
    pairs: float
    rows: int
    slices: int
    merged: int

    @classmethod
    def of(cls, forest: Forest, microbatch: Microbatch, rows: Sequence[int]) -> Work:
        """`rows[i]` head rows in segment i."""
        spans = [forest.segments[s].span for s in microbatch.segments]
        joined = [piece.queries for piece in microbatch.local if not piece.causal]
        joined += [piece.queries for piece in microbatch.cached]
        return cls(
            tokens=sum(map(len, spans)),
            pairs=sum(map(attended_pairs, spans)),
            rows=sum(rows[s] for s in microbatch.segments),
            slices=len(microbatch.local) + len(microbatch.cached),
            merged=sum(map(len, joined)),
        )

    def body_cost(self, rates: Rates) -> float:
        """Cost of the decoder's layers, without the operation's own."""
        return (
            rates.token * self.tokens + rates.pair * self.pairs + rates.slice * self.slices + rates.merge * self.merged
        )
