"""Cut segments longer or costlier than a microbatch may be into chains of equal-cost pieces (psRL's self-sequence sharing)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefixflow.forest.forest import Forest, renumber
from prefixflow.plan.cost import Costs
from prefixflow.ranges import Range


def chunk_segments(
    forest: Forest,
    max_tokens: int,
    cost: Costs,
    *,
    rows: Sequence[float] | None = None,
    max_cost: float = math.inf,
) -> Forest:
    """The same forest with no segment longer than `max_tokens`; pieces of a segment form a chain.

    rows: head rows of each segment, none by default; max_cost: of a piece, rounding and uneven rows aside.
    """
    if max_cost == math.inf and all(len(segment) <= max_tokens for segment in forest.segments):
        return forest
    rows = rows or [0] * len(forest.segments)
    pieces: list[tuple[int | None, int, Range, tuple[int, ...]]] = []
    last_piece: list[int] = []
    for segment, num_rows in zip(forest.segments, rows, strict=True):
        parent = None if segment.parent is None else last_piece[segment.parent]
        for piece in cost.equal_cost_cuts(segment.span, max_tokens, num_rows=num_rows, max_cost=max_cost):
            pieces.append((parent, segment.tree, piece, segment.members))
            parent = len(pieces) - 1
        assert parent is not None
        last_piece.append(parent)
    return Forest(renumber(pieces), forest.num_trees, forest.lengths, forest.omitted)
