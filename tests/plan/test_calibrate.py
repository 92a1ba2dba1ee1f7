"""Calibration: the solver against brute force, coefficients recovered from made-up times, files."""

from __future__ import annotations

from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.calibrate import Calibration, Measurement, nonnegative_least_squares
from prefixflow.plan.cost import CostModel
from prefixflow.plan.plan import PlanConfig, build_plan
from tests.plan.groups import batch_of

TRUTH = Calibration(token_s=1e-5, pair_s=1e-9, row_s=1e-4, operation_s=1e-3, slice_s=1e-4)


def brute_force(design: np.ndarray, target: np.ndarray) -> float:
    """Least residual over every set of columns whose unconstrained solution is not negative."""
    columns = range(design.shape[1])
    best = float(np.linalg.norm(target))
    for chosen in chain.from_iterable(combinations(columns, size + 1) for size in columns):
        best = min(best, _residual(design, target, list(chosen), best))
    return best


def _residual(design: np.ndarray, target: np.ndarray, columns: list[int], otherwise: float) -> float:
    x = np.linalg.lstsq(design[:, columns], target, rcond=None)[0]
    return float(np.linalg.norm(design[:, columns] @ x - target)) if (x >= 0).all() else otherwise


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(5, 20))
def test_the_solver_finds_the_best_of_all_column_sets(seed: int, num_columns: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    design, target = rng.normal(size=(num_rows, num_columns)), rng.normal(size=num_rows)
    x = nonnegative_least_squares(design, target)
    assert (x >= 0).all()
    assert np.linalg.norm(design @ x - target) == pytest.approx(brute_force(design, target), rel=1e-9)


def measured(noise: float = 0.0, num: int = 200) -> list[Measurement]:
    rng = np.random.default_rng(0)
    result = []
    for _ in range(num):
        tokens = int(rng.integers(16, 4096))
        drawn = Measurement(
            is_backward=bool(rng.integers(2)),
            tokens=tokens,
            pairs=float(tokens * rng.integers(1, 8000)),
            rows=int(rng.integers(tokens)) * int(rng.integers(2)),
            slices=int(rng.integers(1, 12)),
            body_share=0.5,
            seconds=0.0,
        )
        values = (TRUTH.token_s, TRUTH.pair_s, TRUTH.row_s, TRUTH.operation_s, TRUTH.slice_s)
        seconds = float(np.dot(drawn.features(), values)) * (1 + noise * rng.normal())
        result.append(Measurement(**{n: getattr(drawn, n) for n in drawn.__slots__[:-1]}, seconds=seconds))
    return result


def test_coefficients_come_back() -> None:
    found = Calibration.fit(measured())
    for name in Calibration.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert found.cost_model() == CostModel(1.0, pytest.approx(10.0), pytest.approx(1e-4))
    assert found.operation_tokens == pytest.approx(100.0)


def test_noise_moves_them_little() -> None:
    found = Calibration.fit(measured(noise=0.05))
    assert found.token_s == pytest.approx(TRUTH.token_s, rel=0.2)
    assert found.pair_s == pytest.approx(TRUTH.pair_s, rel=0.2)


def test_a_backward_is_worth_its_forwards() -> None:
    forward = Measurement(False, 10, 100.0, 5, 2, 0.5, 1.0).features()
    assert forward == (5.0, 50.0, 5.0, 1.0, 1.0)
    assert Measurement(True, 10, 100.0, 5, 2, 0.5, 1.0).features() == (10.0, 125.0, 10.0, 1.0, 1.0)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        Calibration.fit([])


def test_a_file_comes_back(tmp_path: Path) -> None:
    TRUTH.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == TRUTH


@pytest.mark.parametrize("text", ["", "[]", '{"token_s": 1}', '{"token_s": "x"}', "{}"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json: expected a JSON object of token_s"):
        Calibration.load(tmp_path / "c.json")


def test_negative_seconds_are_refused(tmp_path: Path) -> None:
    Calibration(1.0, -1.0, 0.0, 0.0, 0.0).save(tmp_path / "c.json")
    with pytest.raises(ValueError, match="calibrate anew"):
        Calibration.load(tmp_path / "c.json")


def test_features_of_a_plan() -> None:
    """A prefix of 4 positions, then two suffixes of 2 that read it: 8 and 2 * (8 + 2) pairs, one cached slice."""
    trajectories = batch_of([1, 1, 1, 1, 1, 5, 6], [1, 1, 1, 1, 1, 7, 8])
    plan = build_plan(trajectories, PlanConfig(4))
    rows = segment_row_counts(plan.forest, trajectories)
    prefix, suffixes = (
        Measurement.of(plan.forest, m, rows, 1.0, is_backward=False, stage=1, num_stages=2) for m in plan.ranks[0]
    )
    assert prefix.features() == (2.0, 4.0, 4.0, 1.0, 0.5)
    assert suffixes.features() == (2.0, 10.0, 4.0, 1.0, 1.5)
    first_stage = Measurement.of(plan.forest, plan.ranks[0][1], rows, 1.0, is_backward=True, num_stages=2)
    assert first_stage.features() == (4.0, 25.0, 0.0, 1.0, 1.5)
