"""Run one rank's row of the table: receive, compute, send, operation by operation, with what the memory plan puts between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from prefixflow.runtime.failures import this_process
from prefixflow.runtime.links import Links
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.residency import MemoryAction, MemoryPlan
from prefixflow.schedule.table import OpTable, surroundings

Observer = Callable[[Op], AbstractContextManager[Any]]
"""Entered around the computation of each operation, not its messages: timers, traces and memory measurements."""


class Stage(Protocol):
    """One model chunk: computes F and B of a microbatch."""

    def forward(self, m: int, received: Tensor | None, *, keep_logits: bool) -> Tensor:
        """Output [T, 1, h] of the chunk; `received` is the output of the chunk before, None on the first stage."""
        ...

    def backward(self, m: int, received: Tensor | None) -> Tensor | None:
        """Gradient of what F received (None on the first stage); `received` is the gradient of the chunk's output,
        None on the last stage, which has the loss."""
        ...

    def act(self, action: MemoryAction) -> None:
        """Move, drop or recompute what the memory plan says."""
        ...

    def finish(self) -> None:
        """All operations have run: nothing may be left."""
        ...


def execute(
    table: OpTable,
    rank: int,
    stages: Mapping[int, Stage],
    links: Links | None = None,
    observe: Observer | None = None,
    memory: MemoryPlan | None = None,
) -> None:
    """Run the row of pipeline rank `rank` in order. `links` may be None where one stage is the whole model.

    memory: of this row. Actions before an operation run while its message is on its way, those after it when its result
    is; neither is observed.

    An error carries a note that names the rank and the operation, and shows what stands around it on every rank.
    """
    observe = observe or _unobserved
    memory = memory or MemoryPlan()
    row = table.rows[rank]
    for place, op in enumerate(row):
        follows_at_once = place + 1 < len(row) and row[place + 1] == Op(op.stage, Kind.BACKWARD, op.microbatch)
        try:
            _act(memory.before.get(place, ()), stages)
            _run(op, stages[op.stage], links, observe, keep_logits=follows_at_once)
            _act(memory.after.get(place, ()), stages)
        except Exception as error:
            error.add_note(
                f"PrefixFlow: {this_process()}in operation {op} (number {place} of {len(row)} of pipeline rank {rank}).\n"
                f"{surroundings(table, rank, place)}"
            )
            raise
    if links is not None:
        links.finish()
    for stage in stages.values():
        stage.finish()


def _run(op: Op, stage: Stage, links: Links | None, observe: Observer, *, keep_logits: bool) -> None:
    received = links.receive(op) if links is not None and links.topology.needs_input(op) else None
    with observe(op):
        if op.kind is Kind.FORWARD:
            result: Tensor | None = stage.forward(op.microbatch, received, keep_logits=keep_logits)
        else:
            result = stage.backward(op.microbatch, received)
    if links is not None and links.topology.target(op) is not None:
        assert result is not None
        links.send(op, result)


def _act(actions: Sequence[MemoryAction], stages: Mapping[int, Stage]) -> None:
    for action in actions:
        try:
            stages[action.stage].act(action)
        except Exception as error:
            error.add_note(f"PrefixFlow: in action {action} of the memory plan.")
            raise


def _unobserved(op: Op) -> AbstractContextManager[None]:
    return nullcontext()
