"""Loss calls: backwards wait for all forwards of the calls that they take part in, on every rank, and no longer than that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan.batch import microbatch_arrays
from prefixflow.plan.plan import Plan, PlanConfig, PrefixReuse, build_plan
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.context import fit_with_context
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.ops import Kind
from prefixflow.schedule.order import backward_order, forwards_needed
from prefixflow.schedule.search import plan_pipeline, rank_table
from prefixflow.schedule.simulate import simulate
from prefixflow.schedule.table import LeadPolicy, OpTable, build_table, validate
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, batches, configs, trajectory
from tests.schedule.graphs import Reads, forests

PIPELINES = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]


def assert_calls_are_scored(table: OpTable, together: Sequence[set[int]]) -> None:
    """B(m) of the last stage follows F there of all of `together[m]`; and the ranks do not wait for each other for ever."""
    last_stage = max((op.stage for row in table.rows for op in row), default=0)
    scored: set[int] = set()
    for op in table.rows[-1]:
        if op.stage == last_stage and op.kind is Kind.FORWARD:
            scored.add(op.microbatch)
        elif op.stage == last_stage:
            assert together[op.microbatch] <= scored, f"{op} runs before all of its loss calls are scored"
    validate(table)
    simulate(table, lambda op: 1.0 + (op.stage * 7 + op.microbatch * 3) % 5)


@settings(max_examples=150, deadline=None)
@given(forests(), st.sampled_from(PIPELINES), st.sampled_from([None, *LeadPolicy]), st.data())
def test_a_backward_waits_for_its_calls(
    reads: Reads, pipeline: tuple[int, int], policy: LeadPolicy | None, data: st.DataObject
) -> None:
    num_ranks, num_chunks = pipeline
    if num_chunks > 1:
        reads = [*reads, *[()] * (-len(reads) % num_ranks)]
        policy = None
    numbers = st.sets(st.integers(0, 5), max_size=2)
    calls = [data.draw(numbers) for _ in reads]
    together = [{k for k, other in enumerate(calls) if other & own} for own in calls]
    after = [max(ms, default=-1) + 1 for ms in together]
    table = build_table(reads, num_ranks=num_ranks, num_chunks=num_chunks, policy=policy, after=after)
    assert_calls_are_scored(table, together)


def linear_extensions(reads: Reads) -> Iterator[tuple[int, ...]]:
    """All orders in which every microbatch follows its readers."""

    def extend(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == len(reads):
            yield done
        for m in range(len(reads)):
            if m not in done and all(reader in done for reader, read in enumerate(reads) if m in read):
                yield from extend((*done, m))

    return extend(())


@settings(max_examples=60, deadline=None)
@given(forests(max_size=5), st.data())
def test_no_order_of_backwards_needs_fewer_forwards(reads: Reads, data: st.DataObject) -> None:
    after = [data.draw(st.integers(0, len(reads))) for _ in reads]
    need = forwards_needed(backward_order(reads, after), after)
    for order in linear_extensions(reads):
        assert all(ours <= other for ours, other in zip(need, forwards_needed(order, after), strict=True))


def test_a_call_holds_up_no_others() -> None:
    """The first and the last of four are one call: the two between go first."""
    table = build_table([()] * 4, after=[4, 0, 0, 4])
    assert table.to_csv() == "0F0,0F1,0B1,0F2,0B2,0F3,0B0,0B3\n"
    with pytest.raises(ValueError, match="0B0 cannot run here, it needs 0F1, 0F2, 0F3"):
        validate(replace(build_table([()] * 4), after=(4, 0, 0, 4)))


@settings(max_examples=100, deadline=None)
@given(batches(), configs(), st.sampled_from(PIPELINES), st.data())
def test_any_placed_batch_with_calls_has_a_valid_step(
    trajectories: list[Trajectory], config: PlanConfig, pipeline: tuple[int, int], data: st.DataObject
) -> None:
    blocks = [n for n in range(1, config.data_parallel_size + 1) if config.data_parallel_size % n == 0]
    reuse = data.draw(st.sampled_from(PrefixReuse))
    budget = max(len(t) for t in trajectories) + config.token_multiple if reuse is PrefixReuse.OFF else 0
    config = replace(
        config,
        max_tokens_per_microbatch=max(config.max_tokens_per_microbatch, budget),
        prefix_reuse=reuse,
        pipeline_size=pipeline[0],
        num_chunks=pipeline[1],
        expert_block=data.draw(st.sampled_from(blocks)),
    )
    # As a framework does it: all in one group, whole calls dealt to ranks.
    if data.draw(st.booleans()):
        trajectories = [replace(t, group="-") for t in trajectories]
    joint = [data.draw(st.integers(0, 4)) for _ in trajectories]
    rank_of_call = [data.draw(st.integers(0, config.data_parallel_size - 1)) for _ in range(5)]
    placement = [rank_of_call[call] for call in joint]
    plan = plan_pipeline(trajectories, config, placement=placement, joint=joint)
    plan.assert_invariants(trajectories)
    assert plan.split_loss_tokens == 0
    assert plan.num_microbatches >= len({placement[m] for s in plan.forest.segments for m in s.members})
    for rank, microbatches in enumerate(plan.ranks):
        runs = {m for b in microbatches for s in b.segments for m in plan.forest.segments[s].members}
        assert runs == {i for i, given in enumerate(placement) if given == rank and len(trajectories[i]) > 1}
        assert_calls_are_scored(rank_table(plan, rank), scored_together(plan, rank, trajectories))
        # A call of a single trajectory waits for nothing that its path does not wait for anyway.
        alone, own = (replace(plan, joint=joint) for joint in (tuple(range(len(trajectories))), None))
        assert rank_table(alone, rank).rows == rank_table(own, rank).rows


def scored_together(plan: Plan, rank: int, trajectories: Sequence[Trajectory]) -> list[set[int]]:
    """Microbatches with rows of the loss calls that each has rows of, on any rank that exchanges tokens with `rank`."""
    assert plan.joint is not None
    together: list[set[int]] = [set() for _ in plan.ranks[rank]]
    for other in plan.config.block_of(rank):
        arrays = (microbatch_arrays(plan.forest, m, trajectories) for m in plan.ranks[other])
        calls = [{plan.joint[i] for i in a.entry_trajectory.tolist()} for a in arrays]
        for m, own in enumerate(calls):
            together[m] |= {k for k, others in enumerate(calls) if others & own}
    return together


GROUPS = [[first, *range(50, 50 + length), i] for first, length in ((1, 30), (2, 20), (3, 40)) for i in range(4)]


@pytest.mark.parametrize("budget", [16, 40, 64, 1000])
@pytest.mark.parametrize("reuse", PrefixReuse)
def test_one_group_of_everything_is_planned_like_the_groups_in_it(budget: int, reuse: PrefixReuse) -> None:
    """Trajectories that share nothing bind nothing together, and under `auto` neither do those that share a short start."""
    budget = budget if reuse is not PrefixReuse.OFF else 1000
    config = PlanConfig(budget, data_parallel_size=2, prefix_reuse=reuse)
    start = [7, 8, 9] if reuse is PrefixReuse.AUTO else []
    batch = [trajectory([*start, *tokens], name=f"t{i}", group=f"g{tokens[0]}") for i, tokens in enumerate(GROUPS)]
    apart = build_plan(batch, config)
    together = build_plan([replace(t, group="-") for t in batch], config)
    assert together.ranks == apart.ranks
    assert together.forest.segments == apart.forest.segments
    assert together.forest.num_shared_segments == (0 if reuse is PrefixReuse.OFF else 3)


def test_a_placement_is_kept_and_nothing_is_shared_across_it() -> None:
    batch = batch_of(*([1, 2, 3, 4, i] for i in range(4)), [5])
    plan = build_plan(
        batch, PlanConfig(64, data_parallel_size=4, expert_block=2), placement=[3, 3, 1, 3, 0], joint=range(5)
    )
    held = [sorted(m for s in b.segments for m in plan.forest.segments[s].members) for (b, *_) in plan.ranks[1:]]
    assert [len(rank) for rank in plan.ranks] == [1, 1, 1, 1]
    assert set(held[0]) == {2}
    assert set(held[1]) == set()
    assert set(held[2]) == {0, 1, 3}
    assert plan.forest.num_shared_segments == 1
    # Rank 3 has three trajectories of a length, rank 1 has one of them.
    assert plan.baseline_rank_load == pytest.approx(3 * plan.rank_loads[1])


def test_loss_calls_are_in_the_digest() -> None:
    batch, config = batch_of([1, 2, 3], [1, 2, 4]), PlanConfig(64)
    digests = {build_plan(batch, config, joint=joint).digest for joint in (None, [0, 0], [0, 1], [1, 0])}
    assert len(digests) == 4
    assert build_plan(batch, config, joint=[0, 0]).joint == (0, 0)


BATCH = batch_of([1, 2, 3], [1, 2, 4], [1, 2, 5])


def test_a_memory_budget_keeps_placement_and_calls() -> None:
    config, memory = PlanConfig(64, data_parallel_size=2), MemoryModel(ModelShape.from_name("tiny"))
    rules: dict[str, Any] = {"placement": [1, 0, 1], "joint": [3, 2, 3]}
    fit, _ = fit_with_context(BATCH, config, memory, 1 << 40, None, **rules)
    assert fit.plan == build_plan(BATCH, config, **rules)
    assert fit.plan.placement == (1, 0, 1)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"placement": [0, 1]}, "placement: expected a data-parallel rank for each of 3 trajectories, got 2"),
        ({"placement": [0, 1, 2]}, "placement: expected data-parallel ranks from 0 to 1, got 2"),
        ({"placement": [0, -1, 1]}, "placement: expected data-parallel ranks from 0 to 1, got -1"),
        ({"joint": [0, 0, 0]}, "a loss call is made on one data-parallel rank, .* any of 2; give their placement"),
        ({"joint": [0, 0], "placement": [0, 0, 0]}, "joint: expected a loss call for each of 3 trajectories, got 2"),
        ({"joint": [0, 5, 5], "placement": [0, 1, 0]}, "loss call 5 has trajectories on data-parallel ranks 1 and 0"),
        (
            {"joint": [0, 0, 1], "placement": [0, 0, 1], "omit": [1]},
            "trajectory 'g-1' is omitted, but loss call 0 reads",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(rules: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_plan(BATCH, PlanConfig(64, data_parallel_size=2), **rules)
