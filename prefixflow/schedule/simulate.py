"""Simulate a table of operations: when does each start and end, given how long it takes.

Rules: a rank runs its row in order, one operation at a time. F on stage s waits for F of the same microbatch on stage
s - 1, B on stage s for B on stage s + 1; messages take no time. A table that deadlocks is an error that names the
operations every rank is stuck at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.table import OpTable


@dataclass(frozen=True, slots=True)
class Timeline:
    """`spans[rank]` are (operation, start, end) in order, in the unit of the durations."""

    spans: tuple[tuple[tuple[Op, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        return max((row[-1][2] for row in self.spans if row), default=0.0)

    @property
    def efficiency(self) -> float:
        """Share of the ranks' time that is busy: 1 without a bubble."""
        busy = sum(end - start for row in self.spans for _, start, end in row)
        return busy / (self.makespan * len(self.spans)) if self.makespan else 1.0


def simulate(table: OpTable, duration: Callable[[Op], float]) -> Timeline:
    """Run `table`; raises ValueError naming where the ranks are stuck if it cannot finish."""
    num_stages = 1 + max((op.stage for row in table.rows for op in row), default=0)
    # By stage and microbatch: quicker to look up than operations.
    forwards: dict[tuple[int, int], float] = {}
    backwards: dict[tuple[int, int], float] = {}
    spans: list[list[tuple[Op, float, float]]] = [[] for _ in table.rows]
    free_at = [0.0] * len(table.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.rows):
            while len(spans[rank]) < len(row):
                op = row[len(spans[rank])]
                is_forward = op.kind is Kind.FORWARD
                of_kind = forwards if is_forward else backwards
                before = op.stage - 1 if is_forward else op.stage + 1
                # Of the neighbouring stage that sends what `op` needs, if there is one.
                arrives = of_kind.get((before, op.microbatch)) if 0 <= before < num_stages else 0.0
                if arrives is None:
                    break
                start = max(free_at[rank], arrives)
                end = start + duration(op)
                of_kind[op.stage, op.microbatch] = free_at[rank] = end
                spans[rank].append((op, start, end))
                moved = True
    stuck = {rank: str(row[len(spans[rank])]) for rank, row in enumerate(table.rows) if len(spans[rank]) < len(row)}
    if stuck:
        raise ValueError(f"The table deadlocks: ranks wait for ever before {stuck}.")
    return Timeline(tuple(tuple(row) for row in spans))
