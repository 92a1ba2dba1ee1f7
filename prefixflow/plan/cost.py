"""Cost of work, in FLOPs or in measured seconds, and the bound on what reuse can win (design: baseline over reuse).

FLOPs (`CostModel`), per token or query-key pair of one forward: `linear` = 2 * body parameters that act on a token,
`head` = 2 * LM-head parameters, `attention` = 4 * heads * head dimension * layers. Training multiplies linear
work by 3 and (flash) attention by 3.5, since its backward recomputes the scores. The bound is always of FLOPs.

Seconds (`MeasuredCosts`) come from a calibration (`prefixflow.plan.calibrate`). They decide what is folded, where a
segment is cut, which rank a tree goes to and how large a pipeline's microbatches are; without them FLOPs do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prefixflow.forest.forest import Forest
from prefixflow.plan.shapes import ModelShape
from prefixflow.ranges import Range

LINEAR_TRAINING_FACTOR = 3.0
ATTENTION_TRAINING_FACTOR = 3.5
OPERATION_OVERHEAD_TOKENS = 16.0
"""Forward tokens that an operation costs beside its own, where nothing was measured: launches, messages, Python."""
MOST_PIECES = 2
"""Times the fewest pieces that fit the budget, that equal costs may take."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one kind of operation (F or B) costs: per token, attended pair, LM-head row and attention slice, per query
    that a slice merges into others, and of the operation itself; of a whole model, in any one unit."""

    token: float
    pair: float = 0.0
    row: float = 0.0
    slice: float = 0.0
    merge: float = 0.0
    operation: float = 0.0


@dataclass(frozen=True, slots=True)
class SharingOverhead:
    """What a shared segment costs those that read it, in tokens of work: a slice, and a part of each query it merges."""

    segment_tokens: float
    merge_tokens: float = 0.0


UNMEASURED_SHARING = SharingOverhead(segment_tokens=7.0, merge_tokens=0.016)
"""Of the built-in shape `tiny` (benchmarks/README.md): in tokens, larger models pay less for a slice."""


class Costs(ABC):
    """Costs of operations, and what planning asks of them."""

    __slots__ = ()

    @property
    @abstractmethod
    def forward(self) -> Rates: ...

    @property
    @abstractmethod
    def backward(self) -> Rates: ...

    @property
    @abstractmethod
    def sharing(self) -> SharingOverhead: ...

    def training_cost(self, span: Range, num_rows: int = 0) -> float:
        """Forward and backward of positions `span` (no recomputation), each attending to all positions before it."""
        forward, backward = self.forward, self.backward
        return (
            (forward.token + backward.token) * len(span)
            + (forward.row + backward.row) * num_rows
            + (forward.pair + backward.pair) * attended_pairs(span)
        )

    def segment_costs(self, forest: Forest, rows: Sequence[float]) -> list[float]:
        """Training cost of each segment; `rows[i]` head rows in segment i."""
        forward, backward = self.forward, self.backward
        token, pair, row = forward.token + backward.token, forward.pair + backward.pair, forward.row + backward.row
        return [
            token * len(span) + row * num_rows + pair * attended_pairs(span)
            for span, num_rows in zip((segment.span for segment in forest.segments), rows, strict=True)
        ]

    def equal_cost_cuts(
        self, span: Range, max_tokens: int, *, num_rows: float = 0, max_cost: float = math.inf
    ) -> tuple[Range, ...]:
        """Cut `span` into the fewest pieces of about equal training cost, none longer than `max_tokens`.

        num_rows: head rows of the span, taken as spread evenly. max_cost: of a piece; rounding to whole positions may
        exceed it.

        Later positions attend to more and cost more, so earlier pieces are longer. Where attention outweighs the rest,
        equal costs would take up to (length / max_tokens)^2 pieces: beyond twice the fewest possible, the first pieces
        have `max_tokens` and cost less, and only the others are equal.
        """
        forward, backward = self.forward, self.backward
        row_share = (forward.row + backward.row) * num_rows / len(span)
        costs = _PositionCosts(forward.token + backward.token + row_share, forward.pair + backward.pair)
        total = costs.of(span)
        fewest = min(max(math.ceil(len(span) / max_tokens), math.ceil(total / max_cost)), len(span))
        most = min(MOST_PIECES * fewest, len(span))
        for count in range(fewest, most):
            # The first piece is the longest; rounding may add one position to any.
            if costs.positions_for(span.start, total / count) >= max_tokens + 0.5:
                continue
            pieces = costs.cut(span, count, len(span))
            if max(map(len, pieces)) <= max_tokens:
                return pieces
        return costs.cut(span, most, max_tokens)


@dataclass(frozen=True, slots=True)
class _PositionCosts:
    """Training costs of a run of positions: `token` for each, `pair` for each that one attends to."""

    token: float
    pair: float

    def of(self, span: Range) -> float:
        return self.token * len(span) + self.pair * attended_pairs(span)

    def positions_for(self, start: int, cost: float) -> float:
        """x with token * x + pair * (start * x + x^2 / 2) = cost."""
        slope = self.token + self.pair * start
        return 2 * cost / (slope + math.sqrt(slope * slope + 2 * self.pair * cost))

    def cut(self, span: Range, count: int, max_tokens: int) -> tuple[Range, ...]:
        """`count` pieces, each an equal share of what is left, as far as `max_tokens` allows."""
        bounds = [span.start]
        for num_left in range(count, 1, -1):
            rest = Range(bounds[-1], span.stop)
            share = round(self.positions_for(rest.start, self.of(rest) / num_left))
            least = max(1, len(rest) - (num_left - 1) * max_tokens)
            most = min(max_tokens, len(rest) - (num_left - 1))
            bounds.append(rest.start + min(max(share, least), most))
        bounds.append(span.stop)
        return tuple(Range(a, b) for a, b in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class CostModel(Costs):
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

    @property
    def forward(self) -> Rates:
        operation = OPERATION_OVERHEAD_TOKENS * self.linear
        return Rates(self.linear, self.attention, self.head, operation=operation)

    @property
    def backward(self) -> Rates:
        """Backward FLOPs. An operation's overhead is the same as of a forward."""
        factor = LINEAR_TRAINING_FACTOR - 1
        attention = (ATTENTION_TRAINING_FACTOR - 1) * self.attention
        operation = OPERATION_OVERHEAD_TOKENS * self.linear
        return Rates(factor * self.linear, attention, factor * self.head, operation=operation)

    @property
    def sharing(self) -> SharingOverhead:
        return UNMEASURED_SHARING

    def training_flops(self, span: Range, num_rows: int = 0) -> float:
        """Forward and backward of `span` (no recomputation)."""
        return self.training_cost(span, num_rows)

    def forest_flops(self, forest: Forest, rows: Sequence[int]) -> float:
        """Training FLOPs of the forest; `rows[i]` head rows in segment i."""
        return sum(self.segment_costs(forest, rows))


@dataclass(frozen=True, slots=True)
class MeasuredCosts(Costs):
    """Seconds of operations, as a calibration has found them."""

    forward_s: Rates
    backward_s: Rates

    @property
    def forward(self) -> Rates:
        return self.forward_s

    @property
    def backward(self) -> Rates:
        return self.backward_s

    @property
    def sharing(self) -> SharingOverhead:
        token = self.forward_s.token + self.backward_s.token
        return SharingOverhead(
            segment_tokens=(self.forward_s.slice + self.backward_s.slice) / token,
            merge_tokens=(self.forward_s.merge + self.backward_s.merge) / token,
        )


def attended_pairs(span: Range) -> float:
    """Query-key pairs of causal attention from `span` to everything before and inside it."""
    length = len(span)
    return length * span.start + length * length / 2
