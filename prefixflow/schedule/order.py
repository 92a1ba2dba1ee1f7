"""Orders of the microbatch graph: what must have run before what.

Rules: F(m) needs F of every microbatch that m reads; B(m) needs B of every microbatch that reads m, and the first `after[m]`
forwards where its loss is known no sooner. Forward order is the microbatch id (a depth-first pre-order). Backward order:
repeatedly take, among the microbatches whose readers are all done, the one that needs fewest forwards, the earliest in
forward order among equals. So no other order needs fewer forwards before any of its backwards. Without `after`, on a tree,
this is post-order with children in forward order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate


def backward_order(reads: Sequence[Sequence[int]], after: Sequence[int] = ()) -> tuple[int, ...]:
    """Microbatch ids in backward order; `reads[m]` are the microbatches that m reads (all smaller than m).

    after: of each microbatch, how many forwards must have run before its backward, beyond what the reads ask; empty for none.
    """
    needed = _needed_by_each(range(len(reads)), after)
    num_open_readers = [0] * len(reads)
    for reader, read_ones in enumerate(reads):
        for m in read_ones:
            assert m < reader, f"microbatch {reader} reads {m}, which runs later"
            num_open_readers[m] += 1
    ready = [(needed[m], m) for m, count in enumerate(num_open_readers) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, m = heapq.heappop(ready)
        order.append(m)
        for read in reads[m]:
            num_open_readers[read] -= 1
            if num_open_readers[read] == 0:
                heapq.heappush(ready, (needed[read], read))
    return tuple(order)


def forwards_needed(order: Sequence[int], after: Sequence[int] = ()) -> tuple[int, ...]:
    """`need[k]`: number of forwards that must have run before the k-th (from 0) backward of `order` can."""
    return tuple(accumulate(_needed_by_each(order, after), max))


def _needed_by_each(microbatches: Sequence[int], after: Sequence[int]) -> list[int]:
    return [max(m + 1, after[m] if after else 0) for m in microbatches]


def lead(need: Sequence[int]) -> int:
    """W = max_k(need_k - k + 1), k from 1: most microbatches alive at once on the last stage."""
    return max((n - k for k, n in enumerate(need)), default=0)
