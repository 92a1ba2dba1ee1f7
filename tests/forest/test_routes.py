"""Routes of a batch: filled, counted, settled, and part of what positions must share, against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.forest import RouteMismatch, build_forest, resolve_routes
from prefixflow.plan.batch import microbatch_arrays
from prefixflow.plan.plan import PlanConfig, PrefixReuse, build_plan
from prefixflow.testing.generate import mixed_workload, with_routes
from prefixflow.trajectories import RouteShape, Trajectory
from tests.plan.groups import batch_of, batches, configs

Routes = list[np.ndarray]


def routed(tokens: Sequence[Sequence[int]], experts: Sequence[Sequence[int]]) -> list[Trajectory]:
    """One group; one MoE layer with top-1."""
    batch = batch_of(*tokens)
    rows = [np.array(e, np.int16).reshape(-1, 1, 1) for e in experts]
    return [replace(t, routes=r) for t, r in zip(batch, rows, strict=True)]


def experts(routes: Sequence[np.ndarray]) -> list[list[int]]:
    return [array[:, 0, 0].tolist() for array in routes]


def test_a_missing_row_comes_from_the_sibling_that_shares_most() -> None:
    """Row 2 of the second: the first shares tokens up to it, the third one more. Row 3: nobody has its path."""
    batch = routed(
        [[1, 2, 3, 7, 9], [1, 2, 3, 4, 5], [1, 2, 3, 4]],
        [[0, 1, 2, 3], [-1, -1, -1, -1], [0, -1, 5]],
    )
    routes, report = resolve_routes(batch, RouteMismatch.EXACT)
    assert experts(routes) == [[0, 1, 2, 3], [0, 1, 5, -1], [0, 1, 5]]
    assert (report.num_filled, report.num_positions, report.num_mismatched) == (4, 3, 0)


def test_a_missing_row_is_not_filled_from_another_group_or_path() -> None:
    first, second = routed([[1, 2, 3], [1, 2, 4]], [[5, 6], [-1, -1]])
    other = replace(second, group="other")
    assert experts(resolve_routes([first, other], RouteMismatch.EXACT)[0])[1] == [-1, -1]
    diverged = routed([[1, 2, 3], [1, 5, 3]], [[5, 6], [-1, -1]])
    assert experts(resolve_routes(diverged, RouteMismatch.EXACT)[0])[1] == [5, -1]


def test_conflicting_positions_are_unshared_or_take_the_first() -> None:
    batch = routed([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]], [[0, 1, 2, 0], [0, 2, 2, 0], [0, 1, 2, 0]])
    config = PlanConfig(route_mismatch=RouteMismatch.EXACT)
    exact = build_plan(batch, config)
    # Position 1 and all behind it leave the second trajectory.
    assert [(s.span.start, s.span.stop, s.members) for s in exact.forest.segments if s.is_shared] == [
        (0, 1, (0, 1, 2)),
        (1, 3, (0, 2)),
    ]
    first = build_plan(batch, replace(config, route_mismatch=RouteMismatch.FIRST))
    assert first.routes is not None
    assert first.forest.segments == build_plan(batch, PlanConfig()).forest.segments
    assert experts(first.routes) == [[0, 1, 2, 0]] * 3
    for plan in (exact, first):
        plan.assert_invariants(batch)
        assert plan.route_report is not None
        assert plan.route_report.rate == 1 / 3
    assert exact.digest != first.digest != build_plan(batch, PlanConfig()).digest


def test_the_order_of_the_top_k_is_no_conflict() -> None:
    left, right = batch_of([1, 2, 3], [1, 2, 4])
    batch = [
        replace(left, routes=np.array([[[0, 1]], [[2, 3]]])),
        replace(right, routes=np.array([[[1, 0]], [[3, 2]]])),
    ]
    plan = build_plan(batch, PlanConfig(route_mismatch=RouteMismatch.EXACT))
    assert (plan.forest.num_shared_segments, plan.route_report.rate if plan.route_report else None) == (1, 0.0)
    plan.assert_invariants(batch)


def test_a_row_with_one_unknown_expert_is_unknown() -> None:
    left, right = batch_of([1, 2, 3], [1, 2, 4])
    batch = [
        replace(left, routes=np.array([[[0, -1]], [[2, 3]]])),
        replace(right, routes=np.array([[[4, 5]], [[-1, 3]]])),
    ]
    routes, _ = resolve_routes(batch, RouteMismatch.EXACT)
    assert [array[:, 0].tolist() for array in routes] == [[[4, 5], [2, 3]], [[4, 5], [2, 3]]]
    alone, _ = resolve_routes(batch[:1], RouteMismatch.EXACT)
    assert alone[0][:, 0].tolist() == [[-1, -1], [2, 3]]


def test_ranks_with_other_routes_disagree() -> None:
    config = PlanConfig(route_mismatch=RouteMismatch.EXACT)
    plans = [build_plan(routed([[1, 2, 3]], [[0, last]]), config) for last in (1, 2)]
    assert plans[0].forest == plans[1].forest
    assert plans[0].digest != plans[1].digest


def test_routes_are_needed_and_of_one_model() -> None:
    plain = batch_of([1, 2, 3])
    with pytest.raises(ValueError, match=r"'g-0' has no routes.*--routing-replay"):
        build_plan(plain, PlanConfig(route_mismatch=RouteMismatch.FIRST))
    batch = [replace(t, routes=np.zeros((2, n, 1), int)) for n, t in enumerate(batch_of([1, 2, 3], [1, 2, 4]), 1)]
    with pytest.raises(ValueError, match=r"'g-1' has routes.*\[2, 1\].*\[1, 1\]"):
        build_plan(batch, PlanConfig(route_mismatch=RouteMismatch.FIRST))
    # Without replay nobody looks.
    assert build_plan(batch, PlanConfig()).routes is None


@st.composite
def routed_batches(draw: st.DrawFn) -> list[Trajectory]:
    """Two variants of a row at most, so that agreement, conflict and missing rows are all common."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    num_layers, conflicts, missing = draw(st.integers(1, 2)), draw(st.sampled_from([0, 0.1])), rng.choice([0, 0.3])
    result = []
    for trajectory in draw(batches()):
        rows = np.tile(np.array([0, 1], np.int32), (len(trajectory) - 1, num_layers, 1))
        rows[rng.random(rows.shape[:2]) < conflicts] = [1, 2]
        swapped = rng.random(rows.shape[:2]) < 0.3
        rows[swapped] = rows[swapped][:, ::-1]
        rows[rng.random(rows.shape[:2]) < missing] = -1
        result.append(replace(trajectory, routes=rows))
    return result


