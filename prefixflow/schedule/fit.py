"""Choose token budget, lead, cache budget and activation policy so that a step fits a memory budget (pure).

Strategy
1. Token budgets from the one asked for downwards, halved: large microbatches cost least time. For each, settings from those that
   cost no time (everything kept, then a shorter lead) to those that do: the dormant microbatches that wait longest give
   their activations up, as few distances of waiting as fit (bisection: more given up never needs more), by going to the host
   or by being computed again; then K/V and gK/gV get a budget of their own.
2. Every setting is judged by the largest predicted peak over all data- and pipeline-parallel ranks, and by the simulated
   time of the slowest rank with what the setting adds: a forward more in the backward of what is computed again, both ways
   over the host link for what moves, as if nothing of that were hidden.
3. The fastest that fits is taken; once everything can be kept, smaller token budgets are not tried. Where nothing fits the
   refusal names the setting that needs least, by how much it exceeds the budget, and what would fit.

All is decided for the whole plan at once, from what every rank knows, so all ranks choose the same; policies follow the
distances in the table, which are equal on ranks that exchange tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.plan import Plan, PlanConfig
from prefixflow.schedule.memory import MemoryModel, Phase
from prefixflow.schedule.ops import Kind, Op, backward, forward
from prefixflow.schedule.peak import Body, MemoryPoint, memory_curve
from prefixflow.schedule.replay import CacheReplay, replay_cache
from prefixflow.schedule.residency import (
    ActivationPolicy,
    HostLink,
    MemoryPlan,
    dormant_microbatches,
    link_of,
    plan_memory,
)
from prefixflow.schedule.search import plan_pipeline, rank_table, stage_costs, with_lead_window
from prefixflow.schedule.simulate import simulate
from prefixflow.trajectories.types import Trajectory

GIB = 1 << 30
SMALLEST_TOKEN_BUDGET = 64
MOST_DISTANCES = 8
CACHE_SHARES = (0.5, 0.25, 0.125)
"""Budgets of K/V and gK/gV that are tried, of their peak without one."""
AUTO = (ActivationPolicy.OFFLOAD, ActivationPolicy.RECOMPUTE)


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """How a plan is run within memory.

    policy: of dormant microbatches that wait at least `min_distance` operations between their F and their B.
    kv_budget_bytes: of K/V and gK/gV on one rank's device; None for no limit.
    """

    policy: ActivationPolicy = ActivationPolicy.KEEP
    min_distance: int = 0
    kv_budget_bytes: int | None = None

    def activations(self, plan: Plan, row: Sequence[Op], pipeline_rank: int) -> dict[tuple[int, int], ActivationPolicy]:
        """Policies by (stage, microbatch), those that are kept left out."""
        return self.of_distances(waiting_distances(plan, row, pipeline_rank))

    def of_distances(self, distances: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], ActivationPolicy]:
        """Policies of those that wait: `distances` of a row."""
        if self.policy is ActivationPolicy.KEEP:
            return {}
        return {key: self.policy for key, distance in distances.items() if distance >= self.min_distance}

    def memory_plan(
        self,
        plan: Plan,
        data_rank: int,
        pipeline_rank: int,
        memory: MemoryModel,
        host: HostLink | None,
        *,
        training: bool,
    ) -> MemoryPlan:
        """Of one rank; ValueError where an operation alone exceeds the cache's budget, on every rank alike."""
        if self.policy is ActivationPolicy.KEEP and self.kv_budget_bytes is None:
            return MemoryPlan()
        row = rank_table(plan, data_rank, training=training).rows[pipeline_rank]
        return plan_memory(
            plan,
            data_rank,
            pipeline_rank,
            memory,
            prefix_memory=self.activations(plan, row, pipeline_rank) if training else ActivationPolicy.KEEP,
            kv_budget_bytes=self.kv_budget_bytes,
            host=host,
            training=training,
        )

    def describe(self) -> str:
        cache = "" if self.kv_budget_bytes is None else f", K/V and gK/gV within {self.kv_budget_bytes / GIB:.3g} GiB"
        what = "kept" if self.policy is ActivationPolicy.KEEP else f"{self.policy.value} where {self.min_distance} wait"
        return f"dormant activations {what}{cache}"


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan and how it is run; peak_bytes by phase, the largest over ranks; time in the unit of the deciding costs."""

    plan: Plan
    choice: MemoryChoice
    peak_bytes: Mapping[Phase, int]
    time: float

    @property
    def largest_bytes(self) -> int:
        return max(self.peak_bytes.values())

    def describe(self) -> str:
        config = self.plan.config
        lead = "" if config.lead_window is None else f", lead over {config.lead_window} backwards"
        return f"at most {config.max_tokens_per_microbatch} tokens a microbatch{lead}, {self.choice.describe()}"


def waiting_distances(plan: Plan, row: Sequence[Op], pipeline_rank: int) -> dict[tuple[int, int], int]:
    """Operations between F and B of the dormant (stage, microbatch)s of a row."""
    place = {op: index for index, op in enumerate(row)}
    return {
        (stage, m): place[Op(stage, Kind.BACKWARD, m)] - place[Op(stage, Kind.FORWARD, m)] - 1
        for stage, m in dormant_microbatches(plan, row, pipeline_rank)
    }


def fit_plan(
    trajectories: Sequence[Trajectory],
    config: PlanConfig,
    memory: MemoryModel,
    budget_bytes: int,
    *,
    policies: Sequence[ActivationPolicy] = AUTO,
    kv_budget_bytes: int | None = None,
    omit: Collection[int] = (),
    placement: Sequence[int] | None = None,
    joint: Sequence[int] | None = None,
    host: HostLink | None = None,
) -> Fit:
    """The fastest way to run a step whose predicted peak, state included, is within `budget_bytes` on every rank.

    policies: that dormant activations may get; kv_budget_bytes: given by the user, else chosen. omit, placement, joint: as
    `build_plan`.

    Raises:
        ValueError: nothing fits; the message says by how much, and what would. And what planning raises.
    """
    judge = Judge(trajectories, memory, host)
    best: Fit | None = None
    least: Fit | None = None
    for plan in _plans(config, partial(plan_pipeline, trajectories, omit=omit, placement=placement, joint=joint)):
        for fit in _choices(
            judge, plan, budget_bytes, policies, kv_budget_bytes, math.inf if best is None else best.time
        ):
            if least is None or fit.largest_bytes < least.largest_bytes:
                least = fit
            if fit.largest_bytes <= budget_bytes and (best is None or fit.time < best.time):
                best = fit
        if best is not None and best.choice.policy is ActivationPolicy.KEEP:
            break
    if best is not None:
        return best
    if least is None:
        raise ValueError(
            f"--kv-budget-gib: one operation alone needs more K/V and gK/gV than {(kv_budget_bytes or 0) / GIB:.4g} GiB, under every "
            "token budget; give a larger one, or leave it out."
        )
    raise ValueError(_refusal(least, memory, budget_bytes))


def least_kept_bytes(
    trajectories: Sequence[Trajectory], config: PlanConfig, memory: MemoryModel, omit: Collection[int] = ()
) -> int:
    """A lower bound of the largest peak where everything is kept on the device, under every token budget that `fit_plan` tries.

    Found without planning: when the last trained position of the longest trajectory runs backward on a stage, K/V, gK/gV and the
    layers' inputs of all that comes before it are on the device, but for what its own microbatch holds.
    """
    kept = (np.flatnonzero(t.loss_mask) for i, t in enumerate(trajectories) if i not in omit)
    longest = max((int(trained[-1]) for trained in kept if trained.size), default=0)
    num_cached = max(0, longest - config.max_tokens_per_microbatch)
    layer_bytes = sum(
        num_bytes * memory.pipeline_parallel // memory.shape.num_layers
        for num_bytes in (memory.kv_bytes_per_token, memory.kv_gradient_bytes_per_token)
    )
    input_bytes = memory.shape.hidden_size * memory.element_bytes
    of_layer = num_cached * layer_bytes + num_cached // (memory.context_parallel * memory.sequence_split) * input_bytes
    return max(
        sum(memory.state(rank).values()) + memory.layers(stage) * of_layer
        for rank in range(memory.pipeline_parallel)
        for stage in memory.stages(rank)
    )


def _plans(config: PlanConfig, plan_for: Callable[[PlanConfig], Plan]) -> Iterator[Plan]:
    """Under falling token budgets, each with the default lead and, in a pipeline, with the shortest; none twice."""
    last: Plan | None = None
    for max_tokens in _token_budgets(config):
        try:
            plan = plan_for(replace(config, max_tokens_per_microbatch=max_tokens))
        except ValueError:
            # Without reuse a trajectory must fit one microbatch; the budget asked for decides whether that is an error.
            if last is None:
                raise
            return
        if last is not None and plan.ranks == last.ranks:
            continue
        last = plan
        yield plan
        if config.pipeline_size > 1 and config.num_chunks == 1:
            yield with_lead_window(plan, 1)


def _refusal(least: Fit, memory: MemoryModel, budget_bytes: int) -> str:
    needed, state = least.largest_bytes, memory.state_bytes
    beyond = (
        f"Weights, gradients and optimizer alone take {state / GIB:.4g} GiB: spread them over more ranks (--tp, --pp, "
        "--use-distributed-optimizer)"
        if state >= budget_bytes
        else "Or spread the model over more ranks (--tp, --pp, --cp), take --recompute-granularity full, ask for fewer tokens a "
        f"microbatch (below {SMALLEST_TOKEN_BUDGET} only what is asked for is tried), or leave out the longest trajectories"
    )
    return (
        f"--memory-budget-gib: the step needs at least {needed / GIB:.4g} GiB on the rank that needs most, "
        f"{(needed - budget_bytes) / GIB:.4g} GiB more than the budget of {budget_bytes / GIB:.4g} GiB ({least.describe()}). "
        f"What would fit: --memory-budget-gib {_rounded_up(needed / GIB)}. {beyond}."
    )


def _rounded_up(gib: float) -> str:
    return f"{gib * 1.0005:.4g}"


def _token_budgets(config: PlanConfig) -> Iterator[int]:
    budget = config.max_tokens_per_microbatch
    yield budget
    while budget // 2 >= max(SMALLEST_TOKEN_BUDGET, config.token_multiple):
        budget //= 2
        yield budget


def _choices(
    judge: Judge,
    plan: Plan,
    budget_bytes: int,
    policies: Sequence[ActivationPolicy],
    kv_budget_bytes: int | None,
    best_time: float,
) -> Iterator[Fit]:
    """Ways to run one plan, cheapest first; ends where one that costs nothing fits, or none can be faster than `best_time`."""
    kept = judge.fit(plan, MemoryChoice(kv_budget_bytes=kv_budget_bytes))
    if kept is not None:
        yield kept
        if kept.largest_bytes <= budget_bytes or kept.time >= best_time:
            return
    distances = _thinned(judge.distances(plan))
    for policy in policies:
        if policy is ActivationPolicy.KEEP or not distances:
            continue
        for kv_budget in [kv_budget_bytes, *([] if kv_budget_bytes is not None else judge.cache_budgets(plan))]:
            # Distances fall: the first ones alone may be enough.
            most = judge.fit(plan, MemoryChoice(policy, distances[-1], kv_budget))
            if most is None:
                continue
            if most.largest_bytes > budget_bytes:
                yield most
                continue
            yield _fewest(judge, plan, most, distances, budget_bytes)
            break


def _thinned(distances: Sequence[int]) -> list[int]:
    """At most MOST_DISTANCES of them, evenly, the last one included: each costs a walk over all rows."""
    step = max(1, -(-len(distances) // MOST_DISTANCES))
    return list(distances[::-1][::step][::-1])


def _fewest(judge: Judge, plan: Plan, most: Fit, distances: Sequence[int], budget_bytes: int) -> Fit:
    """As few distances, from the longest, as fit; `most` takes all of them and fits."""
    low, high, best = 0, len(distances) - 1, most
    while low < high:
        middle = (low + high) // 2
        fit = judge.fit(plan, replace(most.choice, min_distance=distances[middle]))
        if fit is not None and fit.largest_bytes <= budget_bytes:
            high, best = middle, fit
        else:
            low = middle + 1
    return best


class Judge:
    """Peaks and times of ways to run plans of one batch, one plan after the other."""

    def __init__(self, trajectories: Sequence[Trajectory], memory: MemoryModel, host: HostLink | None = None) -> None:
        self.trajectories = trajectories
        self.memory = memory
        self.host = host or link_of(memory)
        self._steps: _Steps | None = None

    def distances(self, plan: Plan) -> list[int]:
        """Of dormant microbatches on any rank, falling, each once."""
        found: set[int] = set()
        for rank in self._steps_of(plan).ranks:
            found.update(rank.distances.values())
        return sorted(found, reverse=True)

    def cache_budgets(self, plan: Plan) -> list[int]:
        steps = self._steps_of(plan)
        peak = max(steps.cache(rank, MemoryPlan()).peak_bytes for rank in steps.ranks)
        return [round(share * peak) for share in CACHE_SHARES if round(share * peak)]

    def fit(self, plan: Plan, choice: MemoryChoice) -> Fit | None:
        """None where one operation alone exceeds the cache's budget."""
        steps = self._steps_of(plan)
        peaks: dict[Phase, int] = dict.fromkeys(Phase, 0)
        extra: list[defaultdict[Op, float]] = [defaultdict(float) for _ in plan.ranks]
        for rank in steps.ranks:
            try:
                memory_plan = self._memory_plan(plan, rank, choice)
            except ValueError:
                return None
            state = sum(self.memory.state(rank.pipeline_rank).values())
            cache = steps.cache(rank, memory_plan, moves=choice.kv_budget_bytes is not None)
            added, costs = extra[rank.data_rank], steps.costs[rank.data_rank]
            for point in steps.curve(rank, memory_plan, cache):
                peaks[point.phase] = max(peaks[point.phase], state + point.total_bytes)
                if point.offloaded:
                    for op in (point.op, backward(point.op.microbatch, point.op.stage)):
                        added[op] += self._duration(plan, point.offloaded)
            for (stage, m), policy in memory_plan.activations.items():
                if policy is ActivationPolicy.RECOMPUTE:
                    added[backward(m, stage)] += costs.of_operation(forward(m, stage))
            if rank.row and choice.kv_budget_bytes is not None:
                added[rank.row[-1]] += self._duration(plan, cache.moved_bytes)
        return Fit(plan, choice, peaks, max([0.0, *map(steps.makespan, range(len(plan.ranks)), extra)]))

    def _steps_of(self, plan: Plan) -> _Steps:
        if self._steps is None or self._steps.plan is not plan:
            self._steps = _Steps(plan, self.trajectories, self.memory)
        return self._steps

    def _memory_plan(self, plan: Plan, rank: _Rank, choice: MemoryChoice) -> MemoryPlan:
        if choice.policy is ActivationPolicy.KEEP and choice.kv_budget_bytes is None:
            return MemoryPlan()
        return plan_memory(
            plan,
            rank.data_rank,
            rank.pipeline_rank,
            self.memory,
            prefix_memory=choice.of_distances(rank.distances),
            kv_budget_bytes=choice.kv_budget_bytes,
            host=self.host,
            row=rank.row,
        )

    def _duration(self, plan: Plan, num_bytes: int) -> float:
        """Of a transfer, in the unit of the deciding costs."""
        seconds = num_bytes / self.host.bytes_per_s
        return seconds if plan.config.measured is not None else seconds * self.host.flops_per_s


