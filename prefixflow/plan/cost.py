"""Cost of work in FLOPs, and the bound on what reuse can win (design: baseline over reuse).

Coefficients, per token or query-key pair of one forward: `linear` = 2 * body parameters that act on a token,
`head` = 2 * LM-head parameters, `attention` = 4 * heads * head dimension * layers. Training multiplies linear
work by 3 and (flash) attention by 3.5, since its backward recomputes the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prefixflow.forest.forest import Forest
from prefixflow.plan.shapes import ModelShape
from prefixflow.ranges import Range

LINEAR_TRAINING_FACTOR = 3.0
ATTENTION_TRAINING_FACTOR = 3.5


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOPs per token (`linear`), per LM-head row (`head`) and per attended pair (`attention`), forward only."""

    linear: float = 1.0
    head: float = 0.0
    attention: float = 0.0

    @classmethod
    def of_shape(cls, shape: ModelShape) -> CostModel:
        """Coefficients of a model; of a mixture of experts, the parameters that act on a token."""
        return cls(
            linear=shape.body_flops_per_token,
            head=shape.head_flops_per_row,
            attention=shape.attention_flops_per_pair,
        )

    def forward_flops(self, span: Range, num_rows: int = 0) -> float:
        """Forward of positions `span`, each attending to all positions before it, with `num_rows` head rows."""
        return self.linear * len(span) + self.attention * attended_pairs(span) + self.head * num_rows

    def training_flops(self, span: Range, num_rows: int = 0) -> float:
        """Forward and backward of `span` (no recomputation)."""
        return LINEAR_TRAINING_FACTOR * (
            self.linear * len(span) + self.head * num_rows
        ) + ATTENTION_TRAINING_FACTOR * self.attention * attended_pairs(span)

    def forest_flops(self, forest: Forest, rows: Sequence[int]) -> float:
        """Training FLOPs of the forest; `rows[i]` head rows in segment i."""
        return sum(
            self.training_flops(segment.span, num_rows) for segment, num_rows in zip(forest.segments, rows, strict=True)
        )

    def equal_cost_cuts(self, span: Range, max_tokens: int) -> tuple[Range, ...]:
        """Cut `span` into the fewest pieces of about equal training cost, none longer than `max_tokens`.

        Later positions attend to more and cost more, so earlier pieces are longer.
        """
        if len(span) <= max_tokens:
            return (span,)
        count = math.ceil(len(span) / max_tokens)
        while True:
            pieces = self._cut(span, count)
            if max(len(piece) for piece in pieces) <= max_tokens:
                return pieces
            count += max(1, count // 8)

    def _cut(self, span: Range, count: int) -> tuple[Range, ...]:
        count = min(count, len(span))
        linear = LINEAR_TRAINING_FACTOR * self.linear
        attention = ATTENTION_TRAINING_FACTOR * self.attention
        total = linear * len(span) + attention * attended_pairs(span)
        bounds = [span.start]
        for piece in range(1, count):
            target = total * piece / count
            # Solve linear * x + attention * (start * x + x^2 / 2) = target for the offset x.
            slope = linear + attention * span.start
            offset = (
                target / slope
                if attention == 0
                else (math.sqrt(slope * slope + 2 * attention * target) - slope) / attention
            )
            low = bounds[-1] + 1
            high = span.stop - (count - piece)
            bounds.append(min(max(span.start + round(offset), low), high))
        bounds.append(span.stop)
        return tuple(Range(a, b) for a, b in pairwise(bounds))


def attended_pairs(span: Range) -> float:
    """Query-key pairs of causal attention from `span` to everything before and inside it."""
    length = len(span)
    return length * span.start + length * length / 2
