"""The pipeline on real Megatron models: what ran is what the table says, and how it fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron.prefixflow.arguments import (
    gpt_model_kwargs,
    loss_config,
    parallel_layout,
    parse_arguments,
    plan_config,
    transformer_config,
)
from megatron.prefixflow.model import build_model
from megatron.prefixflow.planning import plan_step
from megatron.prefixflow.session import start_session
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.plan import Plan, PlanConfig
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.world import World, WorldError, Worlds
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.order import backward_order, forwards_needed
from prefixflow.schedule.search import rank_table
from prefixflow.schedule.table import LeadPolicy, build_table
from prefixflow.testing.generate import Style, two_level_groups
from prefixflow.trajectories import Trajectory

ARGUMENTS = ("--model", "tiny", "--dtype", "float32", "--max-tokens", "24", "--prefix-reuse", "on")
LAYOUTS = ["--pp 2", "--pp 2 --vpp 2", "--pp 4", "--pp 2 --dp 2"]


def trajectories() -> tuple[Trajectory, ...]:
    return two_level_groups(3, 4, (40, 60), (8, 16), seed=5, style=Style(vocab_size=512))


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one rank ran, operation by operation, and by which plan."""

    ops: tuple[Op, ...]
    pipeline_rank: int
    data_rank: int
    plan: Plan


def run_logged(argv: tuple[str, ...], failing: str | None = None, *, is_killed: bool = False) -> RankRun:
    """One step on this rank; raises (or is killed) in operation `failing`."""
    args = parse_arguments((*ARGUMENTS, *argv))
    groups = start_session(parallel_layout(args), args.seed)
    chunks = build_model(transformer_config(args), groups, **gpt_model_kwargs(args))
    kernel = select_kernel("auto", next(chunks[0].parameters()).device)
    runner = StepRunner(chunks, groups, kernel, vocab_size=args.vocab_size)
    log: list[Op] = []

    @contextlib.contextmanager
    def record(op: Op) -> Iterator[None]:
        if str(op) == failing:
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planted failure")
        log.append(op)
        yield

    runner.observe = record
    loss = loss_config(args)
    plan = plan_step(trajectories(), plan_config(args), loss)
    runner.forward_backward(plan, trajectories(), loss)
    return RankRun(tuple(log), groups.pipeline_rank, groups.data_rank, plan)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_run_keeps_the_table_the_bound_on_what_is_alive_and_overlaps_groups(worlds: Worlds, layout: str) -> None:
    argv = tuple(layout.split())
    size = parallel_layout(parse_arguments((*ARGUMENTS, *argv))).world_size
    runs = worlds[size].run(run_logged, argv, timeout_s=120)
    config = runs[0].plan.config
    assert len(runs) == config.pipeline_size * config.data_parallel_size
    assert {run.plan.digest for run in runs} == {runs[0].plan.digest}
    for run in runs:
        assert run.ops == rank_table(run.plan, run.data_rank).rows[run.pipeline_rank]
        assert len(run.plan.ranks[run.data_rank]) > 6
        assert groups_overlap(run)
        last = next(r for r in runs if (r.pipeline_rank, r.data_rank) == (config.pipeline_size - 1, run.data_rank))
        assert most_alive(run.ops) == expected_alive(last.ops, config.pipeline_size - 1 - run.pipeline_rank, config)


def groups_overlap(run: RankRun) -> bool:
    """The second group's first forward runs before the first group's last backward."""
    groups: dict[int, set[int]] = {}
    for m in run.plan.ranks[run.data_rank]:
        if m.segments:
            groups.setdefault(run.plan.forest.segments[m.segments[0]].tree, set()).add(m.id)
    first, second = list(groups.values())[:2]
    start_of_second = min(i for i, op in enumerate(run.ops) if op.microbatch in second)
    end_of_first = max(i for i, op in enumerate(run.ops) if op.microbatch in first)
    return start_of_second < end_of_first


def most_alive(ops: Sequence[Op]) -> int:
    return max(itertools.accumulate(1 if op.kind is Kind.FORWARD else -1 for op in ops))


