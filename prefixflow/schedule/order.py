"""Orders of the microbatch graph: what must have run before what.

Rules: F(m) needs F of every microbatch that m reads; B(m) needs B of every microbatch that reads m. Forward order is
the microbatch id (a depth-first pre-order). Backward order: repeatedly take, among the microbatches whose readers are
all done, the earliest in forward order; on a tree this is post-order with children in forward order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def backward_order(reads: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Microbatch ids in backward order; `reads[m]` are the microbatches that m reads (all smaller than m)."""
    num_open_readers = [0] * len(reads)
    for reader, read_ones in enumerate(reads):
        for m in read_ones:
            assert m < reader, f"microbatch {reader} reads {m}, which runs later"
            num_open_readers[m] += 1
    ready = [m for m, count in enumerate(num_open_readers) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        m = heapq.heappop(ready)
        order.append(m)
        for read in reads[m]:
            num_open_readers[read] -= 1
            if num_open_readers[read] == 0:
                heapq.heappush(ready, read)
    return tuple(order)


def forwards_needed(order: Sequence[int]) -> tuple[int, ...]:
    """`need[k]`: number of forwards that must have run before the k-th (from 0) backward of `order` can."""
    need: list[int] = []
    for m in order:
        need.append(max(m + 1, need[-1] if need else 0))
    return tuple(need)


def lead(need: Sequence[int]) -> int:
    """W = max_k(need_k - k + 1), k from 1: most microbatches alive at once on the last stage."""
    return max((n - k for k, n in enumerate(need)), default=0)
