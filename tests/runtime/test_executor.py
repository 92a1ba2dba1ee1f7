"""The executor: what is observed of an operation is its computation, not its messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prefixflow.runtime.executor import execute
from prefixflow.runtime.links import Topology
from prefixflow.schedule.ops import Op
from prefixflow.schedule.residency import MemoryAction, MemoryPlan, Move, Part
from prefixflow.schedule.table import build_table


class Recorder:
    """Stage, links and observer of the middle of three ranks; keeps the order of what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.topology = Topology((0, 1, 2), 1, 3)

    def forward(self, m: int, received: Any, *, keep_logits: bool) -> torch.Tensor:
        self.calls.append(f"F{m}")
        return torch.zeros(1)

    def backward(self, m: int, received: Any) -> torch.Tensor:
        self.calls.append(f"B{m}")
        return torch.zeros(1)

    def act(self, action: MemoryAction) -> None:
        self.calls.append(str(action))

    def receive(self, op: Op) -> torch.Tensor:
        self.calls.append("receive")
        return torch.zeros(1)

    def send(self, op: Op, result: torch.Tensor) -> None:
        self.calls.append("send")

    @contextlib.contextmanager
    def observe(self, op: Op) -> Iterator[None]:
        self.calls.append("begin")
        yield
        self.calls.append("end")

    def finish(self) -> None:
        self.calls.append("finish")


def test_the_wait_for_a_message_is_not_observed() -> None:
    recorder = Recorder()
    execute(build_table([()], num_ranks=3), 1, {1: recorder}, recorder, recorder.observe)  # type: ignore[arg-type]
    operations = [["receive", "begin", name, "end", "send"] for name in ("F0", "B0")]
    assert recorder.calls == [*operations[0], *operations[1], "finish", "finish"]


def test_actions_of_the_memory_plan_stand_before_and_after_their_operation() -> None:
    recorder = Recorder()
    evict, fetch = (MemoryAction(move, 1, 7, Part.KEYS_VALUES) for move in (Move.EVICT, Move.FETCH))
    plan = MemoryPlan(before={1: (fetch,)}, after={0: (evict,)})
    execute(build_table([()], num_ranks=3), 1, {1: recorder}, recorder, recorder.observe, plan)  # type: ignore[arg-type]
    forward, backward = (["receive", "begin", name, "end", "send"] for name in ("F0", "B0"))
    assert recorder.calls == [*forward, "evict 1:7 kv", "fetch 1:7 kv", *backward, "finish", "finish"]


def test_an_error_in_an_action_names_the_action_and_the_operation() -> None:
    recorder = Recorder()
    plan = MemoryPlan(before={1: (MemoryAction(Move.DROP, 1, 7),)})

    def act(action: MemoryAction) -> None:
        raise ValueError("gone")

    recorder.act = act  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="gone") as caught:
        execute(build_table([()], num_ranks=3), 1, {1: recorder}, recorder, memory=plan)  # type: ignore[arg-type]
    notes = "\n".join(caught.value.__notes__)
    assert "in action drop 1:7 of the memory plan" in notes
    assert "in operation 1B0" in notes
