"""Line up the trees of data-parallel ranks that exchange tokens.

Such ranks run one table, built from what their m-th microbatches read between them (`prefixflow.schedule.search.block_reads`).
Where trees of two ranks overlap without beginning together, their readers are joined, and so on through the step: every
prefix would wait for the last tree. So trees stand in rounds that begin at the same place on all ranks.

Strategy
1. A round takes trees of each rank, largest first, up to a number of microbatches; dummies fill what a rank lacks. The number is
   a multiple of the largest tree that any rank has left.
2. Short rounds keep few microbatches alive, long ones need fewer dummies. The shortest are taken that make the step at most
   `MAX_STRETCH` longer than the longest rank is by itself.

Invariants
1. A tree's microbatches stay together and in order; every place holds at most one microbatch of a rank.
2. No reads cross a round, on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from prefixflow.plan.microbatch import Microbatch

MAX_STRETCH = 1.05


def aligned_places(ranks: Sequence[Sequence[Microbatch]]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Place of each microbatch of each rank, and the number of places; a rank by itself keeps its order."""
    if len(ranks) == 1:
        return (tuple(range(len(ranks[0]))),), len(ranks[0])
    trees = [_trees(microbatches) for microbatches in ranks]
    longest_rank = max(map(len, ranks), default=0)
    multiple = 1
    while True:
        places, count = _in_rounds(trees, multiple)
        if count <= MAX_STRETCH * longest_rank:
            return places, count
        multiple *= 2


def _trees(microbatches: Sequence[Microbatch]) -> list[range]:
    starts = [m.id for m in microbatches if m.parent is None]
    return [range(start, stop) for start, stop in pairwise([*starts, len(microbatches)])]


def _in_rounds(trees: Sequence[Sequence[range]], multiple: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    left = [sorted(of_rank, key=len, reverse=True) for of_rank in trees]
    places: list[dict[int, int]] = [{} for _ in trees]
    start = 0
    while any(left):
        limit = start + multiple * max(len(of_rank[0]) for of_rank in left if of_rank)
        stops = [_fill_round(of_rank, start, limit, place) for of_rank, place in zip(left, places, strict=True)]
        start = max(stops)
    return tuple(tuple(place[m] for m in range(len(place))) for place in places), start


def _fill_round(left: list[range], start: int, limit: int, places: dict[int, int]) -> int:
    """Take the largest trees of one rank that fit, out of `left`; returns where they end."""
    kept = []
    for tree in left:
        if start + len(tree) > limit:
            kept.append(tree)
            continue
        places.update((m, start + i) for i, m in enumerate(tree))
        start += len(tree)
    left[:] = kept
    return start