def brute_force_fill(trajectories: Sequence[Trajectory]) -> Routes:
    filled = [np.array(t.routes) for t in trajectories]
    for i, mine in enumerate(trajectories):
        for t, layer in zip(*np.nonzero(filled[i][..., 0] < 0), strict=True):
            donors = [
                (-common(mine, other), j)
                for j, other in enumerate(trajectories)
                if other.group == mine.group
                and common(mine, other) > t < len(other) - 1
                and other.routes is not None
                and other.routes[t, layer, 0] >= 0
            ]
            if donors:
                donor = trajectories[min(donors)[1]].routes
                assert donor is not None
                filled[i][t, layer] = donor[t, layer]
    return filled


def common(left: Trajectory, right: Trajectory) -> int:
    pairs = zip(left.tokens.tolist(), right.tokens.tolist(), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@settings(max_examples=60, deadline=None)
@given(routed_batches(), configs())
def test_any_routes(batch: list[Trajectory], config: PlanConfig) -> None:
    filled = brute_force_fill(batch)
    exact = build_plan(batch, replace(config, route_mismatch=RouteMismatch.EXACT))
    exact.assert_invariants(batch)
    assert exact.routes is not None
    assert all(np.array_equal(a, b) for a, b in zip(exact.routes, filled, strict=True))
    first = build_plan(batch, replace(config, route_mismatch=RouteMismatch.FIRST))
    first.assert_invariants(batch)
    assert first.routes is not None
    num_mismatched = 0
    seen: dict[tuple, int] = {}
    variants: dict[tuple, set] = {}
    counts: dict[tuple, int] = {}
    for i, trajectory in enumerate(batch):
        for t in range(len(trajectory) - 1):
            path = (trajectory.group, tuple(trajectory.tokens[: t + 2].tolist()))
            source = seen.setdefault(path, i)
            assert np.array_equal(np.sort(first.routes[i][t]), np.sort(filled[source][t]))
            variants.setdefault(path, set()).add(np.sort(filled[i][t]).tobytes())
            counts[path] = counts.get(path, 0) + 1
    shared = [path for path, count in counts.items() if count > 1]
    num_mismatched = sum(len(variants[path]) > 1 for path in shared)
    for plan in (exact, first):
        report = plan.route_report
        assert report is not None
        assert (report.num_positions, report.num_mismatched) == (len(shared), num_mismatched)
        assert report.num_filled == sum(
            int(((a[..., 0] >= 0) & (np.asarray(t.routes)[..., 0] < 0)).sum())
            for a, t in zip(filled, batch, strict=True)
        )


@settings(max_examples=40, deadline=None)
@given(routed_batches())
def test_exact_shares_what_agrees_in_tokens_and_routes(batch: list[Trajectory]) -> None:
    routes, _ = resolve_routes(batch, RouteMismatch.EXACT)
    forest = build_forest(batch, routes=routes)
    distinct = {
        (t.group, tuple(t.tokens[: k + 2].tolist()), np.sort(rows[: k + 1]).tobytes())
        for t, rows in zip(batch, routes, strict=True)
        for k in range(len(t) - 1)
    }
    assert forest.computed_tokens == len(distinct)


@settings(max_examples=30, deadline=None)
@given(batches(), configs(), st.booleans())
def test_weights_of_shared_positions(batch: list[Trajectory], config: PlanConfig, replays: bool) -> None:
    """A position counts once per trajectory, and 1/N of each trajectory through it."""
    if replays:
        batch = list(with_routes(batch, RouteShape(1, 1, 4), conflicting=0.2))
        config = replace(config, route_mismatch=RouteMismatch.FIRST)
    omit = {0} if len(batch) > 1 else set()
    plan = build_plan(batch, config, omit=omit)
    arrays = [(m, microbatch_arrays(plan.forest, m, batch, plan.routes)) for rank in plan.ranks for m in rank]
    run = [t for i, t in enumerate(batch) if i not in omit and len(t) > 1]
    assert sum(a.multiplicity.sum() for _, a in arrays) == sum(len(t) - 1 for t in run)
    np.testing.assert_allclose(sum(a.mean_weight.sum() for _, a in arrays), len(run), rtol=1e-12)
    for m, a in arrays:
        is_padding = np.arange(len(a.tokens)) >= m.num_tokens
        assert ((a.segment_of == -1) == is_padding).all()
        assert ((a.multiplicity == 0) == is_padding).all()
        assert ((a.mean_weight == 0) == is_padding).all()
        for place, s in enumerate(m.segments):
            assert (a.multiplicity[a.segment_of == place] == len(plan.forest.segments[s].members)).all()


def test_without_reuse_the_routes_are_resolved_all_the_same() -> None:
    """Dense and shared runs under `first` train the same thing."""
    batch = with_routes(mixed_workload(), RouteShape(2, 2, 8), conflicting=0.1)
    config = PlanConfig(route_mismatch=RouteMismatch.FIRST)
    dense, shared = build_plan(batch, replace(config, prefix_reuse=PrefixReuse.OFF)), build_plan(batch, config)
    assert dense.routes is not None
    assert shared.routes is not None
    assert all(np.array_equal(a, b) for a, b in zip(dense.routes, shared.routes, strict=True))
    dense.assert_invariants(batch)
