"""Calibration: the solver against brute force, coefficients recovered from made-up times, files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.calibrate import (
    Calibration,
    MeasuredOn,
    Measurement,
    nonnegative_least_squares,
    shape_digest,
)
from prefixflow.plan.cost import CostModel, Costs, MeasuredCosts, Rates
from prefixflow.plan.plan import PlanConfig, PrefixReuse, build_plan
from prefixflow.plan.shapes import ModelShape
from prefixflow.plan.work import Work
from tests.plan.groups import batch_of

FORWARD = Rates(token=1e-5, pair=1e-9, row=1e-4, slice=1e-4, merge=1e-6, operation=1e-3)
BACKWARD = Rates(token=3e-5, pair=4e-9, row=2e-4, slice=3e-4, merge=3e-6, operation=2e-3)
TRUTH = MeasuredCosts(FORWARD, BACKWARD)
FLOPS = CostModel(linear=2e4, head=4e5, attention=1.0)
"""What the fit starts from: of a row twice, of a pair half of what they cost beside a token."""
PLACE = MeasuredOn("0123", "cpu x86_64", "float32", "tp 1 cp 1", "none")


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


def seconds_of(work: Work, rates: Rates) -> float:
    return work.body_cost(rates) + rates.row * work.rows + rates.operation


def measured(noise: float = 0.0, num: int = 300) -> list[Measurement]:
    rng = np.random.default_rng(0)
    result = []
    for _ in range(num):
        tokens = int(rng.integers(16, 4096))
        work = Work(
            tokens=tokens,
            pairs=float(tokens * rng.integers(1, 8000)),
            rows=int(rng.integers(tokens)) * int(rng.integers(2)),
            slices=int(rng.integers(1, 40)),
            merged=int(rng.integers(4 * tokens)),
        )
        is_backward = bool(rng.integers(2))
        seconds = seconds_of(work, BACKWARD if is_backward else FORWARD) * (1 + noise * rng.normal())
        result.append(Measurement(is_backward, work, seconds))
    return result


def test_rates_come_back() -> None:
    found = Calibration.fit(measured(), FLOPS, PLACE, "2026-01-01")
    for rates, truth in ((found.costs.forward, FORWARD), (found.costs.backward, BACKWARD)):
        assert asdict(rates) == pytest.approx(asdict(truth), rel=0.03)
    assert max(found.residual_forward, found.residual_backward) < 5e-3
    assert found.costs.sharing.segment_tokens == pytest.approx(10.0, rel=0.03)
    assert found.costs.sharing.merge_tokens == pytest.approx(0.1, rel=0.03)


def test_flops_decide_where_measurements_do_not() -> None:
    """Two operations of one size say nothing of the parts: half of the FLOPs are of tokens, half of pairs."""
    work = Work(tokens=100, pairs=1000.0, rows=0, slices=1, merged=0)
    alike = [Measurement(is_backward, work, 2.0) for is_backward in (False, False, True, True)]
    found = Calibration.fit(alike, CostModel(linear=10.0, attention=1.0), PLACE, "2026-01-01")
    assert found.costs.forward.token == pytest.approx(1e-2, rel=0.01)
    assert found.costs.forward.pair == pytest.approx(1e-3, rel=0.01)


def test_noise_moves_them_little_and_shows_in_the_residual() -> None:
    found = Calibration.fit(measured(noise=0.05), FLOPS, PLACE, "2026-01-01")
    assert found.costs.forward.token == pytest.approx(FORWARD.token, rel=0.2)
    assert found.costs.backward.pair == pytest.approx(BACKWARD.pair, rel=0.2)
    assert 0.03 < found.residual_forward < 0.07


def test_tokens_are_never_free() -> None:
    """Times that depend on the operation alone: the rates of work are small and positive, so that plans can divide."""
    works = [Work(tokens=n, pairs=float(n * n), rows=0, slices=1, merged=0) for n in (10, 20, 40, 80)]
    flat = [Measurement(is_backward, work, 1.0) for work in works for is_backward in (False, True)]
    found = Calibration.fit(flat, CostModel(linear=10.0, attention=1.0), PLACE, "2026-01-01").costs
    assert 0 < found.backward.token < 0.01
    assert found.backward.operation > 0.5


@pytest.mark.parametrize("is_backward", [False, True])
def test_nothing_measured_is_refused(is_backward: bool) -> None:
    one_kind = [m for m in measured() if m.is_backward is is_backward]
    with pytest.raises(ValueError, match="forward" if is_backward else "backward"):
        Calibration.fit(one_kind, FLOPS, PLACE, "2026-01-01")


def saved(folder: Path, **changes: object) -> Path:
    path = folder / "c.json"
    replace(Calibration.fit(measured(), FLOPS, PLACE, "2026-01-01"), **changes).save(path)  # type: ignore[arg-type]
    return path


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = Calibration.load(path)
    assert found == Calibration.fit(measured(), FLOPS, PLACE, "2026-01-01")
    assert found.costs_for(PLACE, path) == found.costs


@pytest.mark.parametrize("text", ["", "[]", '{"token_s": 1}', "{}"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=r"c\.json: expected a calibration"):
        Calibration.load(tmp_path / "c.json")


@pytest.mark.parametrize(("name", "value"), [("token", 0.0), ("slice", -1.0), ("row", float("nan"))])
def test_impossible_seconds_are_refused(name: str, value: float, tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    content["costs"]["backward_s"][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="finite"):
        Calibration.load(path)


@pytest.mark.parametrize("name", MeasuredOn.__dataclass_fields__)
def test_another_machine_or_model_is_refused(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    elsewhere = replace(PLACE, **{name: "other"})
    with pytest.raises(ValueError, match=rf"c\.json: .*{name} '.*', here 'other'"):
        Calibration.load(path).costs_for(elsewhere, path)


def test_a_shape_is_known_by_its_sizes() -> None:
    small = ModelShape.from_name("small")
    assert shape_digest(replace(small, name="mine")) == shape_digest(small)
    assert shape_digest(replace(small, num_layers=5)) != shape_digest(small)


def test_the_work_of_a_plan() -> None:
    """A prefix of 4 positions, then two suffixes of 2 that read it: 8 and 2 * (8 + 2) pairs, one slice merged into 4."""
    trajectories = batch_of([1, 1, 1, 1, 1, 5, 6], [1, 1, 1, 1, 1, 7, 8])
    plan = build_plan(trajectories, PlanConfig(4))
    rows = segment_row_counts(plan.forest, trajectories)
    assert [Work.of(plan.forest, m, rows) for m in plan.ranks[0]] == [Work(4, 8.0, 4, 1, 0), Work(4, 20.0, 4, 3, 4)]
    together = build_plan(trajectories, PlanConfig(100))
    # The first suffix continues the prefix's causal slice, so that only the second merges.
    assert Work.of(together.forest, together.ranks[0][0], rows) == Work(8, 28.0, 8, 3, 2)


def costs(token: float = 1.0, pair: float = 0.0, slice: float = 0.0, merge: float = 0.0) -> MeasuredCosts:
    rates = Rates(token=token, pair=pair, slice=slice, merge=merge)
    return MeasuredCosts(rates, rates)


@pytest.mark.parametrize(
    ("measured", "is_shared"),
    [
        (None, True),
        (costs(), True),
        (costs(slice=39.0), True),
        (costs(slice=41.0), False),
        (costs(merge=1.9), True),
        (costs(merge=2.1), False),
    ],
    ids=["flops", "free", "cheap slice", "dear slice", "cheap merge", "dear merge"],
)
def test_measured_costs_decide_what_is_folded_and_the_bound_stays(measured: Costs | None, is_shared: bool) -> None:
    """20 shared positions save 40 tokens with three branches; two of the branches merge 10 queries each."""
    prompt = list(range(21))
    trajectories = batch_of(*([*prompt, *range(100 * i, 100 * i + 10)] for i in (1, 2, 3)))
    config = PlanConfig(prefix_reuse=PrefixReuse.AUTO, measured=measured)  # type: ignore[arg-type]
    plan = build_plan(trajectories, config)
    assert bool(plan.forest.num_shared_segments) is is_shared
    assert plan.bound == (pytest.approx(90 / 50) if is_shared else 1.0)


def test_measured_costs_decide_where_segments_are_cut_and_trees_go() -> None:
    """Attention that FLOPs leave out: pieces of one tree get shorter, and of two ranks one takes the long trajectory."""
    chain_of = batch_of(range(101))
    flops, dear = (build_plan(chain_of, PlanConfig(60, measured=m)) for m in (None, costs(pair=1.0)))
    assert [len(s) for s in flops.forest.segments] == [50, 50]
    first, *_, last = (len(s) for s in dear.forest.segments)
    assert first > last
    trajectories = [t for i, n in enumerate((60, 30, 30, 30)) for t in batch_of(range(n + 1), group=f"g{i}")]
    flops, dear = (
        build_plan(trajectories, PlanConfig(60, data_parallel_size=2, measured=m)) for m in (None, costs(pair=1.0))
    )
    assert (flops.trees, dear.trees) == (((0, 3), (1, 2)), ((0,), (1, 2, 3)))
    assert dear.rank_loads == pytest.approx((2 * (60 + 1800), 2 * 3 * (30 + 450)))


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file .*bench FILE --calibrate"):
        Calibration.load(tmp_path / "none.json")
