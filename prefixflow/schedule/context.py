"""Choose where K/V are under context parallelism: whole on each rank where that fits, else sharded (`plan.ring`).

Gathered K/V move once, whatever reads them; sharded ones move again for each microbatch that reads them, and need 1 / cp of
the memory. The choice depends on the plan and the memory model alone, so it is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefixflow.plan.context import ContextKV
from prefixflow.plan.plan import Plan
from prefixflow.schedule.memory import MemoryModel, Phase, peak_bytes
from prefixflow.schedule.search import rank_table


@dataclass(frozen=True, slots=True)
class ContextKVChoice:
    """The choice, and the reason in a few words for people."""

    kv: ContextKV
    reason: str


def predicted_peaks(plan: Plan, memory: MemoryModel) -> dict[Phase, int]:
    """Largest bytes alive in each phase on any rank."""
    tables = [rank_table(plan, rank) for rank in range(len(plan.ranks))]
    peaks = [peak_bytes(plan, rank, row, memory) for rank, table in enumerate(tables) for row in table.rows]
    return {phase: max(peak[phase] for peak in peaks) for phase in Phase}


def choose_context_kv(
    wanted: ContextKV | None, plan: Plan, memory: MemoryModel, budget_bytes: float | None
) -> ContextKVChoice:
    """`wanted` where it is named; None takes `GATHER` unless its predicted peak exceeds the budget, then `RING`."""
    if wanted is not None:
        return ContextKVChoice(wanted, "asked for")
    if budget_bytes is None:
        return ContextKVChoice(ContextKV.GATHER, "moves least, and there is no memory budget")
    peak = max(predicted_peaks(plan, replace(memory, context_kv=ContextKV.GATHER)).values())
    figures = f"{peak / 2**30:.2f} GiB of a budget of {budget_bytes / 2**30:.2f} GiB"
    if peak > budget_bytes:
        return ContextKVChoice(ContextKV.RING, f"gathered K/V would need {figures}")
    return ContextKVChoice(ContextKV.GATHER, f"moves least, and needs {figures}")
