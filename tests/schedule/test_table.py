"""Orders and tables: properties over random graphs, strings by hand, mutants."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan.plan import PlanConfig, build_plan
from prefixflow.schedule import table as scheduling
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.order import backward_order, forwards_needed, lead
from prefixflow.schedule.simulate import Timeline, simulate
from prefixflow.schedule.table import (
    LeadPolicy,
    OpTable,
    build_forward_table,
    build_table,
    last_backwards,
    validate,
)
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batches, configs
from tests.schedule.graphs import Reads, depth, forests, is_deadlock_free

TWO_GROUPS: Reads = [(), (0,), (0,), (), (3,), (3,)]
DEEP: Reads = [(), (0,), (0, 1), (1,), (0,)]


def text(table: OpTable) -> list[str]:
    return [" ".join(f"{op.kind.value}{op.microbatch}" for op in row) for row in table.rows]


def test_backward_order_by_hand() -> None:
    """Post-order with children in forward order, not pre-order reversed."""
    assert backward_order(TWO_GROUPS) == (1, 2, 0, 4, 5, 3)
    assert backward_order(DEEP) == (2, 3, 1, 4, 0)
    assert backward_order([(), (), ()]) == (0, 1, 2)
    assert backward_order([]) == ()


def test_need_and_lead_by_hand() -> None:
    assert forwards_needed((1, 2, 0, 4, 5, 3)) == (2, 3, 3, 5, 6, 6)
    assert lead((2, 3, 3, 5, 6, 6)) == 2
    assert lead(()) == 0


def test_a_reader_before_what_it_reads_is_our_own_error() -> None:
    with pytest.raises(AssertionError, match="microbatch 0 reads 1, which runs later"):
        backward_order([(1,), ()])


def test_one_stage_is_lazy() -> None:
    """Phases A, B and C of each group; one leaf alive at a time."""
    assert text(build_table(TWO_GROUPS)) == ["F0 F1 B1 F2 B2 B0 F3 F4 B4 F5 B5 B3"]


def test_two_stages_by_hand() -> None:
    """W = 2: the last stage runs N(k) = 2, 3, 4, 5, 6, 6 forwards, the first one more."""
    table = build_table(TWO_GROUPS, num_ranks=2, policy=LeadPolicy.CONSTANT)
    assert text(table) == [
        "F0 F1 F2 B1 F3 B2 F4 B0 F5 B4 B5 B3",
        "F0 F1 B1 F2 B2 F3 B0 F4 B4 F5 B5 B3",
    ]


def one_forward_one_backward(n: int, num_stages: int, stage: int) -> str:
    """Megatron's 1F1B: p - 1 - s warm-up forwards, then forward and backward in turn, then the rest."""
    warmup = min(num_stages - 1 - stage, n)
    cells = [f"F{m}" for m in range(warmup)]
    for m in range(n - warmup):
        cells += [f"F{warmup + m}", f"B{m}"]
    return " ".join([*cells, *(f"B{m}" for m in range(n - warmup, n))])


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("policy", [*LeadPolicy, None])
def test_flat_list_is_1f1b(n: int, num_stages: int, policy: LeadPolicy | None) -> None:
    table = build_table([()] * n, num_ranks=num_stages, policy=policy)
    assert text(table) == [one_forward_one_backward(n, num_stages, s) for s in range(num_stages)]


def forwards_before_backwards(row: tuple[Op, ...]) -> list[int]:
    kinds = [op.kind for op in row]
    return [kinds[:place].count(Kind.FORWARD) for place, kind in enumerate(kinds) if kind is Kind.BACKWARD]


