"""Refine the cost model by measured operations.

Strategy: forwards and backwards are fitted apart. What an operation has to do (`Work`: tokens, attended pairs, LM-head
rows, attention slices, merged queries) and 1 for the operation itself are the columns; their non-negative least-squares
coefficients on the measured seconds are seconds per unit. Rows are weighted by 1 / seconds, so that long operations do
not drown short ones: the residual is a relative error.

A column that never varies apart from the others gets 0 (its share goes to those), so measure batches of mixed lengths. The
layer that a microbatch without rows leaves out is not known to `Work`; it shows in the residual.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from prefixflow.plan.cost import MeasuredCosts, Rates
from prefixflow.plan.shapes import ModelShape
from prefixflow.plan.work import Work
from prefixflow.trajectories.files import atomic_write


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What the seconds of a calibration hold for.

    model: digest of the model's shape. layout: the ways in which a microbatch is divided among ranks.
    """

    model: str
    device: str
    dtype: str
    layout: str
    recompute: str


def shape_digest(shape: ModelShape) -> str:
    """Equal for two shapes that differ in name only."""
    return hashlib.sha256(repr(replace(shape, name="")).encode()).hexdigest()[:16]


def layout_key(tensor_parallel: int, context_parallel: int) -> str:
    return f"tp {tensor_parallel} cp {context_parallel}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """An operation on a stage that is the whole model, and its time."""

    is_backward: bool
    work: Work
    seconds: float

    def columns(self) -> tuple[float, ...]:
        """In the order of the fields of `Rates`."""
        work = self.work
        return (work.tokens, work.pairs, work.rows, work.slices, work.merged, 1.0)

    def predicted_s(self, costs: MeasuredCosts) -> float:
        """What `costs` make of this operation."""
        rates = costs.backward if self.is_backward else costs.forward
        return self.work.body_cost(rates) + rates.row * self.work.rows + rates.operation


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured costs with their origin.

    num_operations: how many were measured. residual_forward, residual_backward: root mean square of the relative errors
    of the predicted times.
    """

    costs: MeasuredCosts
    measured_on: MeasuredOn
    date: str
    num_operations: int
    residual_forward: float
    residual_backward: float

    @classmethod
    def fit(cls, measurements: Sequence[Measurement], measured_on: MeasuredOn, date: str) -> Calibration:
        """Raises ValueError where nothing was measured or no time depends on tokens."""
        forward, residual_forward = _fit([m for m in measurements if not m.is_backward], "forward")
        backward, residual_backward = _fit([m for m in measurements if m.is_backward], "backward")
        costs = MeasuredCosts(forward, backward)
        return cls(costs, measured_on, date, len(measurements), residual_forward, residual_backward)

    def costs_for(self, expected: MeasuredOn, path: str | Path) -> MeasuredCosts:
        """The costs, for a run as `expected`; `path` names the file in the error.

        Raises ValueError naming each property in which the run differs from what was measured.
        """
        pairs = ((f.name, getattr(self.measured_on, f.name), getattr(expected, f.name)) for f in fields(MeasuredOn))
        differing = [f"{name} {measured!r}, here {here!r}" for name, measured, here in pairs if measured != here]
        if differing:
            raise ValueError(
                f"{path}: the calibration was measured with {'; '.join(differing)}. Name a file that does not exist, "
                "to measure anew, or leave --calibrate out."
            )
        return self.costs

    def save(self, path: str | Path) -> None:
        with atomic_write(path) as file:
            file.write((json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises ValueError for a file that `save` did not write."""
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            costs = MeasuredCosts(*(_rates(values["costs"][name]) for name in ("forward_s", "backward_s")))
            measured_on = MeasuredOn(**{name: str(value) for name, value in values["measured_on"].items()})
            found = cls(**{**values, "costs": costs, "measured_on": measured_on})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected a calibration as `prefixflow bench --calibrate` writes it, got "
                f"{type(error).__name__}: {error}. Measure anew into another file."
            ) from error
        return found


def _rates(values: dict[str, Any]) -> Rates:
    rates = Rates(**{name: float(value) for name, value in values.items()})
    if not rates.token > 0 or not all(np.isfinite(v) and v >= 0 for v in asdict(rates).values()):
        raise ValueError(f"seconds must be finite and not negative, and those of a token positive, got {values}")
    return rates


def _fit(measurements: Sequence[Measurement], kind: str) -> tuple[Rates, float]:
    """Rates and the root mean square of the relative errors."""
    timed = [m for m in measurements if m.seconds > 0]
    if not timed:
        raise ValueError(f"Calibration needs measured {kind} operations, got none; run at least one step.")
    weight = 1.0 / np.array([m.seconds for m in timed])
    design = np.array([m.columns() for m in timed]) * weight[:, None]
    scale = np.maximum(np.abs(design).max(axis=0), np.finfo(float).tiny)
    found = nonnegative_least_squares(design / scale, np.ones(len(timed))) / scale
    rates = Rates(*found.tolist())
    if rates.token <= 0:
        raise ValueError(
            f"Calibration found no time per token in {len(timed)} {kind} operations; measure more operations, of "
            "different lengths."
        )
    return rates, float(np.sqrt(np.mean((design @ found - 1.0) ** 2)))


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
