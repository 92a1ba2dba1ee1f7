"""Place trees on data-parallel ranks: largest first, each to the least loaded rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def place_trees(loads: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Tree ids per rank, each in ascending order; `loads[i]` is the predicted cost of tree i.

    Every tree has a home, those without work too; a rank may be left without any.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for tree in sorted(range(len(loads)), key=lambda t: (-loads[t], t)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(tree)
        heapq.heappush(heap, (load + loads[tree], rank))
    return tuple(tuple(sorted(trees)) for trees in ranks)
