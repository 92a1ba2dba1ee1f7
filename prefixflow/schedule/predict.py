"""Predicted work of operations and stages, and what a pipeline makes of it.

The body is spread over the global stages by their layers; the LM head weighs on the last one, on scored rows only. One operation
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

    layers: layers of each stage. body, head: of each microbatch's forward, over all stages; body_backward, head_backward likewise. overhead,
    overhead_backward: of an operation on one stage.
    """

    layers: tuple[int, ...]
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
        layers: Sequence[int],
    ) -> StageCosts:
        """`rows[i]` head rows in segment i; `layers[g]` layers of stage g, or any numbers in their ratio."""
        forward, backward = cost.forward, cost.backward
        works = [Work.of(forest, m, rows) for m in microbatches]
        return cls(
            layers=tuple(layers),
            overhead=forward.operation / len(layers),
            overhead_backward=backward.operation / len(layers),
            body=tuple(work.body_cost(forward) for work in works),
            body_backward=tuple(work.body_cost(backward) for work in works),
            head=tuple(forward.row * work.rows for work in works),
            head_backward=tuple(backward.row * work.rows for work in works),
        )

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def of_operation(self, op: Op) -> float:
        """Cost of an operation, its overhead included."""
        is_forward = op.kind is Kind.FORWARD
        body, head = (self.body, self.head) if is_forward else (self.body_backward, self.head_backward)
        overhead = self.overhead if is_forward else self.overhead_backward
        is_last = op.stage == self.num_stages - 1
        share = self.layers[op.stage] / sum(self.layers)
        return share * body[op.microbatch] + (head[op.microbatch] if is_last else 0.0) + overhead

    def microbatch_costs(self) -> tuple[float, ...]:
        """F and B of each microbatch on the stage that it costs most, overhead included."""
        kinds, stages = (Kind.FORWARD, Kind.BACKWARD), range(self.num_stages)
        return tuple(
            max(sum(self.of_operation(Op(stage, kind, m)) for kind in kinds) for stage in stages)
            for m in range(len(self.body))
        )

    def bottleneck(self, num_ranks: int) -> float:
        """Cost of the busiest pipeline rank, without overhead or bubble; the last has the head."""
        body = sum(self.body) + sum(self.body_backward)
        on_rank = [body * sum(self.layers[rank::num_ranks]) / sum(self.layers) for rank in range(num_ranks)]
        on_rank[-1] += sum(self.head) + sum(self.head_backward)
        return max(on_rank)

    def timeline(self, table: OpTable) -> Timeline:
        return simulate(table, self.of_operation)