@settings(max_examples=100, deadline=None)
@given(
    forests(),
    st.integers(1, 5),
    st.sampled_from([*LeadPolicy, None]),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_any_table_is_valid(reads: Reads, num_stages: int, policy: LeadPolicy | None, window: int | None) -> None:
    table = build_table(reads, num_ranks=num_stages, policy=policy, window=window)
    validate(table)
    assert is_deadlock_free(table)
    assert OpTable.from_csv(table.to_csv(), reads) == table
    n, last = len(reads), forwards_before_backwards(table.rows[-1])
    need = forwards_needed(backward_order(reads))
    assert all(got >= needed for got, needed in zip(last, need, strict=True))
    most_alive = max((at - k for k, at in enumerate(last)), default=0)
    for stage, row in enumerate(table.rows):
        ahead = num_stages - 1 - stage
        got = forwards_before_backwards(row)
        assert got == [min(n, max(at + ahead, last[min(k + ahead, n - 1)])) for k, at in enumerate(last)]
        assert max((at - k for k, at in enumerate(got)), default=0) <= min(most_alive + ahead, n)
        assert {op.stage for op in row} <= {stage}


@settings(max_examples=50, deadline=None)
@given(forests(), st.integers(1, 5))
def test_policies_keep_their_formulas(reads: Reads, window: int) -> None:
    need = forwards_needed(backward_order(reads))
    n, w = len(need), lead(need)
    constant, lazy, windowed = (
        forwards_before_backwards(build_table(reads, policy=p, window=window).rows[0])
        for p in (LeadPolicy.CONSTANT, LeadPolicy.LAZY, LeadPolicy.WINDOWED)
    )
    assert constant == [min(n, k + w) for k in range(n)]
    assert lazy == list(need)
    near = [k + max(need[j] - j for j in range(k, min(k + window, n))) for k in range(n)]
    assert windowed == [min(n, max(near[: k + 1])) for k in range(n)]
    assert all(a <= b <= c for a, b, c in zip(lazy, windowed, constant, strict=True))


@settings(max_examples=50, deadline=None)
@given(forests())
def test_lead_is_at_most_the_depth(reads: Reads) -> None:
    assert lead(forwards_needed(backward_order(reads))) <= depth(reads)


def test_last_backwards_of_interleaved_stages() -> None:
    # Both microbatches read none; chunks end in reversed order.
    table = build_table([(), ()], num_ranks=2, num_chunks=2)
    assert [{s: str(op) for s, op in last_backwards(row).items()} for row in table.rows] == [
        {2: "2B1", 0: "0B1"},
        {3: "3B1", 1: "1B1"},
    ]
    assert last_backwards(()) == {}


@settings(max_examples=50, deadline=None)
@given(forests(), st.integers(1, 4))
def test_forward_table_is_valid(reads: Reads, num_stages: int) -> None:
    table = build_forward_table(reads, num_ranks=num_stages)
    validate(table, training=False)
    assert len(table.rows) == num_stages


@settings(max_examples=40, deadline=None)
@given(batches(), configs(), st.integers(1, 4))
def test_tables_of_plans_are_valid(trajectories: list[Trajectory], config: PlanConfig, num_stages: int) -> None:
    for rank in build_plan(trajectories, config).ranks:
        table = build_table([m.reads for m in rank], num_ranks=num_stages)
        validate(table)
        assert is_deadlock_free(table)


def table_of(*rows: str, reads: Reads = TWO_GROUPS) -> OpTable:
    cells = (",".join(f"{stage}{cell}" for cell in row.split()) + "\n" for stage, row in enumerate(rows))
    return OpTable.from_csv("".join(cells), reads)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("F1 F0 B1 F2 B2 B0 F3 F4 B4 F5 B5 B3", "0F1 cannot run here, it needs 0F0 before it"),
        ("F0 F1 B1 B0 F2 B2 F3 F4 B4 F5 B5 B3", "0B0 cannot run here, it needs 0B2 before it"),
        ("F0 B1 F1 F2 B2 B0 F3 F4 B4 F5 B5 B3", "0B1 cannot run here, it needs 0F1 before it"),
        ("F0 F1 B1 F1 F2 B2 B0 F3 F4 B4 F5 B5 B3", "0F1 cannot run here, it has run already"),
        ("F0 F1 B1 F2 B2 B0 F3 F4 B4 F5 B5", "misses or must not have 0B3"),
        ("F0 F6", "there are only 6 microbatches"),
        ("", "misses or must not have 0B0"),
    ],
)
def test_validate_refuses(row: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        validate(table_of(row))


def test_validate_points_at_the_cell() -> None:
    with pytest.raises(ValueError, match="Rank 0, operation 3") as caught:
        validate(table_of("F0 F1 B1 B0 F2 B2 F3 F4 B4 F5 B5 B3"))
    _, drawn, arrow = str(caught.value).splitlines()
    assert drawn[arrow.index("^") : arrow.index("^") + arrow.count("^")] == "0B0"


def test_validate_refuses_a_stage_on_two_ranks() -> None:
    row = build_table(TWO_GROUPS).rows[0]
    with pytest.raises(ValueError, match="stage 0 stands on rank 0 too"):
        validate(OpTable((row, row), tuple(TWO_GROUPS)))


def test_validate_refuses_backwards_in_a_forward_table() -> None:
    with pytest.raises(ValueError, match="must not have"):
        validate(build_table(TWO_GROUPS), training=False)


@pytest.mark.parametrize("wrong", [lambda reads, _: tuple(range(len(reads))), lambda *_: (1, 2, 0, 4, 3, 5)])
def test_a_broken_order_is_seen(wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards in forward order, or a prefix before its last reader."""
    monkeypatch.setattr(scheduling, "backward_order", wrong)
    with pytest.raises(ValueError, match="cannot run here, it needs 0B"):
        validate(build_table(TWO_GROUPS))


def test_a_broken_count_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward too few before each backward."""
    monkeypatch.setattr(scheduling, "_forwards_before", lambda need, *_: [n - 1 for n in need])
    with pytest.raises(ValueError, match="0B1 cannot run here, it needs 0F1"):
        validate(build_table(TWO_GROUPS))


def test_the_simulation_sees_a_deadlock() -> None:
    """A first stage that runs no forward more than the last one waits for it, and it for the first."""
    table = build_table([()] * 3, num_ranks=2)
    swapped = replace(table, rows=(table_of("F0 B0 F1 B1 F2 B2").rows[0], table_of("", "F0 F1 B0 B1 F2 B2").rows[1]))
    assert not is_deadlock_free(swapped)


@settings(max_examples=60, deadline=None)
@given(
    forests(40),
    st.sampled_from([(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 4)]),
    st.sampled_from([LeadPolicy.CONSTANT, LeadPolicy.WINDOWED]),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_any_pipeline_finishes(reads: Reads, size: tuple[int, int], policy: LeadPolicy, window: int | None) -> None:
    """Valid on every rank, and the ranks never wait for each other for ever; dummies fill interleaved blocks."""
    num_ranks, num_chunks = size
    if num_chunks > 1:
        reads = reads + [()] * (-len(reads) % num_ranks)
    table = build_table(reads, num_ranks=num_ranks, num_chunks=num_chunks, policy=policy, window=window)
    validate(table)
    timeline = simulate(table, duration)
    assert [tuple(op for op, _, _ in row) for row in timeline.spans] == list(table.rows)


def duration(op: Op) -> float:
    return 1.0 if op.kind is Kind.FORWARD else 2.0


def groups_of_depths(depths: Sequence[int], num_microbatches: int) -> Reads:
    """One group per depth: a chain of that many writers, and leaves up to `num_microbatches`."""
    reads: Reads = []
    for num_writers in depths:
        path: tuple[int, ...] = ()
        for place in range(num_microbatches):
            reads.append(path)
            path = (*path, len(reads) - 1) if place < num_writers else path
    return reads


def mean_alive(timeline: Timeline) -> float:
    """Microbatches between their F and their B, averaged over the step and the ranks."""
    held = 0.0
    for row in timeline.spans:
        started = {op.microbatch: start for op, start, _ in row if op.kind is Kind.FORWARD}
        held += sum(end - started[op.microbatch] for op, _, end in row if op.kind is Kind.BACKWARD)
    return held / timeline.makespan / len(timeline.spans)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("order", ["deepest first", "shuffled"])
def test_the_window_keeps_fewer_alive_at_the_same_speed(num_ranks: int, order: str) -> None:
    """Groups of depth 1 to 20."""
    depths = list(range(20, 0, -1))
    if order == "shuffled":
        random.Random(0).shuffle(depths)
    reads = groups_of_depths(depths, 24)
    constant, windowed = (
        simulate(build_table(reads, num_ranks=num_ranks, policy=policy), duration)
        for policy in (LeadPolicy.CONSTANT, LeadPolicy.WINDOWED)
    )
    assert windowed.efficiency >= 0.95
    assert windowed.efficiency >= 0.999 * constant.efficiency
    assert mean_alive(windowed) <= 0.6 * mean_alive(constant)
