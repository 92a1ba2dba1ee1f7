"""Predicted work of operations and stages, and what a pipeline makes of it.

The body is spread evenly over the global stages; the LM head weighs on the last one, on scored rows only. One operation
costs its FLOPs and a fixed overhead, so that cutting ever finer does not look free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixflow.forest.forest import Forest
from prefixflow.plan.cost import ATTENTION_TRAINING_FACTOR, LINEAR_TRAINING_FACTOR, CostModel, attended_pairs
from prefixflow.plan.microbatch import Microbatch
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.simulate import Timeline, simulate
from prefixflow.schedule.table import OpTable

# Forward-token equivalents that an operation costs beside its tokens: kernel launches, messages, Python.
OPERATION_OVERHEAD_TOKENS = 8.0


@dataclass(frozen=True, slots=True)
class StageCosts:
    """FLOPs of the microbatches of one data-parallel rank on the stages of its pipeline.

    body, head: forward FLOPs of each microbatch, over all stages; body_backward, head_backward likewise.
    """

    num_stages: int
    overhead: float
    body: tuple[float, ...]
    body_backward: tuple[float, ...]
    head: tuple[float, ...]

    @classmethod
    def of(
        cls,
        forest: Forest,
        microbatches: Sequence[Microbatch],
        rows: Sequence[int],
        cost: CostModel,
        num_stages: int,
    ) -> StageCosts:
        """`rows[i]` head rows in segment i."""
        body, backward, head = [], [], []
        for m in microbatches:
            spans = [forest.segments[s].span for s in m.segments]
            linear = cost.linear * sum(len(span) for span in spans)
            attention = cost.attention * sum(attended_pairs(span) for span in spans)
            body.append(linear + attention)
            backward.append((LINEAR_TRAINING_FACTOR - 1) * linear + (ATTENTION_TRAINING_FACTOR - 1) * attention)
            head.append(cost.head * sum(rows[s] for s in m.segments))
        overhead = OPERATION_OVERHEAD_TOKENS * cost.linear / num_stages
        return cls(num_stages, overhead, tuple(body), tuple(backward), tuple(head))

    def of_operation(self, op: Op) -> float:
        """FLOPs of an operation, its overhead included."""
        is_last = op.stage == self.num_stages - 1
        head = self.head[op.microbatch] if is_last else 0.0
        if op.kind is Kind.FORWARD:
            return self.body[op.microbatch] / self.num_stages + head + self.overhead
        backward = self.body_backward[op.microbatch] / self.num_stages
        return backward + (LINEAR_TRAINING_FACTOR - 1) * head + self.overhead

    def bottleneck(self, num_ranks: int) -> float:
        """FLOPs of the busiest pipeline rank, without overhead or bubble: the last, which has the head."""
        body = sum(self.body) + sum(self.body_backward)
        return body / num_ranks + LINEAR_TRAINING_FACTOR * sum(self.head)

    def timeline(self, table: OpTable) -> Timeline:
        return simulate(table, self.of_operation)
