"""K/V and their gradients leave the device and come back, and the gradients are the same.

Two kinds of memory plans. `--kv-budget-gib` at the least that the plan takes, what the greediest operation needs by itself:
the plan's own choice. And plans that let nothing stay between two uses, at which every read, every sum and every way back
of every block is tried, also where one path of blocks is all there is and no budget could move any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from megatron.prefixflow import parity
from megatron.prefixflow.arguments import memory_settings, parallel_layout, parse_arguments, plan_config
from megatron.prefixflow.parity import Case, Runner
from megatron.prefixflow.stage import StageRunner
from prefixflow.plan.plan import Plan
from prefixflow.runtime.attention.function import Operation
from prefixflow.runtime.cache import KVCache
from prefixflow.runtime.world import Worlds
from prefixflow.schedule import fit
from prefixflow.schedule.fit import MemoryChoice
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.replay import replay_cache
from prefixflow.schedule.residency import (
    GIB,
    ActivationPolicy,
    Entry,
    EntryBytes,
    HostLink,
    MemoryAction,
    MemoryPlan,
    Move,
    Part,
    entries_used,
    plan_memory,
)
from prefixflow.schedule.search import plan_pipeline, rank_table
from prefixflow.trajectories import read_trajectories
from tests.mcore.faults import patch, restore
from tests.mcore.parity_files import write_small_files
from tests.mcore.test_mutants import replace_cached

FLOAT64_LIMIT = 1e-9
FLOAT64_LIMIT_MOE = 1e-6
TIMEOUT_S = 300.0

TINY = "--prefix-reuse on --dtype float64 --model tiny --num-layers 2"
EXPERTS = """--prefix-reuse on --dtype float64 --model tiny-moe --num-layers 2 --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"""
MUCH = "--kv-budget-gib 1"
RING = "--cp 2 --context-parallel-kv ring"

_patched_sizes: set[int] = set()
"""Of worlds, whose processes are put right at the end."""

Planner = Callable[..., MemoryPlan]


def to_host(*args: Any, **more: Any) -> MemoryPlan:
    """Over a link so fast that nothing is worth computing again."""
    return plan_memory(*args, **{**more, "host": HostLink(bytes_per_s=1e30)})


def to_nowhere(*args: Any, **more: Any) -> MemoryPlan:
    """Over a link so slow that all K/V are dropped that can be computed again."""
    return plan_memory(*args, **{**more, "host": HostLink(bytes_per_s=1.0)})


def nothing_stays(
    plan: Plan,
    data_rank: int,
    pipeline_rank: int,
    memory: MemoryModel,
    *,
    drops: bool,
    training: bool,
    prefix_memory: ActivationPolicy,
    **_: Any,
) -> MemoryPlan:
    """After each operation everything leaves that is used again: K/V are dropped where `drops`, the rest goes to the host."""
    activations = plan_memory(plan, data_rank, pipeline_rank, memory, prefix_memory=prefix_memory, training=training)
    microbatches = plan.ranks[data_rank]
    row = rank_table(plan, data_rank, training=training).rows[pipeline_rank]
    sizes = EntryBytes.of_plan(plan, memory)
    writer = {block: m.id for m in microbatches for block in m.writes}
    used = [[e for e in entries_used(microbatches[op.microbatch], op) if sizes.of(e)] for op in row]
    open_uses = Counter(entry for entries in used for entry in entries)
    away: dict[Entry, MemoryAction] = {}
    before, after = {}, {}
    for place, entries in enumerate(used):
        # Blocks of a path come from its root: what a writer reads is there when it runs again.
        back = dict.fromkeys(away.pop(entry) for entry in entries if entry in away)
        before[place] = (*activations.before.get(place, ()), *back)
        open_uses.subtract(entries)
        leaving = [entry for entry in entries if open_uses[entry]]
        for entry in leaving:
            is_dropped = drops and training and not entry.is_gradient
            again = MemoryAction(Move.RECOMPUTE, entry.stage, writer[entry.block])
            away[entry] = again if is_dropped else entry.action(Move.FETCH)
        after[place] = tuple(
            entry.action(Move.EVICT if away[entry].move is Move.FETCH else Move.DROP) for entry in leaving
        )
    return MemoryPlan(activations.activations, before, after)


def all_is_streamed(
    plan: Plan, data_rank: int, pipeline_rank: int, memory: MemoryModel, *, training: bool, **_: Any
) -> MemoryPlan:
    """Everything lives on the host from its first use on."""
    row = rank_table(plan, data_rank, training=training).rows[pipeline_rank]
    sizes = EntryBytes.of_plan(plan, memory)
    seen: set[Entry] = set()
    before = {}
    for place, op in enumerate(row):
        new = [e for e in entries_used(plan.ranks[data_rank][op.microbatch], op) if sizes.of(e) and e not in seen]
        before[place] = tuple(entry.action(Move.STREAM) for entry in new)
        seen.update(new)
    return MemoryPlan(before=before)


evict_all: Planner = partial(nothing_stays, drops=False)
drop_all: Planner = partial(nothing_stays, drops=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """Puts back what the last case patched in a process; then its planner, and a fault."""

    planner: Planner
    mutant: Callable[[], None] | None = None

    def __call__(self) -> None:
        restore()
        patch(fit, "plan_memory", self.planner)
        if self.mutant is not None:
            self.mutant()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_small_files(tmp_path_factory.mktemp("trajectories"))


@pytest.fixture(scope="module")
def runner(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One runner, so that references are computed once; its processes are left unpatched."""
    with Runner(tmp_path_factory.mktemp("parity"), TIMEOUT_S, worlds=worlds) as kept:
        yield kept
        for size in _patched_sizes:
            worlds[size].run(restore)


