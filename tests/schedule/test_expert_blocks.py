"""Ranks that exchange tokens run the same operations in the same order, however unlike their work is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from prefixflow.plan import plan as planning
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.schedule.ops import Kind
from prefixflow.schedule.search import block_reads, rank_table, tables_digest
from prefixflow.schedule.simulate import simulate
from prefixflow.schedule.table import OpTable, validate
from prefixflow.testing.generate import stepwise_chains, two_level_groups
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of

PIPELINES = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]


def one_against_nine() -> list[Trajectory]:
    """A deep chain that costs as much as nine small groups, so that it alone is one rank's work."""
    chain = stepwise_chains(1, 9, prompt_tokens=60, turn_tokens=12)
    return [*chain, *two_level_groups(9, 3, prefix_tokens=8, suffix_tokens=6)]


def tables(plan: Plan, *, training: bool = True) -> set[tuple]:
    return {rank_table(plan, rank, training=training).rows for rank in range(len(plan.ranks))}


@pytest.mark.parametrize(("num_ranks", "num_chunks"), PIPELINES)
def test_one_group_against_nine(num_ranks: int, num_chunks: int) -> None:
    batch = one_against_nine()
    config = PlanConfig(32, data_parallel_size=2, pipeline_size=num_ranks, num_chunks=num_chunks, expert_block=2)
    plan = build_plan(batch, config)
    plan.assert_invariants(batch)
    assert sorted(map(len, plan.trees)) == [1, 9]
    apart = build_plan(batch, replace(config, expert_block=1))
    assert len(tables(apart)) == 2, "without the rule they differ, so this batch tests it"
    assert len(tables(plan)) == len(tables(plan, training=False)) == 1
    for rank in range(2):
        own = [m.reads for m in plan.ranks[rank]]
        validate(replace(rank_table(plan, rank), reads=tuple(own)))
        simulate(rank_table(plan, rank), lambda op: 1.0)


@pytest.mark.parametrize(("num_ranks", "num_chunks"), PIPELINES)
def test_a_rank_without_a_tree_runs_dummies(num_ranks: int, num_chunks: int) -> None:
    batch = batch_of([1, 2, 3, 4, 5, 6])
    config = PlanConfig(2, data_parallel_size=2, pipeline_size=num_ranks, num_chunks=num_chunks, expert_block=2)
    plan = build_plan(batch, config)
    plan.assert_invariants(batch)
    busy, idle = plan.ranks
    assert len(busy) == len(idle) >= 3
    assert all(m.is_dummy for m in idle)
    assert not busy[0].is_dummy
    assert plan.num_dummy_microbatches == len(busy) + len(idle) - plan.num_microbatches
    assert len(tables(plan)) == 1


def test_ranks_of_alike_numbers_of_microbatches_make_a_block() -> None:
    assert planning._block_order([1, 5, 2, 4], 2) == [1, 3, 2, 0]
    assert planning._block_order([1, 5, 2, 4], 1) == [0, 1, 2, 3]


def test_work_is_spread_rather_than_filled_with_dummies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain of large turns needs many microbatches; as much work in small pieces fits fewer, and is spread."""
    chain = stepwise_chains(1, 5, prompt_tokens=20, turn_tokens=20)
    batch = [*chain, *two_level_groups(20, 1, prefix_tokens=4, suffix_tokens=4)]
    config = PlanConfig(36, data_parallel_size=2, expert_block=2)
    spread = build_plan(batch, config)
    monkeypatch.setattr(planning, "_spread_over", lambda packed, *_: packed)
    filled = build_plan(batch, config)
    assert filled.num_dummy_microbatches > 0 == spread.num_dummy_microbatches
    assert len(spread.ranks[0]) == len(filled.ranks[0])
    spread.assert_invariants(batch)


def test_allgather_needs_equal_tokens() -> None:
    batch = one_against_nine()
    config = PlanConfig(32, data_parallel_size=2, expert_block=2, token_multiple=2, equal_tokens=True)
    plan = build_plan(batch, config)
    plan.assert_invariants(batch)
    assert len({m.num_physical_tokens for rank in plan.ranks for m in rank}) == 1
    loose = build_plan(batch, replace(config, equal_tokens=False))
    assert len({m.num_physical_tokens for rank in loose.ranks for m in rank}) > 1
    assert plan.digest != loose.digest


def test_microbatches_that_meet_in_forward_meet_in_backward() -> None:
    """Alone each rank would run the backwards of its own trees first: 2 1 0 3 against 1 0 3 2."""
    plan = build_plan(one_against_nine(), PlanConfig(32, data_parallel_size=2, expert_block=2))
    reads = ((), (0,), (1,), ()), ((), (0,), (), (2,))
    ranks = tuple(
        tuple(replace(m, cached=(), reads=r) for m, r in zip(rank, of_rank, strict=False))
        for rank, of_rank in zip(plan.ranks, reads, strict=True)
    )
    plan = replace(plan, ranks=ranks)
    assert block_reads(plan, 0) == block_reads(plan, 1) == [(), (0,), (1,), (2,)]
    (rows,) = tables(plan)
    assert [op.microbatch for op in rows[0] if op.kind is Kind.BACKWARD] == [3, 2, 1, 0]
    assert tables_digest(plan) != tables_digest(replace(plan, ranks=(ranks[0], ranks[0])))


def most_alive(table: OpTable) -> int:
    """Microbatches between their F and their B at once, on the first pipeline rank."""
    changes = [1 if op.kind is Kind.FORWARD else -1 for op in table.rows[0]]
    return max(accumulate(changes))


def test_trees_that_begin_together_keep_few_microbatches_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = two_level_groups(24, 6, prefix_tokens=(20, 60), suffix_tokens=(5, 15))
    config = PlanConfig(32, data_parallel_size=4, expert_block=4)
    plan = build_plan(batch, config)
    alone = max(most_alive(rank_table(build_plan(batch, replace(config, expert_block=1)), rank)) for rank in range(4))
    assert most_alive(rank_table(plan, 0)) <= 2 * alone
    monkeypatch.setattr(planning, "aligned_places", one_after_another)
    assert most_alive(rank_table(build_plan(batch, config), 0)) > 4 * alone


def one_after_another(ranks: Sequence[Sequence[Microbatch]]) -> tuple[tuple[tuple[int, ...], ...], int]:
    return tuple(tuple(range(len(rank))) for rank in ranks), max(map(len, ranks))


def test_blocks_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="3 data-parallel ranks do not divide into blocks of 2"):
        PlanConfig(data_parallel_size=3, expert_block=2)
    assert PlanConfig(data_parallel_size=6, expert_block=3).block_of(4) == range(3, 6)
