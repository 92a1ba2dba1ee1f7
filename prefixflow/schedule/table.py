"""The table of operations: one row per pipeline rank, in execution order.

With p ranks and v model chunks a rank, global stage g lives on rank g % p. A rank runs *virtual* operations, one per
(chunk, microbatch). Their orders are Megatron's: forward in blocks of p microbatches, chunk by chunk; backward in blocks
of p over the backward order, chunks reversed. With v = 1 the blocks change nothing.

Lead rule. `need_k` virtual forwards must have run before the k-th virtual backward can. The last rank runs N(k) forwards
before its k-th backward, N non-decreasing and N(k) >= need_k. Rank r, e = p - 1 - r before the last, runs
max(N(k) + e, N(k + e)) of the n forwards: it gets its k-th gradient when the last rank is at backward k + e, and must by
then have sent what that one needs. Where N grows by one a backward, both are the same. For v > 1 it runs N(k) + 2e. Any
such N is free of deadlock: a rank has run at least the forwards that the next one needs before it waits. At most
max_k(N(k) - k + 1) + e microbatches are alive on a rank.

* lazy:     N(k) = need_k. At p = 1, where a lead buys nothing.
* constant: N(k) = k - 1 + W, W = max_k(need_k - k + 1). For a flat list this is Megatron's 1F1B, and for v > 1 its
  interleaved order.
* windowed: N(k) = k - 1 + max over the next `window` backwards of (need_j - j + 1).

A loss that is formed from several microbatches together (`prefixflow.plan.plan.Plan.joint`) adds to what a backward needs:
the last stage must have run the first `after[m]` microbatches forward before B(m), which raises need and with it every N.

Ranks that exchange tokens (expert parallelism) run one table: their m-th microbatches meet in F and must meet again in B.
It is built from what these read between them, and the ranks fill up with dummy microbatches
(`prefixflow.schedule.search.rank_table`).

Invariants (`validate`)
1. Every microbatch of the list has one F, and (when training) one B, on every stage; a stage stands on one rank.
2. F(m) follows F of what m reads; B(m) follows its own F, F of the first `after[m]` microbatches and B of everything that
   reads m.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from prefixflow.schedule.ops import Kind, Op, backward, forward
from prefixflow.schedule.order import backward_order

SMALLEST_WINDOW = 2
"""Backwards ahead: with the next one in sight, a rank begins the next group before it ends the last one."""
SHOWN_BEFORE, SHOWN_AFTER = 6, 4
"""Operations that an error shows around the one that it names."""


class LeadPolicy(enum.Enum):
    LAZY = "lazy"
    CONSTANT = "constant"
    WINDOWED = "windowed"


@dataclass(frozen=True, slots=True)
class OpTable:
    """`rows[r]` are the operations of pipeline rank r; `reads[m]` the microbatches that m reads; `after[m]` how many
    microbatches must have run forward before B(m), empty where the reads say it all."""

    rows: tuple[tuple[Op, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    after: tuple[int, ...] = ()

    def to_csv(self) -> str:
        """One line per rank, operations separated by commas."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    @classmethod
    def from_csv(cls, text: str, reads: Sequence[Sequence[int]], after: Sequence[int] = ()) -> OpTable:
        """Inverse of `to_csv`; the graph does not stand in the text."""
        rows = tuple(tuple(Op.parse(cell) for cell in line.split(",") if cell) for line in text.splitlines())
        return cls(rows, tuple(tuple(r) for r in reads), tuple(after))


