"""What leaves the device: the replay holds on any batch, and no cache moves less where sizes are equal."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixflow.plan.plan import Plan, PlanConfig, build_plan
from prefixflow.plan.shapes import ModelShape
from prefixflow.ranges import Range
from prefixflow.schedule.eviction import Gap, choose_evictions, load_of
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.ops import Op
from prefixflow.schedule.replay import replay_cache
from prefixflow.schedule.residency import (
    ActivationPolicy,
    Entry,
    EntryBytes,
    HostLink,
    MemoryPlan,
    entries_used,
    plan_memory,
)
from prefixflow.schedule.search import rank_table
from prefixflow.trajectories import Trajectory
from tests.plan.groups import batch_of, batches, configs

SHAPE = ModelShape.from_name("tiny")
# In four bytes an element, gK/gV are as large as K/V.
MODEL = MemoryModel(SHAPE, element_bytes=4)
SLOW_LINK, FAST_LINK = HostLink(bytes_per_s=1.0), HostLink(bytes_per_s=1e30)
Uses = list[list[Entry]]


def row_of(plan: Plan, data_rank: int = 0, pipeline_rank: int = 0, *, training: bool = True) -> Sequence[Op]:
    return rank_table(plan, data_rank, training=training).rows[pipeline_rank]


def uses_of(plan: Plan, row: Sequence[Op], data_rank: int = 0) -> Uses:
    return [entries_used(plan.ranks[data_rank][op.microbatch], op) for op in row]


def least_budget(plan: Plan, model: MemoryModel = MODEL) -> int:
    """What the hungriest operation of any rank needs."""
    size = EntryBytes.of_plan(plan, model).of
    rows = [(rank, row) for rank in range(len(plan.ranks)) for row in rank_table(plan, rank).rows]
    return max((sum(map(size, used)) for rank, row in rows for used in uses_of(plan, row, rank)), default=0)


def moved_by_lru(uses: Uses, sizes: dict[Entry, int], budget: int) -> int:
    """Bytes to the host and back of a cache that frees what is dead and evicts what was used longest ago.

    Of those last used together the larger leaves, then the one that is used again first: any order is as good to it.
    """
    last_use = {entry: place for place, used in enumerate(uses) for entry in used}

    def age(entry: Entry) -> tuple[int, int, tuple[int, int]]:
        after = range(device[entry] + 1, len(uses))
        at = next(place for place in after if entry in uses[place])
        return device[entry], -sizes[entry], (at, uses[at].index(entry))

    device: dict[Entry, int] = {}
    host: set[Entry] = set()
    moved = 0
    for place, used in enumerate(uses):
        moved += sum(sizes[entry] for entry in used if entry in host)
        host -= set(used)
        device |= dict.fromkeys(used, place)
        for entry in sorted(device.keys() - set(used), key=age):
            if sum(sizes[e] for e in device) > budget:
                del device[entry]
                host.add(entry)
                moved += sizes[entry]
        device = {entry: used_at for entry, used_at in device.items() if last_use[entry] > place}
    assert not device
    assert not host
    return moved


def moved_at_least(uses: Uses, sizes: dict[Entry, int], budget: int) -> int:
    """The optimum, by trying every set of entries that can be on the device during each operation."""
    last_use = {entry: place for place, used in enumerate(uses) for entry in used}
    known: set[Entry] = set()
    best: dict[frozenset[Entry], int] = {frozenset(): 0}
    for place, used in enumerate(uses):
        needed = frozenset(used)
        after: dict[frozenset[Entry], int] = {}
        for device, cost in best.items():
            fetched = sum(sizes[e] for e in (needed & known) - device)
            others = device - needed
            for kept in subsets(others):
                if sum(sizes[e] for e in needed | kept) <= budget:
                    state = frozenset(e for e in needed | kept if last_use[e] > place)
                    total = cost + fetched + sum(sizes[e] for e in others - kept)
                    after[state] = min(total, after.get(state, total))
        known |= needed
        best = after
    return best[frozenset()]


def subsets(entries: Iterable[Entry]) -> Iterable[frozenset[Entry]]:
    entries = sorted(entries)
    return (frozenset(c) for size in range(len(entries) + 1) for c in combinations(entries, size))


@settings(max_examples=60, deadline=None)
@given(batches(), configs(), st.data())
def test_any_batch_within_any_budget(trajectories: list[Trajectory], config: PlanConfig, data: st.DataObject) -> None:
    """The replay asserts the invariants; least-recently-used never moves fewer bytes."""
    pipeline_size, num_chunks = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    layers = data.draw(st.permutations([0, 1, 2, 1][: pipeline_size * num_chunks]))
    plan = build_plan(
        trajectories,
        replace(
            config, pipeline_size=pipeline_size, num_chunks=num_chunks, stage_layers=(*layers[:-1], layers[-1] or 3)
        ),
    )
    model = replace(MODEL, element_bytes=data.draw(st.sampled_from([2, 4])), pipeline_parallel=pipeline_size)
    host = data.draw(st.sampled_from([SLOW_LINK, FAST_LINK]))
    policy = data.draw(st.sampled_from(ActivationPolicy))
    data_rank = data.draw(st.integers(0, config.data_parallel_size - 1))
    pipeline_rank = data.draw(st.integers(0, pipeline_size - 1))
    row = row_of(plan, data_rank, pipeline_rank)
    peak = replay_cache(plan, data_rank, row, model).peak_bytes
    least = least_budget(plan, model)
    budget = data.draw(st.integers(least, max(least, peak)))
    memory_plan = plan_memory(
        plan, data_rank, pipeline_rank, model, prefix_memory=policy, kv_budget_bytes=budget, host=host
    )
    got = replay_cache(plan, data_rank, row, model, memory_plan, kv_budget_bytes=budget)
    assert (got.num_evictions + got.num_recomputes > 0) == (peak > budget)
    assert host is SLOW_LINK or not got.num_recomputes
    size = EntryBytes.of_plan(plan, model).of
    uses = uses_of(plan, row, data_rank)
    assert got.moved_bytes <= moved_by_lru(uses, {e: size(e) for used in uses for e in used}, budget)
    forwards = row_of(plan, data_rank, pipeline_rank, training=False)
    without = plan_memory(plan, data_rank, pipeline_rank, model, kv_budget_bytes=budget, host=host, training=False)
    assert not replay_cache(plan, data_rank, forwards, model, without, kv_budget_bytes=budget).num_recomputes


@st.composite
def even_trees(draw: st.DrawFn) -> Plan:
    """A tree whose segments have 4 positions each, one microbatch a segment: entries of one size."""
    paths = [[0]]
    for node in range(1, draw(st.integers(2, 9))):
        paths.append([*draw(st.sampled_from(paths)), node])
    leaves = [p for p in paths if not any(q[: len(p)] == p and q != p for q in paths)]
    tokens = [[1] + [node + 1 for node in path for _ in range(4)] for path in leaves]
    return build_plan(batch_of(*tokens), PlanConfig(4))


@settings(max_examples=60, deadline=None)
@given(even_trees(), st.integers(0, 3))
def test_equal_sizes_move_the_least_possible(plan: Plan, spare: int) -> None:
    row = row_of(plan)
    size = EntryBytes.of_plan(plan, MODEL).of
    uses = uses_of(plan, row)
    sizes = {entry: size(entry) for used in uses for entry in used}
    assert len(set(sizes.values())) <= 1
    budget = least_budget(plan) + spare * max(sizes.values(), default=0)
    memory_plan = plan_memory(plan, 0, 0, MODEL, kv_budget_bytes=budget, host=FAST_LINK)
    got = replay_cache(plan, 0, row, MODEL, memory_plan, kv_budget_bytes=budget)
    assert got.moved_bytes == moved_at_least(uses, sizes, budget)


def random_gaps(rng: random.Random, sizes: Sequence[int]) -> tuple[list[Gap], list[int], int]:
    """Gaps of six entries used one to four times in twelve operations, what these need, and a budget too small for all."""
    needed, gaps = [0] * 12, []
    for num_bytes in rng.choices(sizes, k=6):
        uses = sorted(rng.sample(range(12), rng.randint(1, 4)))
        for place in uses:
            needed[place] += num_bytes
        gaps += [Gap(num_bytes, Range(a + 1, b)) for a, b in pairwise(uses) if b > a + 1]
    return gaps, needed, rng.randint(max(needed), max(max(needed), int(load_of(gaps, needed).max()) - 1))


def least_given_up(gaps: Sequence[Gap], needed: Sequence[int], budget: int) -> int:
    """Bytes of the best choice, by branch and bound, the largest gaps first."""
    gaps = sorted(gaps, key=lambda gap: -gap.num_bytes)
    load = np.array(needed)
    best = sum(gap.num_bytes for gap in gaps)

    def search(index: int, given_up: int) -> None:
        nonlocal best
        if index == len(gaps) or given_up >= best:
            best = min(best, given_up)
            return
        across, num_bytes = load[gaps[index].span.slice], gaps[index].num_bytes
        if across.max() + num_bytes <= budget:
            across += num_bytes
            search(index + 1, given_up)
            across -= num_bytes
        search(index + 1, given_up + num_bytes)

    search(0, 0)
    return best


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 4), (1, 10, 100), tuple(range(1, 10))])
def test_gap_to_the_optimum(sizes: tuple[int, ...]) -> None:
    """Unequal sizes are NP-hard: over random cases the choice gives up less than 1 % more bytes than the best, equal ones none."""
    rng = random.Random(7)
    got = best = 0
    for _ in range(150):
        gaps, needed, budget = random_gaps(rng, sizes)
        given_up = choose_evictions(gaps, needed, budget)
        kept = [gap for index, gap in enumerate(gaps) if index not in given_up]
        assert load_of(kept, needed).max() <= budget
        got += sum(gaps[index].num_bytes for index in given_up)
        best += least_given_up(gaps, needed, budget)
    assert best > 0
    assert got == best if len(sizes) == 1 else got < 1.01 * best


CHAIN = batch_of([*range(1, 14)], [*range(1, 10), 30, 31, 32, 33], [1, 2, 3, 4, 5, 40, 41, 42, 43])
"""Segments 0 and 1 of 4 positions are read, two leaves stand below 1, one below 0."""


def chain_plan(config: PlanConfig | None = None) -> Plan:
    return build_plan(CHAIN, config or PlanConfig(4))


def actions(memory_plan: MemoryPlan, row: Sequence[Op]) -> list[str]:
    """Operations and actions in the order in which they happen."""
    lines: list[str] = []
    for place, op in enumerate(row):
        lines += [str(action) for action in memory_plan.before.get(place, ())]
        lines.append(str(op))
        lines += [str(action) for action in memory_plan.after.get(place, ())]
    return lines


def test_a_chain_by_hand() -> None:
    """K/V and gK/gV of one block come and go by themselves, in units of one block's K/V.

    0B2 needs four: K/V and gK/gV of 0 and of 1. 0B1 needs four: K/V of 0, gK/gV of 0 and of 1.
    """
    plan = chain_plan()
    row = row_of(plan)
    print(actions(plan_memory(plan, 0, 0, MODEL, kv_budget_bytes=least_budget(plan)), row), least_budget(plan))