def run(
    runner: Runner, file: str, text: str, planner: Planner, mutant: Callable[[], None] | None = None
) -> dict[str, Any]:
    runner.setup = Setup(planner, mutant)
    case = Case(file, tuple(text.split()))
    _patched_sizes.add(parallel_layout(case.arguments).world_size)
    return runner.run(case)


def assert_exact(result: dict[str, Any], limit: float = FLOAT64_LIMIT) -> None:
    assert result["ok"], result["reasons"]
    assert result["max_rel_grad_err"] < limit
    assert result["max_logprob_err"] < limit


def least_budget(file: str, text: str) -> int:
    """Bytes that the greediest operation needs, two layers at a time."""
    args = parse_arguments(text.split())
    layout = parallel_layout(args)
    plan = plan_pipeline(read_trajectories(file), plan_config(args, layout))
    sizes = EntryBytes.of_plan(plan, memory_settings(args, layout).model)
    return max(
        sum(map(sizes.streamed, entries_used(microbatches[op.microbatch], op)))
        for rank, microbatches in enumerate(plan.ranks)
        for row in rank_table(plan, rank).rows
        for op in row
    )


def planned_evictions(file: str, text: str, planner: Planner, budget: int) -> int:
    args = parse_arguments(text.split())
    layout = parallel_layout(args)
    plan = plan_pipeline(read_trajectories(file), plan_config(args, layout))
    memory = memory_settings(args, layout).model
    total = 0
    for rank in range(len(plan.ranks)):
        for position, row in enumerate(rank_table(plan, rank).rows):
            moves = planner(plan, rank, position, memory, kv_budget_bytes=budget)
            total += replay_cache(plan, rank, row, memory, moves, kv_budget_bytes=budget).num_evictions
    return total * layout.tp * layout.cp


ORDINARY = [
    ("trees", "--max-tokens 16 --prefix-memory offload", evict_all),
    ("trees", "--max-tokens 16 --recompute full", drop_all),
    ("chains", "--max-tokens 32 --pp 2 --prefix-memory recompute", drop_all),
    ("chains", "--max-tokens 32", all_is_streamed),
    ("groups", f"--max-tokens 16 {RING} --recompute full --prefix-memory recompute", drop_all),
]
GRID = [
    (file, f"--max-tokens 16 {layout} --recompute {recompute}", planner)
    for file in ("groups", "chains", "trees")
    for layout in (
        "",
        "--pp 2",
        "--tp 2 --sequence-parallel",
        "--tp 2",
        "--cp 2",
        RING,
        f"{RING} --pp 2",
        "--pp 2 --vpp 2 --num-layers 4",
    )
    for recompute in ("none", "full")
    for planner in (evict_all, drop_all, all_is_streamed)
]


@pytest.mark.parametrize(
    ("file", "text", "planner"), [*ORDINARY, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in GRID)]
)
def test_nothing_stays(runner, files, file, text, planner):
    result = run(runner, files[file], f"{TINY} {text} {MUCH}", planner)
    assert_exact(result)
    assert result["host_bytes"] > 0
    assert (result["evictions"] > 0) == (planner is not all_is_streamed)
    assert (result["streamed_parts"] > 0) == (planner is all_is_streamed)
    assert (result["recomputed_blocks"] > 0) == (planner is drop_all)
    assert result["context_bytes"] == result["context_bytes_planned"]


def test_a_cache_budget_that_an_earlier_step_chose_binds_no_later_one(files):
    """It may be one that no operation of this step can do with."""
    args = parse_arguments(f"{TINY} --max-tokens 16 --pp 2 --memory-budget-gib 1".split())
    layout = parallel_layout(args)
    settings, batch = memory_settings(args, layout), read_trajectories(files["groups"])
    earlier = replace(settings, choice=MemoryChoice(ActivationPolicy.OFFLOAD, 3, kv_budget_bytes=1))
    assert earlier.fitted(batch, plan_config(args, layout)) == settings.fitted(batch, plan_config(args, layout))