def expected_alive(last_ops: Sequence[Op], ranks_after: int, config: PlanConfig) -> int:
    """max_k(N(k) - k + 1) + ranks_after, where N(k) forwards ran on the last rank before its k-th backward.

    Interleaved stages run twice as many more; no rank runs more forwards than there are.
    """
    kinds = [op.kind for op in last_ops]
    before = [kinds[:place].count(Kind.FORWARD) for place, kind in enumerate(kinds) if kind is Kind.BACKWARD]
    extra = ranks_after * (1 if config.num_chunks == 1 else 2)
    literal = max(n - k for k, n in enumerate(before)) + extra
    capped = max(min(len(before), n + extra) - k for k, n in enumerate(before))
    assert config.num_chunks > 1 or capped == literal, "too few microbatches to tell"
    return capped


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_flat_list_gives_megatrons_1f1b(num_ranks: int) -> None:
    n = 12
    table = build_table([()] * n, num_ranks=num_ranks, policy=LeadPolicy.CONSTANT)
    for rank, row in enumerate(table.rows):
        # Upstream: forward_backward_pipelining_without_interleaving, warm-up of p - rank - 1 microbatches.
        assert [(op.kind, op.microbatch) for op in row] == one_forward_one_backward(range(n), num_ranks - rank - 1)
    assert build_table([()] * n, num_ranks=num_ranks).rows == table.rows


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 2), (4, 2), (4, 4)])
def test_a_flat_list_gives_megatrons_interleaved_order(num_ranks: int, num_chunks: int) -> None:
    n = 2 * num_ranks
    table = build_table([()] * n, num_ranks=num_ranks, num_chunks=num_chunks, policy=LeadPolicy.CONSTANT)
    virtual = get_schedule_table(n, num_chunks, num_ranks)
    for rank, row in enumerate(table.rows):
        # Upstream: get_pp_rank_microbatches.
        warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks
        expected = one_forward_one_backward(range(len(virtual)), min(warmup, len(virtual)))
        ops = [(kind, *virtual[k]) for kind, k in expected]
        assert [(op.kind, op.microbatch, op.stage) for op in row] == [
            (kind, m, (chunk if kind is Kind.FORWARD else num_chunks - 1 - chunk) * num_ranks + rank)
            for kind, m, chunk in ops
        ]


def one_forward_one_backward(order: range, warmup: int) -> list[tuple[Kind, int]]:
    ops = [(Kind.FORWARD, m) for m in order[:warmup]]
    for place, m in enumerate(order[warmup:]):
        ops += [(Kind.FORWARD, m), (Kind.BACKWARD, order[place])]
    return ops + [(Kind.BACKWARD, m) for m in order[len(order) - warmup :]]


def test_a_rank_that_raises_names_the_operation() -> None:
    with World(2) as world, pytest.raises(WorldError) as caught:
        world.run(partial(run_logged, ("--pp", "2"), failing="1B3"), timeout_s=60)
    message = str(caught.value)
    assert "planted failure" in message
    assert "in operation 1B3" in message
    assert ">1B3<" in message
    assert 1 in caught.value.failures


def test_a_killed_rank_is_named_with_the_operation_that_waited_for_it() -> None:
    with World(2) as world, pytest.raises(WorldError) as caught:
        world.run(partial(run_logged, ("--pp", "2"), failing="1B3", is_killed=True), timeout_s=60)
    message = str(caught.value)
    assert message.startswith("Rank 1 of 2 failed")
    assert "SIGKILL" in message
    assert "waits for a message of rank 1" in message
    waiting = re.search(r"rank 0 of 2, in operation (0B\d+)", message)
    assert waiting is not None
    assert f">{waiting[1]}<" in message


def test_the_lead_rule_bounds_the_forwards_ahead() -> None:
    reads = [(), (0,), (0,), (0,), (), (4,), (4,)]
    need = forwards_needed(backward_order(reads))
    for num_ranks in (2, 3):
        for rank, row in enumerate(build_table(reads, num_ranks=num_ranks).rows):
            backwards = [place for place, op in enumerate(row) if op.kind is Kind.BACKWARD]
            forwards = [sum(op.kind is Kind.FORWARD for op in row[:place]) for place in backwards]
            assert all(f >= min(len(reads), n + num_ranks - 1 - rank) for f, n in zip(forwards, need, strict=True))
