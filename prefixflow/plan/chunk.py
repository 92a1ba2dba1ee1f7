"""Cut segments longer than the token budget into chains of equal-cost pieces (psRL's self-sequence sharing)."""

from __future__ import annotations

from prefixflow.forest.forest import Forest, renumber
from prefixflow.plan.cost import Costs
from prefixflow.ranges import Range


def chunk_segments(forest: Forest, max_tokens: int, cost: Costs) -> Forest:
    """The same forest with no segment longer than `max_tokens`; pieces of a segment form a chain."""
    if all(len(segment) <= max_tokens for segment in forest.segments):
        return forest
    rows: list[tuple[int | None, int, Range, tuple[int, ...]]] = []
    last_piece: list[int] = []
    for segment in forest.segments:
        parent = None if segment.parent is None else last_piece[segment.parent]
        for piece in cost.equal_cost_cuts(segment.span, max_tokens):
            rows.append((parent, segment.tree, piece, segment.members))
            parent = len(rows) - 1
        assert parent is not None
        last_piece.append(parent)
    return Forest(renumber(rows), forest.num_trees, forest.lengths, forest.omitted)