BUDGETS = [
    ("groups", "--max-tokens 16 --pp 2", to_nowhere),
    ("trees", "--max-tokens 32 --pp 2 --recompute full", to_host),
    ("chains", "--max-tokens 32 --num-layers 4", to_host),
]
BUDGET_GRID = [
    (file, f"--max-tokens {num_tokens} --pp 2 {more}", planner)
    for file, num_tokens in (("groups", 16), ("chains", 64), ("trees", 32))
    for more in (
        "",
        "--vpp 2 --num-layers 4 --recompute full",
        "--tp 2 --num-layers 8 --recompute selective",
        "--cp 2",
        RING,
    )
    for planner in (to_host, to_nowhere)
]


@pytest.mark.parametrize(
    ("file", "text", "planner"), [*BUDGETS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in BUDGET_GRID)]
)
def test_least_budget(runner, files, file, text, planner):
    budget = least_budget(files[file], f"{TINY} {text}")
    free = run(runner, files[file], f"{TINY} {text}", plan_memory)
    assert free["peak_cache_bytes"] > budget
    result = run(runner, files[file], f"{TINY} {text} --kv-budget-gib {budget / GIB!r}", planner)
    assert_exact(result)
    assert result["peak_cache_bytes"] <= budget
    assert result["evictions"] == planned_evictions(files[file], f"{TINY} {text}", planner, budget)
    assert result["evictions"] + result["recomputed_blocks"] + result["streamed_parts"] > 0
    assert planner is to_nowhere or not result["recomputed_blocks"]


@pytest.mark.parametrize("layout", ["", "--pp 2"])
def test_a_smaller_budget_is_refused_before_anything_runs(files, layout, capsys):
    text = f"{TINY} --max-tokens 16 {layout}"
    budget = least_budget(files["trees"], text) - 1
    assert parity.main([files["trees"], *f"{text} --kv-budget-gib {budget / GIB!r}".split()]) == 2
    assert "1 too few" in capsys.readouterr().err


def test_experts_take_the_routes_of_the_first_forward(runner, files):
    """Counts and losses of the routers would change if a recomputation left any; a pass of forwards chooses the routes."""
    text = f"{EXPERTS} --max-tokens 16 --routing-replay record {MUCH}"
    result = run(runner, files["trees"], text, drop_all)
    assert_exact(result, FLOAT64_LIMIT_MOE)
    assert result["recomputed_blocks"] > 0


def test_experts_on_several_ranks_are_never_run_again(runner, files):
    result = run(runner, files["trees"], f"{EXPERTS} --ep 2 --max-tokens 16 {MUCH}", drop_all)
    assert not result["ok"]
    assert "expected K/V to be evicted under expert parallelism" in result["reasons"][0]


# Faults.


def a_fetch_loses_key_gradients() -> None:
    fetch = KVCache.fetch

    def mutant(self, block, part):
        fetch(self, block, part)
        if part is Part.GRADIENTS:
            for gk, _ in self._landed(block, part).here.values():
                gk.zero_()

    patch(KVCache, "fetch", mutant)


def a_recomputation_sees_no_ancestors() -> None:
    body = StageRunner._body

    def mutant(self, arrays, context, *more):
        if context.operation is Operation.RECOMPUTE:
            replace_cached(context, ())
        return body(self, arrays, context, *more)

    patch(StageRunner, "_body", mutant)


def a_recomputation_stores_as_a_forward_does() -> None:
    patch(KVCache, "rewrite", KVCache.write)


def a_recomputation_routes_as_a_forward_does() -> None:
    again, routed = StageRunner._write_again, StageRunner._routed

    def mutant(self, m):
        self._routed = lambda routing, _: routed(self, routing, Operation.FORWARD)
        again(self, m)
        del self._routed

    patch(StageRunner, "_write_again", mutant)


@pytest.mark.parametrize(
    ("mutant", "planner"),
    [(a_fetch_loses_key_gradients, evict_all), (a_recomputation_sees_no_ancestors, drop_all)],
)
def test_mutant_is_caught(runner, files, mutant, planner):
    result = run(runner, files["trees"], f"{TINY} --max-tokens 16 {MUCH}", planner, mutant)
    assert not result["ok"]
    assert result["max_rel_grad_err"] > 1e-6, result["reasons"]


@pytest.mark.parametrize(
    ("mutant", "model", "words"),
    [
        (a_recomputation_stores_as_a_forward_does, TINY, "it is already written"),
        (a_recomputation_routes_as_a_forward_does, EXPERTS, "were called (1, 0) times"),
    ],
)
def test_guard_stops_mutant(runner, files, mutant, model, words):
    result = run(runner, files["trees"], f"{model} --max-tokens 16 {MUCH}", drop_all, mutant)
    assert not result["ok"]
    assert words in result["reasons"][0]
