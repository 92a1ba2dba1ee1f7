"""Refine the cost model by measured operations.

Strategy: an operation's predicted features are, per stage, its tokens, attended pairs and LM-head rows (with the factors
of training on backwards), 1 for the operation itself and the number of its attention slices. Their non-negative
least-squares coefficients on the measured seconds are seconds per unit; dividing by the seconds per token gives a
`CostModel` whose unit is one forward token of the body. Rows are weighted by 1 / seconds, so that long operations do not
drown short ones.

A feature that never varies apart from the others gets 0 (its share goes to those), so measure batches of mixed lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from prefixflow.forest.forest import Forest
from prefixflow.plan.cost import ATTENTION_TRAINING_FACTOR, LINEAR_TRAINING_FACTOR, CostModel, attended_pairs
from prefixflow.plan.microbatch import Microbatch

FEATURES = ("tokens", "pairs", "rows", "operations", "slices")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One operation and its time. Counts are of the whole microbatch; `body_share` is the stage's part of the body.

    rows: LM-head rows, 0 but on the last stage.
    """

    is_backward: bool
    tokens: int
    pairs: float
    rows: int
    slices: int
    body_share: float
    seconds: float

    @classmethod
    def of(
        cls,
        forest: Forest,
        microbatch: Microbatch,
        rows: Sequence[int],
        seconds: float,
        *,
        is_backward: bool,
        stage: int = 0,
        num_stages: int = 1,
    ) -> Measurement:
        """The measurement of one operation on `stage`; `rows[i]` head rows in segment i."""
        return cls(
            is_backward=is_backward,
            tokens=microbatch.num_tokens,
            pairs=sum(attended_pairs(forest.segments[s].span) for s in microbatch.segments),
            rows=sum(rows[s] for s in microbatch.segments) if stage == num_stages - 1 else 0,
            slices=len(microbatch.local) + len(microbatch.cached),
            body_share=1 / num_stages,
            seconds=seconds,
        )

    def features(self) -> tuple[float, ...]:
        """In the order of `FEATURES`; a backward counts as many forwards as it costs."""
        linear = LINEAR_TRAINING_FACTOR - 1 if self.is_backward else 1.0
        attention = ATTENTION_TRAINING_FACTOR - 1 if self.is_backward else 1.0
        share = self.body_share
        return (
            linear * share * self.tokens,
            attention * share * self.pairs,
            linear * self.rows,
            1.0,
            self.slices * share,
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds per unit of each feature: forward token, attended pair, LM-head row, operation, attention slice."""

    token_s: float
    pair_s: float
    row_s: float
    operation_s: float
    slice_s: float

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> Calibration:
        """Raises ValueError where nothing was measured or no time depends on tokens."""
        timed = [m for m in measurements if m.seconds > 0]
        if not timed:
            raise ValueError("Calibration needs measured operations, got none; run at least one step.")
        weight = 1.0 / np.array([m.seconds for m in timed])
        design = np.array([m.features() for m in timed]) * weight[:, None]
        scale = np.maximum(np.abs(design).max(axis=0), np.finfo(float).tiny)
        found = cls(*(nonnegative_least_squares(design / scale, np.ones(len(timed))) / scale).tolist())
        if found.token_s <= 0:
            raise ValueError(
                f"Calibration found no time per token in {len(timed)} operations; measure more operations, of "
                "different lengths."
            )
        return found

    def cost_model(self) -> CostModel:
        """Relative costs, in forward tokens of the body."""
        return CostModel(linear=1.0, head=self.row_s / self.token_s, attention=self.pair_s / self.token_s)

    @property
    def operation_tokens(self) -> float:
        """Forward-token equivalents of one operation's overhead."""
        return self.operation_s / self.token_s

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises ValueError for a file that `save` did not write."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            found = cls(**{name: float(value) for name, value in values.items()})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            names = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"{path}: expected a JSON object of {names} in seconds, got {error}.") from error
        if found.token_s <= 0 or min(asdict(found).values()) < 0:
            raise ValueError(f"{path}: seconds must not be negative, and token_s is positive; calibrate anew.")
        return found


def nonnegative_least_squares(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |design x - target| (Lawson and Hanson 1974, chapter 23: active set).

    design [n, k], target [n]; returns [k].
    """
    num_columns = design.shape[1]
    x = np.zeros(num_columns)
    free = np.zeros(num_columns, bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(design.T @ target).max()))
    for _ in range(10 * num_columns):
        gradient = design.T @ (target - design @ x)
        gradient[free] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            trial = np.zeros(num_columns)
            trial[free] = np.linalg.lstsq(design[:, free], target, rcond=None)[0]
            if not (trial[free] <= 0).any():
                break
            blocking = free & (trial <= 0)
            step = (x[blocking] / (x[blocking] - trial[blocking])).min()
            x = x + step * (trial - x)
            free &= x > 1e-14
        x = trial
    return x
