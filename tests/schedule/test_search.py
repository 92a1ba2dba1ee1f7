"""Microbatch sizes for a pipeline, and what the simulated pipeline makes of reuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.cost import CostModel
from prefixflow.plan.plan import PlanConfig, PrefixReuse, build_plan
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.search import max_bottleneck, max_makespan, plan_pipeline, predicted_timeline, rank_table
from prefixflow.testing.generate import two_level_groups
from tests.plan.groups import batch_of

# Sixteen groups of eight, 1,000 shared positions of 1,200: f = 0.833.
GROUPS = two_level_groups(16, 8, 1001, 200)


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
    assert searched.config.max_tokens_per_microbatch < 4096


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


@pytest.mark.parametrize("model", ["small", "llama3-8b"])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_reuse_wins_what_the_bottleneck_stage_allows(model: str, num_ranks: int) -> None:
    config = PlanConfig(4096, pipeline_size=num_ranks, cost=CostModel.of_shape(ModelShape.from_name(model)))
    reuse = plan_pipeline(GROUPS, config)
    dense = plan_pipeline(GROUPS, replace(config, prefix_reuse=PrefixReuse.OFF))
    speedup = max_makespan(dense, GROUPS) / max_makespan(reuse, GROUPS)
    bound = max_bottleneck(dense, GROUPS) / max_bottleneck(reuse, GROUPS)
    assert bound > 2.5
    assert speedup >= 0.97 * bound


def test_interleaved_plans_are_filled_with_dummies() -> None:
    trajectories = batch_of(range(10), range(100, 150), range(200, 230))
    plan = build_plan(trajectories, PlanConfig(16, pipeline_size=4, num_chunks=2))
    assert len(plan.ranks[0]) % 4 == 0
    assert plan.num_dummy_microbatches == len(plan.ranks[0]) - plan.num_microbatches > 0
    table = rank_table(plan, 0)
    assert {op.stage for op in table.rows[1]} == {1, 5}
    timeline = predicted_timeline(plan, 0, segment_row_counts(plan.forest, trajectories))
    assert 0 < timeline.efficiency < 1
