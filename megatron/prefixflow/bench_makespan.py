"""The simulated pipeline against the real one: how long a step's operations take from the first to the last.

Operations are timed on every rank without the wait for their messages. The simulator gets each operation's median time
and the table that was run, so what separates the two is what it leaves out: messages, and times that vary together.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch.distributed as dist

from megatron.prefixflow.step import StepRunner
from prefixflow.plan.plan import Plan
from prefixflow.runtime.trace import Event, OperationTrace
from prefixflow.schedule.ops import Op
from prefixflow.schedule.search import rank_table
from prefixflow.schedule.simulate import simulate

MAKESPAN_FIELDS = ("makespan_measured", "makespan_simulated", "makespan_ratio")


def compare_makespans(runner: StepRunner, plan: Plan, step: Callable[[], None], repeat: int) -> dict[str, float | None]:
    """Seconds of `repeat` steps (median) and of the simulated table, and simulated over measured; collective.

    `step` runs `plan` on `runner`. One more step before the others is not counted. Null without a pipeline.
    """
    if plan.config.pipeline_size == 1:
        return dict.fromkeys(MAKESPAN_FIELDS)
    events = _all_events(runner, step, repeat)
    measured = measured_makespan(events)
    simulated = simulated_makespan(plan, events)
    return dict(zip(MAKESPAN_FIELDS, (measured, simulated, simulated / measured), strict=True))


def _all_events(runner: StepRunner, step: Callable[[], None], repeat: int) -> list[Event]:
    trace = OperationTrace(runner.groups.data_rank)
    observed, runner.observe = runner.observe, trace.observe
    try:
        for trace.step in range(repeat + 1):
            dist.barrier()
            step()
    finally:
        runner.observe = observed
    everyone: list[list[Event]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, [event for event in trace.events if event.step])
    return [event for mine in everyone for event in mine]


def measured_makespan(events: Iterable[Event]) -> float:
    """Median over steps of the time from the first operation's start to the last one's end, on any rank."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for event in events:
        starts[event.step] = min(event.start_s, starts.get(event.step, event.start_s))
        ends[event.step] = max(event.end_s, ends.get(event.step, event.end_s))
    return statistics.median(ends[step] - starts[step] for step in starts)


def simulated_makespan(plan: Plan, events: Iterable[Event]) -> float:
    """Of the slowest data-parallel rank's table, an operation taking its median over steps and tensor-parallel ranks."""
    times: list[dict[Op, list[float]]] = [defaultdict(list) for _ in plan.ranks]
    for event in events:
        times[event.data_rank][event.op].append(event.end_s - event.start_s)
    medians = [{op: statistics.median(values) for op, values in mine.items()} for mine in times]
    return max(simulate(rank_table(plan, rank), mine.__getitem__).makespan for rank, mine in enumerate(medians))
