"""Choose microbatch costs for a pipeline by simulating its table.

A pipeline wants many microbatches of equal cost, a GPU wants large ones. The first candidate is packed for the token
budget alone; the others may cost at most its costliest microbatch divided by small numbers. Each is simulated, operation
overhead included, and the shortest makespan of the slowest data-parallel rank wins. One stage has no bubble: the budget
alone counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.cost import Costs
from prefixflow.plan.joint import forwards_before_loss
from prefixflow.plan.plan import Plan, PlanConfig, pack_plan, share_prefixes
from prefixflow.schedule.predict import StageCosts
from prefixflow.schedule.simulate import Timeline
from prefixflow.schedule.table import OpTable, build_forward_table, build_table
from prefixflow.trajectories.types import Trajectory

COST_DIVISORS = tuple(1.3**step for step in range(1, 17))
# With more microbatches per pipeline rank the bubble of even costs is under 2 %: more must gain that much by evenness.
ENOUGH_MICROBATCHES_PER_RANK = 64
GAIN_OF_MORE = 0.98
MOST_MICROBATCHES_PER_RANK = 192


def plan_pipeline(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    *,
    omit: Collection[int] = (),
    placement: Sequence[int] | None = None,
    joint: Sequence[int] | None = None,
) -> Plan:
    """The plan for the configuration's pipeline; arguments and errors as `build_plan`, which it is for one stage."""
    sharing = share_prefixes(trajectories, config, omit=omit, placement=placement, joint=joint)
    plan = pack_plan(trajectories, config, sharing)
    if config.pipeline_size == 1:
        return plan
    best = max_makespan(plan, trajectories)
    rows = segment_row_counts(plan.forest, trajectories)
    costs = [stage_costs(plan, rank, rows, config.deciding) for rank in range(len(plan.ranks))]
    # In the unit of `pack_plan`.
    largest = max(max(c.microbatch_costs(), default=0.0) * sum(c.layers) / max(c.layers) for c in costs)
    if not largest:
        return plan
    num_ranks = config.pipeline_size * config.data_parallel_size
    for divisor in COST_DIVISORS:
        candidate = pack_plan(trajectories, config, sharing, max_cost=largest / divisor)
        makespan = max_makespan(candidate, trajectories)
        per_rank = candidate.num_microbatches / num_ranks
        if makespan < (best if per_rank < ENOUGH_MICROBATCHES_PER_RANK else GAIN_OF_MORE * best):
            plan, best = candidate, makespan
        if per_rank >= MOST_MICROBATCHES_PER_RANK:
            break
    return plan


def stage_costs(plan: Plan, data_rank: int, rows: Sequence[int], costs: Costs) -> StageCosts:
    """Costs of one data-parallel rank's microbatches per stage; `rows[i]` head rows of segment i."""
    num_stages = plan.config.pipeline_size * plan.config.num_chunks
    layers = plan.config.stage_layers or (1,) * num_stages
    return StageCosts.of(plan.forest, plan.ranks[data_rank], rows, costs, layers)


def predicted_timeline(plan: Plan, data_rank: int, rows: Sequence[int]) -> Timeline:
    """Simulated step of one data-parallel rank's pipeline; `rows[i]` head rows of segment i."""
    return stage_costs(plan, data_rank, rows, plan.config.deciding).timeline(rank_table(plan, data_rank))


def rank_table(plan: Plan, data_rank: int, *, training: bool = True) -> OpTable:
    """The operations of one data-parallel rank's pipeline, one row per pipeline rank; equal for ranks that exchange tokens."""
    config = plan.config
    reads, num_ranks, num_chunks = block_reads(plan, data_rank), config.pipeline_size, config.num_chunks
    if not training:
        return build_forward_table(reads, num_ranks=num_ranks, num_chunks=num_chunks)
    after = block_after(plan, data_rank)
    return build_table(reads, num_ranks=num_ranks, num_chunks=num_chunks, window=config.lead_window, after=after)


def with_lead_window(plan: Plan, window: int) -> Plan:
    """The same microbatches under another lead."""
    digest = hashlib.sha256(f"{plan.digest} {window}".encode()).hexdigest()[:16]
    return replace(plan, config=replace(plan.config, lead_window=window), digest=digest)


def block_reads(plan: Plan, data_rank: int) -> list[tuple[int, ...]]:
    """What the m-th microbatches of the ranks that exchange tokens with `data_rank` (itself included) read between them.

    The experts of one rank ran on tokens of all of them in F(m), so their B(m) must meet again, not only a B with a B: they need
    one order of backwards that suits the trees of all.
    """
    together = zip(*(plan.ranks[rank] for rank in plan.config.block_of(data_rank)), strict=True)
    return [tuple(sorted({read for m in row for read in m.reads})) for row in together]


def block_after(plan: Plan, data_rank: int) -> tuple[int, ...]:
    """How many forwards must have run before each backward so that every loss call that it takes part in (`Plan.joint`) is
    scored; empty where each trajectory has a loss of its own. The largest of the ranks that exchange tokens."""
    if plan.joint is None:
        return ()
    block = plan.config.block_of(data_rank)
    counts = (forwards_before_loss(plan.joint, plan.forest, plan.ranks[rank]) for rank in block)
    return tuple(map(max, zip(*counts, strict=True)))


def tables_digest(plan: Plan) -> str:
    """Hash of what every rank runs, to be agreed on before the step."""
    tables = [rank_table(plan, first).rows for first in range(0, len(plan.ranks), plan.config.expert_block)]
    return hashlib.sha256(repr(tables).encode()).hexdigest()[:16]


def max_makespan(plan: Plan, trajectories: Sequence[Trajectory]) -> float:
    """Makespan of the slowest data-parallel rank, in the unit of the deciding costs."""
    rows = segment_row_counts(plan.forest, trajectories)
    return max(predicted_timeline(plan, rank, rows).makespan for rank in range(len(plan.ranks)))


def max_bottleneck(plan: Plan, trajectories: Sequence[Trajectory]) -> float:
    """FLOPs of the busiest pipeline rank of the most loaded data-parallel rank: no bubble, no overhead."""
    rows = segment_row_counts(plan.forest, trajectories)
    costs = [stage_costs(plan, rank, rows, plan.config.cost) for rank in range(len(plan.ranks))]
    return max(c.bottleneck(plan.config.pipeline_size) for c in costs)
