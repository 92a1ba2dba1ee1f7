"""Predicted work of operations and stages, and what a pipeline makes of it.

The body is spread evenly over the global stages; the LM head weighs on the last one, on scored rows only. One operation
costs its work and a fixed overhead, so that cutting ever finer does not look free. The unit is that of the costs: FLOPs, or
seconds of a calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixflow.forest.forest import Forest
from prefixflow.plan.cost import Costs
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.work import Work
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.simulate import Timeline, simulate
from prefixflow.schedule.table import OpTable


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of the microbatches of one data-parallel rank on the stages of its pipeline.

    body, head: of each microbatch's forward, over all stages; body_backward, head_backward likewise. overhead,
    overhead_backward: of an operation on one stage.
    """

    num_stages: int
    overhead: float
    overhead_backward: float
    body: tuple[float, ...]
    body_backward: tuple[float, ...]
    head: tuple[float, ...]
    head_backward: tuple[float, ...]

    @classmethod
    def of(
        cls,
        forest: Forest,
        microbatches: Sequence[Microbatch],
        rows: Sequence[int],
        cost: Costs,
        num_stages: int,
    ) -> StageCosts:
        """`rows[i]` head rows in segment i."""
        forward, backward = cost.forward, cost.backward
        works = [Work.of(forest, m, rows) for m in microbatches]
        return cls(
            num_stages=num_stages,
            overhead=forward.operation / num_stages,
            overhead_backward=backward.operation / num_stages,
            body=tuple(work.body_cost(forward) for work in works),
            body_backward=tuple(work.body_cost(backward) for work in works),
            head=tuple(forward.row * work.rows for work in works),
            head_backward=tuple(backward.row * work.rows for work in works),
        )

    def of_operation(self, op: Op) -> float:
        """Cost of an operation, its overhead included."""
        is_forward = op.kind is Kind.FORWARD
        body, head = (self.body, self.head) if is_forward else (self.body_backward, self.head_backward)
        overhead = self.overhead if is_forward else self.overhead_backward
        is_last = op.stage == self.num_stages - 1
        return body[op.microbatch] / self.num_stages + (head[op.microbatch] if is_last else 0.0) + overhead

    def microbatch_costs(self) -> tuple[float, ...]:
        """F and B of each microbatch on the stage that it costs most, overhead included."""
        kinds, stages = (Kind.FORWARD, Kind.BACKWARD), range(self.num_stages)
        return tuple(
            max(sum(self.of_operation(Op(stage, kind, m)) for kind in kinds) for stage in stages)
            for m in range(len(self.body))
        )

    def bottleneck(self, num_ranks: int) -> float:
        """Cost of the busiest pipeline rank, without overhead or bubble: the last, which has the head."""
        body = sum(self.body) + sum(self.body_backward)
        return body / num_ranks + sum(self.head) + sum(self.head_backward)

    def timeline(self, table: OpTable) -> Timeline:
        return simulate(table, self.of_operation)
