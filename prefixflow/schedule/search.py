"""Choose microbatch sizes for a pipeline by simulating its table.

A pipeline wants many microbatches of equal cost, a GPU wants large ones. Candidates are the token budget divided by small
numbers; each is packed and simulated, operation overhead included, and the shortest makespan of the slowest data-parallel
rank wins. One stage has no bubble: the budget itself is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.plan import Plan, PlanConfig, PrefixReuse, pack_plan, share_prefixes
from prefixflow.schedule.predict import StageCosts
from prefixflow.schedule.simulate import Timeline
from prefixflow.schedule.table import build_table
from prefixflow.trajectories.types import Trajectory

BUDGET_DIVISORS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
SMALLEST_BUDGET_TOKENS = 32
# More microbatches than this per pipeline rank leave less than 2 % of bubble, and only add overhead.
ENOUGH_MICROBATCHES_PER_RANK = 64


def plan_pipeline(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    *,
    num_ranks: int = 1,
    num_chunks: int = 1,
    omit: Collection[int] = (),
) -> Plan:
    """The plan for `num_ranks` pipeline ranks with `num_chunks` model chunks each; errors as `build_plan`."""
    sharing = share_prefixes(trajectories, config, omit=omit)
    plan = pack_plan(trajectories, config, sharing)
    if num_ranks == 1:
        return plan
    best = max_makespan(plan, trajectories, num_ranks, num_chunks)
    longest = max((len(s) for s in sharing.forest.segments), default=0)
    for divisor in BUDGET_DIVISORS[1:]:
        tokens = config.max_tokens_per_microbatch // divisor
        too_short = config.prefix_reuse is PrefixReuse.OFF and tokens < longest
        enough = plan.num_microbatches >= ENOUGH_MICROBATCHES_PER_RANK * num_ranks * config.data_parallel_size
        if tokens < max(SMALLEST_BUDGET_TOKENS, config.token_multiple) or too_short or enough:
            break
        candidate = pack_plan(trajectories, replace(config, max_tokens_per_microbatch=tokens), sharing)
        makespan = max_makespan(candidate, trajectories, num_ranks, num_chunks)
        if makespan < best:
            plan, best = candidate, makespan
    return plan


def predicted_timeline(
    plan: Plan, data_rank: int, rows: Sequence[int], num_ranks: int, num_chunks: int
) -> Timeline:
    """Simulated step of one data-parallel rank's pipeline; `rows[i]` head rows of segment i."""
    microbatches = plan.ranks[data_rank]
    table = build_table([m.reads for m in microbatches], num_ranks=num_ranks, num_chunks=num_chunks)
    costs = StageCosts.of(plan.forest, microbatches, rows, plan.config.cost, num_ranks * num_chunks)
    return costs.timeline(table)


def max_makespan(plan: Plan, trajectories: Sequence[Trajectory], num_ranks: int, num_chunks: int) -> float:
    """Makespan of the slowest data-parallel rank, in FLOPs of one pipeline rank."""
    rows = segment_row_counts(plan.forest, trajectories)
    return max(
        predicted_timeline(plan, rank, rows, num_ranks, num_chunks).makespan for rank in range(len(plan.ranks))
    )
