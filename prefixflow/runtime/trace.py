"""A timeline of the operations that ran, in Chrome's trace format (opens in Perfetto): one row a stage.

Boxes are named by their operation, as in the table and in drawings, so that prediction and reality can be laid side by
side. Times are wall clock; ranks on different machines are as well aligned as their clocks.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prefixflow.runtime.executor import Observer
from prefixflow.schedule.ops import Kind, Op
from prefixflow.trajectories.files import atomic_write


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of one step on one rank; seconds since the epoch. `is_training` is False in passes that only score."""

    step: int
    data_rank: int
    op: Op
    start_s: float
    end_s: float
    is_training: bool = True


@dataclass(slots=True)
class OperationTrace:
    """An observer that keeps the times of operations. On a GPU, kernels may still run when an operation ends."""

    data_rank: int
    step: int = 0
    is_training: bool = True
    events: list[Event] = field(default_factory=list)

    @contextlib.contextmanager
    def observe(self, op: Op) -> Iterator[None]:
        start = time.time()
        yield
        self.events.append(Event(self.step, self.data_rank, op, start, time.time(), self.is_training))


def write_trace(path: str | Path, events: Iterable[Event]) -> None:
    """Write all events; a process is a data-parallel rank, a thread a pipeline stage."""
    events = sorted(events, key=lambda e: e.start_s)
    origin = events[0].start_s if events else 0.0
    boxes = [
        {
            "name": str(event.op),
            "cat": "forward" if event.op.kind is Kind.FORWARD else "backward",
            "ph": "X",
            "ts": (event.start_s - origin) * 1e6,
            "dur": (event.end_s - event.start_s) * 1e6,
            "pid": event.data_rank,
            "tid": event.op.stage,
            "args": {
                "step": event.step,
                "microbatch": event.op.microbatch,
                "pass": "training" if event.is_training else "scoring",
            },
        }
        for event in events
    ]
    rows = sorted({(event.data_rank, event.op.stage) for event in events})
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"data-parallel rank {rank}"}}
        for rank in sorted({rank for rank, _ in rows})
    ] + [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": stage, "args": {"name": f"stage {stage}"}}
        for rank, stage in rows
    ]
    with atomic_write(path) as file:
        file.write(json.dumps({"traceEvents": names + boxes}).encode())


def together(*observers: Observer) -> Observer:
    """One observer that enters all of them."""

    @contextlib.contextmanager
    def observe(op: Op) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer(op))
            yield

    return observe
