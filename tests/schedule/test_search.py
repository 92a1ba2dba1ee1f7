"""Microbatch sizes for a pipeline, and what the simulated pipeline makes of reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prefixflow.importer import ImportOptions, Mode, import_trajectories
from prefixflow.importer.encoders import ByteEncoder
from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.cost import CostModel
from prefixflow.plan.plan import PlanConfig, PrefixReuse, build_plan, pack_plan, share_prefixes
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.search import (
    max_bottleneck,
    max_makespan,
    plan_pipeline,
    predicted_timeline,
    rank_table,
    stage_costs,
)
from prefixflow.testing.generate import stepwise_chains, two_level_groups
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of

# Sixteen groups of eight, 1,000 shared positions of 1,200: f = 0.833.
GROUPS = two_level_groups(16, 8, 1001, 200)
# The same ratio, with attention that outweighs the rest of `small`.
LONG_GROUPS = two_level_groups(16, 8, 5121, 1024)


def test_one_stage_takes_the_budget_as_it_is() -> None:
    config = PlanConfig(256)
    assert plan_pipeline(GROUPS[:8], config) == build_plan(GROUPS[:8], config)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_pipeline_gets_more_microbatches_and_is_no_slower(num_chunks: int) -> None:
    batch = GROUPS[:32]
    config = PlanConfig(4096, pipeline_size=4, num_chunks=num_chunks)
    whole, searched = build_plan(batch, config), plan_pipeline(batch, config)
    searched.assert_invariants(batch)
    assert searched.num_microbatches > whole.num_microbatches
    assert max_makespan(searched, batch) < 0.9 * max_makespan(whole, batch)


def test_without_reuse_no_trajectory_is_cut() -> None:
    config = PlanConfig(4096, pipeline_size=4, prefix_reuse=PrefixReuse.OFF)
    plan = plan_pipeline(GROUPS, config)
    assert plan.config.max_tokens_per_microbatch >= max(len(t) - 1 for t in GROUPS)
    assert {len(s) for s in plan.forest.segments} == {len(t) - 1 for t in GROUPS}


def test_without_reuse_the_search_counts_padding() -> None:
    """Half of the budget is 159 tokens, which would hold a trajectory of 158, but only 152 are a multiple of 8."""
    batch = two_level_groups(8, 2, 129, 30)
    assert {len(t) - 1 for t in batch} == {158}
    config = PlanConfig(318, token_multiple=8, pipeline_size=4, prefix_reuse=PrefixReuse.OFF)
    plan_pipeline(batch, config).assert_invariants(batch)


def speedup_and_bound(
    trajectories: Sequence[Trajectory], model: str, num_ranks: int, max_tokens: int
) -> tuple[float, float]:
    """Simulated, dense 1F1B in a budget that holds the longest trajectory; the bound is of the busiest stage."""
    config = PlanConfig(max_tokens, pipeline_size=num_ranks, cost=CostModel.of_shape(ModelShape.from_name(model)))
    longest = max(len(t) for t in trajectories)
    reuse = plan_pipeline(trajectories, config)
    dense = plan_pipeline(
        trajectories,
        replace(config, prefix_reuse=PrefixReuse.OFF, max_tokens_per_microbatch=max(max_tokens, longest)),
    )
    speedup = max_makespan(dense, trajectories) / max_makespan(reuse, trajectories)
    return speedup, max_bottleneck(dense, trajectories) / max_bottleneck(reuse, trajectories)


@pytest.mark.parametrize("model", ["small", "llama3-8b"])
@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("trajectories", [GROUPS, LONG_GROUPS], ids=["1000 of 1200", "5120 of 6144"])
def test_reuse_wins_what_the_bottleneck_stage_allows(
    trajectories: Sequence[Trajectory], model: str, num_ranks: int
) -> None:
    speedup, bound = speedup_and_bound(trajectories, model, num_ranks, 4096)
    assert bound > 2.5
    assert speedup >= 0.97 * bound


@pytest.mark.parametrize("model", ["small", "llama3-8b"])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_stepwise_samples_win_nearly_as_much(model: str, num_ranks: int) -> None:
    """Conversations of 10 to 25 turns, 5,000 to 6,500 positions of prompt."""
    trajectories = tuple(
        replace(t, id=f"{seed}/{t.id}", group=f"{seed}/{t.group}")
        for seed, turns in enumerate((10, 16, 25, 13))
        for t in stepwise_chains(4, turns, (5000, 6500), (100, 900), seed=seed)
    )
    speedup, bound = speedup_and_bound(trajectories, model, num_ranks, 8192)
    assert bound > 4
    assert speedup >= 0.9 * bound


@pytest.mark.slow
@pytest.mark.parametrize("model", ["small", "llama3-8b"])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_recorded_stepwise_samples_win_nearly_as_much(traces: Path, model: str, num_ranks: int) -> None:
    options = ImportOptions(mode=Mode.STEPS)
    recorded = import_trajectories(traces / "tau_bench_airline.jsonl", ByteEncoder(), options).trajectories
    speedup, bound = speedup_and_bound(tuple(recorded), model, num_ranks, 8192)
    assert bound > 8
    assert speedup >= 0.9 * bound


def test_costs_are_even_where_attention_outweighs_the_rest() -> None:
    """The late half of a prefix costs more a token than the first."""
    cost = CostModel(1.0, 0.5, 1e-3)
    plan = plan_pipeline(LONG_GROUPS, PlanConfig(4096, pipeline_size=4, cost=cost))
    plan.assert_invariants(LONG_GROUPS)
    costs = stage_costs(plan, 0, segment_row_counts(plan.forest, LONG_GROUPS), cost).microbatch_costs()
    assert max(costs) <= 1.1 * sum(costs) / len(costs)
    sizes = [m.num_tokens for m in plan.ranks[0]]
    assert max(sizes) > 2 * sum(sizes) / len(sizes)


@pytest.mark.parametrize(
    ("cost", "layers", "num_pieces"),
    [(CostModel(1.0, 1.0), (), 2), (CostModel(7.0, 4.0), (2, 2, 2, 1), 4), (CostModel(7.0), (2, 2, 2, 1), 10)],
    ids=["even stages", "a smaller last stage", "no head"],
)
def test_a_prefix_is_cut_to_cost_what_a_suffix_costs(cost: CostModel, layers: tuple[int, ...], num_pieces: int) -> None:
    """1,000 positions without a row, then 100 with rows, eight times. Of a suffix on the last of four stages:

    100 * 3 * (1/4 + 1) FLOPs of even layers, as many as 500 prefix positions on any; 100 * 3 * (7 * 1/7 + 4) of one layer
    in seven, as many as 250 prefix positions on two; without a head as many as 100.
    """
    group = two_level_groups(1, 8, 1001, 100)
    config = PlanConfig(4096, pipeline_size=4, cost=cost, stage_layers=layers)
    sharing = share_prefixes(group, config)
    suffix = 300 * (cost.linear + max(0.0, 4 * cost.head if not layers else (7 * cost.head - cost.linear) / 2))
    plan = pack_plan(group, config, sharing, max_cost=suffix)
    assert [m.num_tokens for m in plan.ranks[0]] == [1000 // num_pieces] * num_pieces + [100] * 8
    costs = stage_costs(plan, 0, segment_row_counts(plan.forest, group), cost).microbatch_costs()
    assert max(costs) == pytest.approx(min(costs))


def test_a_batch_without_positions_is_planned() -> None:
    plan = plan_pipeline(batch_of([1], [2]), PlanConfig(16, pipeline_size=2))
    assert plan.num_microbatches == 0


def test_interleaved_plans_are_filled_with_dummies() -> None:
    trajectories = batch_of(range(10), range(100, 150), range(200, 230))
    plan = build_plan(trajectories, PlanConfig(16, pipeline_size=4, num_chunks=2))
    assert len(plan.ranks[0]) % 4 == 0
    assert plan.num_dummy_microbatches == len(plan.ranks[0]) - plan.num_microbatches > 0
    table = rank_table(plan, 0)
    assert {op.stage for op in table.rows[1]} == {1, 5}
    timeline = predicted_timeline(plan, 0, segment_row_counts(plan.forest, trajectories))
    assert 0 < timeline.efficiency < 1
