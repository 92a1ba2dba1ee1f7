"""The integers of a microbatch: labels, positions, rows and entries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefixflow.forest import build_forest
from prefixflow.plan import plan as planning
from prefixflow.plan.batch import MicrobatchArrays, microbatch_arrays, segment_row_counts
from prefixflow.plan.microbatch import Microbatch, pack_microbatches
from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, trajectory


def arrays_of(trajectories: list[Trajectory], budget: int = 100, multiple: int = 1) -> list[MicrobatchArrays]:
    forest = build_forest(trajectories)
    packed = pack_microbatches(forest, range(forest.num_trees), max_tokens=budget, multiple=multiple)
    return [microbatch_arrays(forest, m, trajectories) for m in packed]


def test_boundary_label_differs_per_branch() -> None:
    """Token 3 is run once per branch and predicts 7 in one, 8 in the other."""
    (a,) = arrays_of([trajectory([1, 2, 3, 7, 9], trained=[3, 4]), trajectory([1, 2, 3, 8], trained=[3])])
    assert a.tokens.tolist() == [1, 2, 3, 7, 3]
    assert a.positions.tolist() == [0, 1, 2, 3, 2]
    assert a.row_index.tolist() == [2, 3, 4]
    assert a.row_label.tolist() == [7, 9, 8]
    assert a.entry_trajectory.tolist() == [0, 0, 1]
    assert a.entry_token.tolist() == [3, 4, 3]
    assert a.entry_row.tolist() == [0, 1, 2]


def test_shared_response_tokens_share_rows() -> None:
    """Both train token 1; only the second trains token 2."""
    (a,) = arrays_of([trajectory([1, 2, 3], trained=[1]), trajectory([1, 2, 3, 4], trained=[1, 2, 3])])
    assert a.row_index.tolist() == [0, 1, 2]
    pairs = zip(a.entry_trajectory.tolist(), a.entry_token.tolist(), a.entry_row.tolist(), strict=True)
    assert sorted(pairs) == [(0, 1, 0), (1, 1, 0), (1, 2, 1), (1, 3, 2)]


def test_temperatures_split_rows_at_a_shared_position() -> None:
    trajectories = [
        trajectory([1, 2, 3], trained=[1, 2], temperature=0.5),
        trajectory([1, 2, 3], trained=[1], temperature=2.0),
        trajectory([1, 2, 3], trained=[1], temperature=0.5),
    ]
    (a,) = arrays_of(trajectories)
    assert list(zip(a.row_index.tolist(), a.row_temperature.tolist(), strict=True)) == [
        (0, 0.5),
        (0, 2.0),
        (1, 0.5),
    ]
    assert a.row_label.tolist() == [2, 2, 3]
    assert a.entry_row[a.entry_trajectory == 1].tolist() == [1]
    assert a.entry_row[a.entry_trajectory == 2].tolist() == [0]
    assert segment_row_counts(build_forest(trajectories), trajectories) == [2]


def test_padding_owns_nothing() -> None:
    (a,) = arrays_of(batch_of([5, 6, 7]), multiple=4)
    assert a.tokens.tolist() == [5, 6, 0, 0]
    assert a.positions.tolist() == [0, 1, 0, 0]
    assert a.row_index.tolist() == [0, 1]


def test_a_masked_microbatch_has_no_rows() -> None:
    (a,) = arrays_of([trajectory([1, 2, 3], trained=[])])
    assert a.num_rows == 0
    for field in ("row_index", "row_label", "entry_row", "entry_trajectory", "entry_token"):
        assert getattr(a, field).shape == (0,)
        assert getattr(a, field).dtype == np.int64
    assert a.row_temperature.dtype == np.float64


def test_positions_continue_in_a_later_microbatch() -> None:
    """Prefix of 3 positions and branches of 3: with budget 3 each is alone."""
    arrays = arrays_of(batch_of([1, 2, 3, 4, 7, 7, 7], [1, 2, 3, 4, 8, 8, 8]), budget=3)
    assert [a.positions.tolist() for a in arrays] == [[0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert [a.tokens.tolist() for a in arrays] == [[1, 2, 3], [4, 7, 7], [4, 8, 8]]


def test_row_counts_are_of_the_union_of_members() -> None:
    trajectories = [
        trajectory([1, 2, 3, 4, 9], trained=[2]),
        trajectory([1, 2, 3, 4, 8], trained=[3, 4]),
    ]
    assert segment_row_counts(build_forest(trajectories), trajectories) == [2, 0, 1]


BATCH = [
    trajectory([1, 2, 3, 7, 9], name="a", trained=[3, 4], temperature=0.5),
    trajectory([1, 2, 3, 8, 6], name="b", trained=[1, 3, 4]),
]


def rolled(a: MicrobatchArrays) -> dict:
    return {"row_label": np.roll(a.row_label, 1)}


def one_off(a: MicrobatchArrays) -> dict:
    return {"row_index": np.maximum(a.row_index - 1, 0)}


def restarted(a: MicrobatchArrays) -> dict:
    return {"positions": np.arange(len(a.positions))}


def one_temperature(a: MicrobatchArrays) -> dict:
    return {"row_temperature": np.ones_like(a.row_temperature)}


def doubled(a: MicrobatchArrays) -> dict:
    return {name: np.repeat(getattr(a, name), 2) for name in ("entry_row", "entry_trajectory", "entry_token")}


def dropped(a: MicrobatchArrays) -> dict:
    return {name: getattr(a, name)[1:] for name in ("entry_row", "entry_trajectory", "entry_token")}


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (rolled, "wrong label"),
        (one_off, "wrong input token"),
        (restarted, "wrong position"),
        (one_temperature, "wrong temperature"),
        (doubled, "not scored once"),
        (dropped, "not scored once"),
    ],
)
def test_plan_invariants_see_the_mutant(mutate, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan(BATCH, PlanConfig(max_tokens_per_microbatch=4))
    plan.assert_invariants(BATCH)

    def broken(forest, m: Microbatch, trajectories, routes) -> MicrobatchArrays:
        arrays = microbatch_arrays(forest, m, trajectories, routes)
        fields = {name: getattr(arrays, name) for name in arrays.__slots__}
        return MicrobatchArrays(**{**fields, **mutate(arrays)})

    monkeypatch.setattr(planning, "microbatch_arrays", broken)
    with pytest.raises(AssertionError, match=reason):
        plan.assert_invariants(BATCH)


def test_plan_invariants_see_a_lost_or_doubled_tree() -> None:
    plan = build_plan(BATCH, PlanConfig(data_parallel_size=2))
    with pytest.raises(AssertionError, match="lost or doubled"):
        replace(plan, trees=((), ())).assert_invariants(BATCH)
    with pytest.raises(AssertionError, match="other trees than its own"):
        replace(plan, ranks=((), ())).assert_invariants(BATCH)
