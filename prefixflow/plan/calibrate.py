"""Refine the cost model by measured operations.

Strategy: forwards and backwards are fitted apart. (1) The model's FLOPs and one number of the hardware, the median of
seconds per FLOP, give a first guess of the seconds per token, attended pair and LM-head row. (2) What an operation has to do
(`Work`: these, attention slices, merged queries) and 1 for the operation itself are the columns of a non-negative
least-squares problem whose coefficients are seconds per unit. Its rows are the measured operations, divided by their
seconds, so that long ones do not drown short ones, and one row for each guess, which decides where the measurements do not.
Guessed coefficients stay above a small part of the guess, the others above zero.

The layer that a microbatch without rows leaves out is not known to `Work`; it shows in the residual.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from prefixflow.plan.cost import CostModel, MeasuredCosts, Rates
from prefixflow.plan.shapes import ModelShape
from prefixflow.plan.work import Work
from prefixflow.trajectories.files import atomic_write

GUESS_WEIGHT = 0.1
"""Weight of a guessed coefficient that is wrong by all of itself, against an operation that is."""
LEAST_OF_GUESS = 0.01
"""A coefficient is at least this part of its guess: no work is free, also where noise or overhead hides its time."""


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


POOR_RESIDUAL = 0.2
"""Above this the fit says little: too few distinct operations, or a machine that was busy with something else."""


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
    def fit(
        cls, measurements: Sequence[Measurement], flops: CostModel, measured_on: MeasuredOn, date: str
    ) -> Calibration:
        """Refine `flops`, those of the model that was measured.

        Raises ValueError where no forward or no backward was measured.
        """
        forward, residual_forward = _fit([m for m in measurements if not m.is_backward], flops.forward, "forward")
        backward, residual_backward = _fit([m for m in measurements if m.is_backward], flops.backward, "backward")
        costs = MeasuredCosts(forward, backward)
        return cls(costs, measured_on, date, len(measurements), residual_forward, residual_backward)

    @property
    def is_poor(self) -> bool:
        return max(self.residual_forward, self.residual_backward) > POOR_RESIDUAL

    def costs_for(self, expected: MeasuredOn, path: str | Path) -> MeasuredCosts:
        """The costs, for a run as `expected`; `path` names the file in the error.

        Raises ValueError naming each property in which the run differs from what was measured.
        """
        pairs = ((f.name, getattr(self.measured_on, f.name), getattr(expected, f.name)) for f in fields(MeasuredOn))
        differing = [f"{name} {measured!r}, here {here!r}" for name, measured, here in pairs if measured != here]
        if differing:
            raise ValueError(
                f"{path}: the calibration was measured with {'; '.join(differing)}. Ask for what was measured, or "
                "measure anew (`prefixflow bench FILE --calibrate` with the name of a new file), or leave --calibrate out."
            )
        return self.costs

    def save(self, path: str | Path) -> None:
        with atomic_write(path) as file:
            file.write((json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises ValueError for a file that `save` did not write."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"--calibrate {path}: {error.strerror}. `prefixflow bench FILE --calibrate` writes one."
            ) from None
        try:
            values: dict[str, Any] = json.loads(text)
            costs = MeasuredCosts(*(_rates(values["costs"][name]) for name in ("forward_s", "backward_s")))
            measured_on = MeasuredOn(**{name: str(value) for name, value in values["measured_on"].items()})
            found = cls(**{**values, "costs": costs, "measured_on": measured_on})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected a calibration as `prefixflow bench --calibrate` writes it, got something else ({error}). "
                "Measure anew into another file."
            ) from error
        return found


def _rates(values: dict[str, Any]) -> Rates:
    rates = Rates(**{name: float(value) for name, value in values.items()})
    if not rates.token > 0 or not all(np.isfinite(v) and v >= 0 for v in asdict(rates).values()):
        raise ValueError(f"seconds must be finite and not negative, and those of a token positive, got {values}")
    return rates


def _fit(measurements: Sequence[Measurement], flops: Rates, kind: str) -> tuple[Rates, float]:
    """Rates and the root mean square of the relative errors."""
    timed = [m for m in measurements if m.seconds > 0]
    if not timed:
        raise ValueError(f"Calibration needs measured {kind} operations, got none; run at least one step.")
    weight = 1.0 / np.array([m.seconds for m in timed])
    design = np.array([m.columns() for m in timed]) * weight[:, None]
    # FLOPs know nothing of overheads. What all operations have alike is guessed to be their own, not their slices'.
    guessed = np.array([flops.token, flops.pair, flops.row, 0.0, 0.0, 0.0])
    guess = guessed / np.median(design @ guessed)
    known = guess > 0
    scale = np.where(known, guess, 1.0 / np.maximum(design.max(axis=0), np.finfo(float).tiny))
    rows = np.vstack([design * scale, GUESS_WEIGHT * np.eye(len(guess))[:-1]])
    target = np.concatenate([np.ones(len(timed)), GUESS_WEIGHT * known[:-1]])
    least = LEAST_OF_GUESS * known
    found = scale * (least + nonnegative_least_squares(rows, target - rows @ least))
    rates = Rates(*found.tolist())
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
