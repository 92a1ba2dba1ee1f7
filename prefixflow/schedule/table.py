"""The table of operations: one row per pipeline rank, in execution order.

Lead rule. `need_k` forwards must have run before the k-th backward can. The last stage runs N(k) forwards before its
k-th backward, N non-decreasing and N(k) >= need_k; stage s of p runs min(n, N(k) + p - 1 - s). Any such N is free of
deadlock: stage s has run exactly the forwards that s + 1 needs before it waits.

* lazy:     N(k) = need_k. At p = 1, where a lead buys nothing.
* constant: N(k) = k - 1 + W, W = max_k(need_k - k + 1). For a flat list (W = 1) this is Megatron's 1F1B.
* windowed: N(k) = k - 1 + max over the next `window` backwards of (need_j - j + 1).

Invariants (`validate`)
1. Every microbatch of the list has one F, and (when training) one B, on every stage, and every stage is on one rank.
2. F(m) follows F of what m reads; B(m) follows its own F and B of everything that reads m.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from prefixflow.schedule.ops import Kind, Op, backward, forward
from prefixflow.schedule.order import backward_order, forwards_needed


class LeadPolicy(enum.Enum):
    LAZY = "lazy"
    CONSTANT = "constant"
    WINDOWED = "windowed"


@dataclass(frozen=True, slots=True)
class OpTable:
    """`rows[r]` are the operations of pipeline rank r; `reads[m]` the microbatches that m reads."""

    rows: tuple[tuple[Op, ...], ...]
    reads: tuple[tuple[int, ...], ...]

    def to_csv(self) -> str:
        """One line per rank, operations separated by commas."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    @classmethod
    def from_csv(cls, text: str, reads: Sequence[Sequence[int]]) -> OpTable:
        """Inverse of `to_csv`; the graph does not stand in the text."""
        rows = tuple(tuple(Op.parse(cell) for cell in line.split(",") if cell) for line in text.splitlines())
        return cls(rows, tuple(tuple(r) for r in reads))


def build_table(
    reads: Sequence[Sequence[int]],
    *,
    num_stages: int = 1,
    policy: LeadPolicy | None = None,
    window: int | None = None,
) -> OpTable:
    """Training table; default policy: lazy for one stage, else windowed over the next 3p backwards."""
    order = backward_order(reads)
    need = forwards_needed(order)
    policy = policy or (LeadPolicy.LAZY if num_stages == 1 else LeadPolicy.WINDOWED)
    num_forwards = _forwards_before(need, policy, window or 3 * num_stages)
    rows = tuple(_row(stage, order, [n + num_stages - 1 - stage for n in num_forwards]) for stage in range(num_stages))
    return OpTable(rows, tuple(tuple(r) for r in reads))


def build_forward_table(reads: Sequence[Sequence[int]], *, num_stages: int = 1) -> OpTable:
    """Forward-only table (old-policy and reference passes): forward order on every stage."""
    rows = tuple(tuple(forward(m, stage) for m in range(len(reads))) for stage in range(num_stages))
    return OpTable(rows, tuple(tuple(r) for r in reads))


def _forwards_before(need: Sequence[int], policy: LeadPolicy, window: int) -> list[int]:
    """N(k) on the last stage for each backward k (from 0)."""
    if policy is LeadPolicy.LAZY:
        return list(need)
    if policy is LeadPolicy.CONSTANT:
        window = len(need)
    excess = [n - k for k, n in enumerate(need)]
    counts: list[int] = []
    for k in range(len(need)):
        start = 0 if policy is LeadPolicy.CONSTANT else k
        wanted = k + max(excess[start : start + max(window, 1)])
        counts.append(max(wanted, counts[-1] if counts else 0))
    return counts


def _row(stage: int, order: Sequence[int], num_forwards: Sequence[int]) -> tuple[Op, ...]:
    row: list[Op] = []
    next_forward = 0
    for m, count in zip(order, num_forwards, strict=True):
        while next_forward < min(count, len(order)):
            row.append(forward(next_forward, stage))
            next_forward += 1
        row.append(backward(m, stage))
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
            missing = _missing(op, done, table.reads, readers)
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


def _missing(op: Op, done: set[Op], reads: Sequence[Sequence[int]], readers: Sequence[set[int]]) -> list[Op]:
    if op.kind is Kind.FORWARD:
        needed = [forward(m, op.stage) for m in reads[op.microbatch]]
    else:
        needed = [forward(op.microbatch, op.stage)]
        needed += [backward(m, op.stage) for m in sorted(readers[op.microbatch])]
    return [n for n in needed if n not in done]


def _bad(row: Sequence[Op], rank: int, place: int, reason: str) -> ValueError:
    shown = row[max(0, place - 6) : place + 4]
    before = " ".join(map(str, row[max(0, place - 6) : place]))
    arrow = " " * (len(before) + bool(before)) + "^" * len(str(row[place]))
    return ValueError(
        f"Rank {rank}, operation {place}: {row[place]} cannot run here, {reason}.\n{' '.join(map(str, shown))}\n{arrow}"
    )
