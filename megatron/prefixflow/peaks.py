"""Memory of one rank in a step: predicted from its plan, and measured while it runs, by phase and by what holds it.

On a GPU the allocator's own peak is the measure. On the CPU live tensors are counted, which slows operations down, so only
where it is asked for (`--measure-memory`); without it the process's largest resident set stands in the metrics, which includes
Python, libraries and what torch's allocator keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.prefixflow.planning import MemorySettings
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.batch import segment_row_counts
from prefixflow.plan.plan import Plan
from prefixflow.runtime.memory import LiveBytes
from prefixflow.runtime.trace import together
from prefixflow.schedule.memory import Holder, Phase, phase_of
from prefixflow.schedule.ops import Op
from prefixflow.schedule.peak import MemoryPoint, memory_curve
from prefixflow.schedule.search import rank_table
from prefixflow.trajectories.types import Trajectory


@dataclass(slots=True)
class MeasuredMemory:
    """Bytes beyond weights, gradients and optimizer: the largest of each phase, and what held the largest of all."""

    phases: dict[Phase, int] = field(default_factory=dict)
    by_holder: dict[Holder, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values(), default=0)


@contextlib.contextmanager
def measured_memory(runner: StepRunner, plan: Plan, *, budget_bytes: int | None = None) -> Iterator[MeasuredMemory]:
    """Count the tensors of the pass that `runner` makes inside; MemoryBudgetError where they exceed a budget."""
    measured = MeasuredMemory()
    microbatches = plan.ranks[runner.groups.data_rank]
    caches, observe = runner.caches, runner.observe
    held = {
        Holder.KEYS_VALUES: lambda: sum(cache.kv_bytes for cache in caches),
        Holder.KV_GRADIENTS: lambda: sum(cache.gradient_bytes for cache in caches),
    }
    with LiveBytes(held=held, budget_bytes=budget_bytes) as live:

        @contextlib.contextmanager
        def watch(op: Op) -> Iterator[None]:
            live.reset_peak()
            yield
            if live.peak > measured.peak_bytes:
                measured.by_holder = live.at_peak
            phase = phase_of(microbatches[op.microbatch], op.kind)
            measured.phases[phase] = max(measured.phases.get(phase, 0), live.peak)

        runner.observe = watch if observe is None else together(observe, watch)
        try:
            yield measured
        finally:
            runner.observe = observe


def predicted_memory(
    settings: MemorySettings, plan: Plan, trajectories: Sequence[Trajectory], data_rank: int, pipeline_rank: int
) -> tuple[MemoryPoint, ...]:
    """The operations of one rank's training pass."""
    row = rank_table(plan, data_rank).rows[pipeline_rank]
    rows = segment_row_counts(plan.forest, trajectories)
    memory_plan = settings.plan_row(plan, data_rank, pipeline_rank, training=True)
    return memory_curve(plan, data_rank, row, settings.model, rows=rows, memory_plan=memory_plan)


def state_bytes(ddp: Sequence[Any], optimizer: Any = None) -> int:
    """Of weights, gradient buffers and, after its first step, the optimizer."""
    tensors = [p.data for chunk in ddp for p in chunk.parameters()]
    tensors += [buffer.grad_data for chunk in ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for part in getattr(optimizer, "chained_optimizers", [optimizer] if optimizer is not None else []):
        inner = getattr(part, "optimizer", None) or part
        tensors += [p.data for group in inner.param_groups for p in group["params"]]
        tensors += [
            value for state in inner.state.values() for value in state.values() if hasattr(value, "untyped_storage")
        ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