@dataclass(frozen=True, slots=True)
class _Rank:
    """A row, and how long the dormant microbatches wait in it."""

    data_rank: int
    pipeline_rank: int
    row: Sequence[Op]
    distances: Mapping[tuple[int, int], int]


class _Steps:
    """What all ways to run one plan have in common."""

    def __init__(self, plan: Plan, trajectories: Sequence[Trajectory], memory: MemoryModel) -> None:
        self.plan = plan
        self.memory = memory
        self.head_rows = segment_row_counts(plan.forest, trajectories)
        data_ranks = range(len(plan.ranks))
        self.tables = [rank_table(plan, data_rank) for data_rank in data_ranks]
        self.costs = [stage_costs(plan, rank, self.head_rows, plan.config.deciding) for rank in data_ranks]
        self.durations = [
            {op: costs.of_operation(op) for row in table.rows for op in row}
            for table, costs in zip(self.tables, self.costs, strict=True)
        ]
        self.ranks = [
            _Rank(data_rank, pipeline_rank, row, waiting_distances(plan, row, pipeline_rank))
            for data_rank, table in enumerate(self.tables)
            for pipeline_rank, row in enumerate(table.rows)
        ]
        self._bodies: list[dict[tuple[int, int], Body]] = [{} for _ in data_ranks]
        self._unmoved: dict[tuple[int, int, bool], CacheReplay] = {}

    def cache(self, rank: _Rank, memory_plan: MemoryPlan, *, moves: bool = False) -> CacheReplay:
        """K/V and gK/gV along a row; where none of them `moves`, it is the same for all that else is done for memory."""
        if moves:
            return replay_cache(self.plan, rank.data_rank, rank.row, self.memory, memory_plan)
        key = rank.data_rank, rank.pipeline_rank, self.memory.reads_own_keys and not memory_plan
        if key not in self._unmoved:
            self._unmoved[key] = replay_cache(self.plan, rank.data_rank, rank.row, self.memory, memory_plan)
        return self._unmoved[key]

    def curve(self, rank: _Rank, memory_plan: MemoryPlan, cache: CacheReplay) -> tuple[MemoryPoint, ...]:
        return memory_curve(
            self.plan,
            rank.data_rank,
            rank.row,
            self.memory,
            rows=self.head_rows,
            memory_plan=memory_plan,
            cache=cache.points,
            bodies=self._bodies[rank.data_rank],
        )

    def makespan(self, data_rank: int, extra: Mapping[Op, float]) -> float:
        """`extra`: of some operations, beside what they cost anyway."""
        durations = self.durations[data_rank]
        if extra:
            durations = durations | {op: durations[op] + more for op, more in extra.items()}
        return simulate(self.tables[data_rank], durations.__getitem__).makespan
