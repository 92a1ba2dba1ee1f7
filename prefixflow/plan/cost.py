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
MOST_PIECES = 2
"""Times the fewest pieces that fit the budget, that equal costs may take."""


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

        Later positions attend to more and cost more, so earlier pieces are longer. Where attention outweighs the rest,
        equal costs would take up to (length / max_tokens)^2 pieces: beyond twice the fewest possible, the first pieces
        have `max_tokens` and cost less, and only the others are equal.
        """
        fewest = math.ceil(len(span) / max_tokens)
        most = min(MOST_PIECES * fewest, len(span))
        total = self.training_flops(span)
        for count in range(fewest, most):
            # The first piece is the longest; rounding may add one position to any.
            if self._positions_for(span.start, total / count) >= max_tokens + 0.5:
                continue
            pieces = self._cut(span, count, len(span))
            if max(map(len, pieces)) <= max_tokens:
                return pieces
        return self._cut(span, most, max_tokens)

    def _cut(self, span: Range, count: int, max_tokens: int) -> tuple[Range, ...]:
        """`count` pieces, each an equal share of what is left, as far as `max_tokens` allows."""
        bounds = [span.start]
        for num_left in range(count, 1, -1):
            rest = Range(bounds[-1], span.stop)
            share = round(self._positions_for(rest.start, self.training_flops(rest) / num_left))
            least = max(1, len(rest) - (num_left - 1) * max_tokens)
            most = min(max_tokens, len(rest) - (num_left - 1))
            bounds.append(rest.start + min(max(share, least), most))
        bounds.append(span.stop)
        return tuple(Range(a, b) for a, b in pairwise(bounds))

    def _positions_for(self, start: int, training_flops: float) -> float:
        """x with linear * x + attention * (start * x + x^2 / 2) = training_flops, coefficients of training."""
        attention = ATTENTION_TRAINING_FACTOR * self.attention
        slope = LINEAR_TRAINING_FACTOR * self.linear + attention * start
        return 2 * training_flops / (slope + math.sqrt(slope * slope + 2 * attention * training_flops))


def attended_pairs(span: Range) -> float:
    """Query-key pairs of causal attention from `span` to everything before and inside it."""
    length = len(span)
    return length * span.start + length * length / 2