def build_table(
    reads: Sequence[Sequence[int]],
    *,
    num_ranks: int = 1,
    num_chunks: int = 1,
    policy: LeadPolicy | None = None,
    window: int | None = None,
    after: Sequence[int] = (),
) -> OpTable:
    """Training table of `num_ranks` pipeline ranks with `num_chunks` model chunks each.

    after: of each microbatch, how many must have run forward on the last stage before its backward; empty for none.

    Default policy: lazy for one rank, else windowed over the next 3p/4 backwards (at least 2), 3pv with v > 1 chunks. Raises
    ValueError when several chunks are asked for and the number of microbatches is not a multiple of `num_ranks`.
    """
    orders = _virtual_orders(reads, num_ranks, num_chunks, after)
    policy = policy or (LeadPolicy.LAZY if num_ranks == 1 else LeadPolicy.WINDOWED)
    if num_chunks == 1:
        num_forwards = _forwards_before(orders.need, policy, window or max(SMALLEST_WINDOW, 3 * num_ranks // 4))
        ahead = [_later(num_forwards, num_ranks - 1 - rank) for rank in range(num_ranks)]
    else:
        # The first rank waits for the last one between chunks, so the lead must neither shrink nor be skewed.
        num_forwards = _forwards_before(orders.need, policy, window or 3 * num_ranks * num_chunks, slope=1)
        ahead = [[n + 2 * (num_ranks - 1 - rank) for n in num_forwards] for rank in range(num_ranks)]
    rows = tuple(_row(rank, num_ranks, orders, counts) for rank, counts in enumerate(ahead))
    return OpTable(rows, tuple(tuple(r) for r in reads), tuple(after))


def build_forward_table(reads: Sequence[Sequence[int]], *, num_ranks: int = 1, num_chunks: int = 1) -> OpTable:
    """Forward-only table (old-policy and reference passes): the virtual forward order on every rank."""
    orders = _virtual_orders(reads, num_ranks, num_chunks)
    rows = tuple(
        tuple(forward(m, chunk * num_ranks + rank) for chunk, m in orders.forward) for rank in range(num_ranks)
    )
    return OpTable(rows, tuple(tuple(r) for r in reads))


def last_backwards(row: Sequence[Op]) -> dict[int, Op]:
    """Stage to its last B in `row`: from there on this rank no longer touches the gradients of that model chunk."""
    return {op.stage: op for op in row if op.kind is Kind.BACKWARD}


@dataclass(frozen=True, slots=True)
class _VirtualOrders:
    """(chunk, microbatch) of a rank's forwards and backwards in order, and `need` of each backward.

    after: of each microbatch, virtual forwards that must have run before any of its backwards; empty for none.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    after: tuple[int, ...] = ()

    @property
    def need(self) -> tuple[int, ...]:
        place = {virtual: index for index, virtual in enumerate(self.forward)}
        needed = (max(place[chunk, m] + 1, self.after[m] if self.after else 0) for chunk, m in self.backward)
        return tuple(accumulate(needed, max))


def _virtual_orders(
    reads: Sequence[Sequence[int]], num_ranks: int, num_chunks: int, after: Sequence[int] = ()
) -> _VirtualOrders:
    if num_chunks > 1 and len(reads) % num_ranks:
        raise ValueError(
            f"Interleaved stages run microbatches in blocks of {num_ranks}, got {len(reads)} of them; pad the plan with "
            "dummy microbatches to a multiple."
        )
    chunks = range(num_chunks)
    order = _in_blocks(range(len(reads)), num_ranks, chunks)
    # The last chunk is the one with the loss.
    scored = [0, *(place + 1 for place, (chunk, _) in enumerate(order) if chunk == chunks[-1])]
    return _VirtualOrders(
        order,
        _in_blocks(backward_order(reads, after), num_ranks, chunks[::-1]),
        tuple(scored[count] for count in after),
    )


def _in_blocks(order: Sequence[int], size: int, chunks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    blocks = [order[start : start + size] for start in range(0, len(order), size)]
    return tuple((chunk, m) for block in blocks for chunk in chunks for m in block)


def _forwards_before(need: Sequence[int], policy: LeadPolicy, window: int, slope: int = 0) -> list[int]:
    """N(k) on the last rank for each backward k (from 0), growing by at least `slope`."""
    if policy is LeadPolicy.LAZY:
        return list(need)
    excess = [n - k for k, n in enumerate(need)]
    largest = max(excess, default=0)
    counts: list[int] = []
    for k in range(len(need)):
        ahead = largest if policy is LeadPolicy.CONSTANT else max(excess[k : k + window])
        counts.append(max(k + ahead, counts[-1] + slope if counts else 0))
    return counts


def _later(num_forwards: Sequence[int], extra: int) -> list[int]:
    """N of a rank that stands `extra` before the last: as many forwards ahead, and those of `extra` backwards later."""
    last = len(num_forwards) - 1
    return [max(n + extra, num_forwards[min(k + extra, last)]) for k, n in enumerate(num_forwards)]


def _row(rank: int, num_ranks: int, orders: _VirtualOrders, num_forwards: Sequence[int]) -> tuple[Op, ...]:
    row: list[Op] = []
    next_forward = 0
    for (chunk, m), count in zip(orders.backward, num_forwards, strict=True):
        while next_forward < min(count, len(orders.forward)):
            forward_chunk, forward_m = orders.forward[next_forward]
            row.append(forward(forward_m, forward_chunk * num_ranks + rank))
            next_forward += 1
        row.append(backward(m, chunk * num_ranks + rank))
    return tuple(row)


def validate(table: OpTable, *, training: bool = True) -> None:
    """Raise ValueError, with the row drawn and an arrow at the bad cell, when an order rule is broken."""
    num_microbatches = len(table.reads)
    readers: list[set[int]] = [set() for _ in table.reads]
    for reader, read in enumerate(table.reads):
        for m in read:
            readers[m].add(reader)
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(table.rows):
        done: set[Op] = set()
        for place, op in enumerate(row):
            if op.microbatch >= num_microbatches:
                raise _bad(row, rank, place, f"there are only {num_microbatches} microbatches")
            if op in done:
                raise _bad(row, rank, place, "it has run already")
            missing = _missing(op, done, table, readers)
            if missing:
                raise _bad(row, rank, place, f"it needs {', '.join(map(str, missing))} before it")
            done.add(op)
        stages = {op.stage for op in row} or {rank}
        for stage in stages:
            if stage in rank_of:
                raise ValueError(f"Rank {rank}: stage {stage} stands on rank {rank_of[stage]} too.")
            rank_of[stage] = rank
        kinds = (Kind.FORWARD, Kind.BACKWARD) if training else (Kind.FORWARD,)
        expected = {Op(s, k, m) for s in stages for k in kinds for m in range(num_microbatches)}
        if done != expected:
            lost = ", ".join(map(str, sorted(expected ^ done, key=str)[:8]))
            raise ValueError(f"Rank {rank}: the table misses or must not have {lost}.")


def _missing(op: Op, done: set[Op], table: OpTable, readers: Sequence[set[int]]) -> list[Op]:
    if op.kind is Kind.FORWARD:
        needed = [forward(m, op.stage) for m in table.reads[op.microbatch]]
    else:
        needed = [forward(op.microbatch, op.stage)]
        if table.after:
            # On the stage with the loss by the rule, on the others because it would wait for ever.
            needed += [forward(m, op.stage) for m in range(table.after[op.microbatch])]
        needed += [backward(m, op.stage) for m in sorted(readers[op.microbatch])]
    return [n for n in needed if n not in done]


def surroundings(table: OpTable, rank: int, place: int) -> str:
    """One line a rank: the operations around number `place` of `rank`, and around the same microbatch on the others."""
    wanted = table.rows[rank][place]
    lines = []
    for other, row in enumerate(table.rows):
        matches = [i for i, op in enumerate(row) if (op.kind, op.microbatch) == (wanted.kind, wanted.microbatch)]
        at = place if other == rank else next(iter(matches), 0)
        before = " ".join(map(str, row[max(0, at - SHOWN_BEFORE) : at]))
        after = " ".join(map(str, row[at + 1 : at + 1 + SHOWN_AFTER]))
        marked = f">{row[at]}<" if other == rank else f"[{row[at]}]"
        lines.append(f"  pipeline rank {other}: {before} {marked} {after}".rstrip())
    return "\n".join(lines)


def _bad(row: Sequence[Op], rank: int, place: int, reason: str) -> ValueError:
    shown = row[max(0, place - SHOWN_BEFORE) : place + SHOWN_AFTER]
    before = " ".join(map(str, row[max(0, place - SHOWN_BEFORE) : place]))
    arrow = " " * (len(before) + bool(before)) + "^" * len(str(row[place]))
    return ValueError(
        f"Rank {rank}, operation {place}: {row[place]} cannot run here, {reason}.\n{' '.join(map(str, shown))}\n{arrow}"
    )
