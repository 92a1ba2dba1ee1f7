"""From any batch to every rank's table: what holds whatever is shared, merged, folded, split over ranks or searched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan import plan as planning
from prefixflow.plan.cost import SharingOverhead
from prefixflow.plan.fold import fold_small_segments
from prefixflow.plan.plan import MergeGroups, Plan, PlanConfig, PrefixReuse
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.search import block_reads, plan_pipeline, rank_table
from prefixflow.schedule.simulate import simulate
from prefixflow.schedule.table import OpTable, validate
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batches, configs, omitted_of

PIPELINES = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)]


@st.composite
def step_configs(draw: st.DrawFn, trajectories: Sequence[Trajectory]) -> PlanConfig:
    """Any reuse mode, merged or not, on any pipeline; without reuse the budget holds the longest trajectory."""
    config = draw(configs())
    reuse = draw(st.sampled_from(PrefixReuse))
    longest = max(len(t) for t in trajectories) + config.token_multiple if reuse is PrefixReuse.OFF else 0
    pipeline_size, num_chunks = draw(st.sampled_from(PIPELINES))
    blocks = [n for n in range(1, config.data_parallel_size + 1) if config.data_parallel_size % n == 0]
    return replace(
        config,
        max_tokens_per_microbatch=max(config.max_tokens_per_microbatch, longest),
        pipeline_size=pipeline_size,
        num_chunks=num_chunks,
        expert_block=draw(st.sampled_from(blocks)),
        equal_tokens=draw(st.booleans()),
        prefix_reuse=reuse,
        merge_groups=draw(st.sampled_from(MergeGroups)),
    )


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_any_batch_has_a_valid_step(trajectories: list[Trajectory], data: st.DataObject) -> None:
    """Thresholds in tokens are lowered to the size of these batches, so that each choice is taken both ways."""
    config, omit = data.draw(step_configs(trajectories)), data.draw(omitted_of(trajectories))
    overhead = SharingOverhead(data.draw(st.sampled_from([0, 2, 16])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MERGED_PREFIX_TOKENS", data.draw(st.integers(1, 64)))
        patch.setattr(planning, "fold_small_segments", lambda forest, *_: fold_small_segments(forest, overhead))
        plan = plan_pipeline(trajectories, config, omit=omit)
        on_another_rank = plan_pipeline([replace(t) for t in trajectories], config, omit=set(omit))
    assert on_another_rank.digest == plan.digest
    plan.assert_invariants(trajectories)
    assert_blocks_run_one_table(plan)
    for rank, microbatches in enumerate(plan.ranks):
        assert all(m.num_physical_tokens <= config.max_tokens_per_microbatch for m in microbatches)
        assert config.num_chunks == 1 or len(microbatches) % config.pipeline_size == 0
        assert_finishes(rank_table(plan, rank))
        forwards = rank_table(plan, rank, training=False)
        validate(forwards, training=False)
        simulate(forwards, duration)


def assert_blocks_run_one_table(plan: Plan) -> None:
    for rank, microbatches in enumerate(plan.ranks):
        assert rank_table(plan, rank) == rank_table(plan, plan.config.block_of(rank)[0])
        assert all(set(m.reads) <= set(reads) for m, reads in zip(microbatches, block_reads(plan, rank), strict=True))


def assert_finishes(table: OpTable) -> None:
    validate(table)
    timeline = simulate(table, duration)
    assert [tuple(op for op, _, _ in row) for row in timeline.spans] == list(table.rows)


def duration(op: Op) -> float:
    return 1.0 if op.kind is Kind.FORWARD else 2.0


PLAN_IN_A_NEW_PROCESS = """
from prefixflow.plan.plan import MergeGroups, Plan, PlanConfig, PrefixReuse
from prefixflow.schedule.search import plan_pipeline
from prefixflow.testing.generate import mixed_workload
config = PlanConfig(64, data_parallel_size=3, pipeline_size=2, prefix_reuse=PrefixReuse.AUTO, merge_groups=MergeGroups.AUTO)
print(plan_pipeline(mixed_workload(), config).digest)
"""


def test_processes_that_hash_differently_make_one_plan() -> None:
    """Ranks share no hash seed: a plan that depended on the order of a set of texts would differ between them."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", PLAN_IN_A_NEW_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert digests != {""}
