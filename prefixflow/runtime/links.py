"""Messages between pipeline stages, each named by the operation that waits for it.

A message is the input of an operation: F on a stage other than the first waits for the activations of the stage before,
B on a stage other than the last for the gradient from the stage behind. Both ends derive everything from the table: who
sends, when, and how large it is. Nothing is negotiated, and nothing is matched by arrival.

Messages of one direction between two ranks travel on a channel of their own (a process group): forward, backward, and,
with several chunks a rank, the wrap-around links of each. On a channel both ends have the same order, because
every row runs F in forward order and B in backward order, so a backend that matches by order (NCCL) and one
that matches by tag (gloo) behave the same, and no direction can block the other.

The next message of a channel is received while the current operation runs. A sent message belongs to its link, which
drops it when it has left; nobody else keeps it.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prefixflow.schedule.ops import Kind, Op


class Channel(enum.Enum):
    """Direction of a message; the wrapped ones go from the last rank to the first (F) and back (B)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FORWARD_WRAP = "forward wrap"
    BACKWARD_WRAP = "backward wrap"


@dataclass(frozen=True, slots=True)
class Topology:
    """`ranks[r]` is the global rank of pipeline rank r; stage g lives on pipeline rank g % len(ranks)."""

    ranks: tuple[int, ...]
    position: int
    num_stages: int

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def needs_input(self, op: Op) -> bool:
        return op.stage > 0 if op.kind is Kind.FORWARD else op.stage + 1 < self.num_stages

    def source(self, op: Op) -> int:
        """Global rank that sends the input of `op`."""
        step = -1 if op.kind is Kind.FORWARD else 1
        return self.ranks[(op.stage + step) % self.num_ranks]

    def target(self, op: Op) -> Op | None:
        """The operation that waits for the result of `op`; None where nothing does."""
        step = 1 if op.kind is Kind.FORWARD else -1
        stage = op.stage + step
        return Op(stage, op.kind, op.microbatch) if 0 <= stage < self.num_stages else None

    def holder(self, op: Op) -> int:
        """Global rank that runs `op`."""
        return self.ranks[op.stage % self.num_ranks]

    def channel(self, op: Op) -> Channel:
        """Channel of the message that `op` waits for."""
        if op.kind is Kind.FORWARD:
            return Channel.FORWARD_WRAP if op.stage % self.num_ranks == 0 else Channel.FORWARD
        last = self.num_ranks - 1
        return Channel.BACKWARD_WRAP if op.stage % self.num_ranks == last else Channel.BACKWARD


@dataclass(slots=True)
class _Incoming:
    buffer: Tensor
    work: Any


class Outbox:
    """Messages of one channel that are being sent; each is dropped when it has left.

    Gloo notices the end of a send only while someone waits for it, so there a thread does. NCCL is asked.
    """

    def __init__(self, *, needs_waiting: bool) -> None:
        self._sending: list[tuple[Any, Tensor]] = []
        self._error: Exception | None = None
        self._waiting: queue.SimpleQueue[tuple[Any, Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if needs_waiting:
            # A daemon: when this rank fails, nobody may ever take what it has sent.
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()

    def add(self, work: Any, message: Tensor) -> None:
        """Keep `message` until `work` is done."""
        if self._thread is not None:
            self._waiting.put((work, message))
        else:
            self._sending = [(w, t) for w, t in self._sending if not w.is_completed()]
            self._sending.append((work, message))

    def finish(self) -> None:
        """Wait until everything has left; raises what a send has raised."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        for work, _ in self._sending:
            work.wait()
        self._sending = []
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                item[0].wait()
            except Exception as error:
                self._error = self._error or error
            # Or the message would live until the next one comes.
            del item


class Links:
    """Sends and receives the messages of one rank's row.

    shape: shape of a microbatch's message, the same in both directions.
    groups: process group per channel; every rank of the pipeline is in each.
    """

    def __init__(
        self,
        row: Sequence[Op],
        topology: Topology,
        groups: Mapping[Channel, dist.ProcessGroup],
        *,
        shape: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.topology = topology
        self.groups = groups
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.num_bytes_sent = 0
        self._following = _following_on_channel(row, topology)
        self._incoming: dict[Op, _Incoming] = {}
        self._outboxes: dict[Channel, Outbox] = {}

    def receive(self, op: Op) -> Tensor:
        """The input of `op`; starts to receive the next one of the same channel."""
        if op not in self._incoming:
            self._post(op)
        incoming = self._incoming.pop(op)
        try:
            incoming.work.wait()
        except RuntimeError as error:
            error.add_note(
                f"PrefixFlow: {op} waits for a message of rank {self.topology.source(op)}, which failed or is gone: its "
                "own message, if it left one, says why."
            )
            raise
        following = self._following.get(op)
        if following is not None:
            self._post(following)
        return incoming.buffer

    def send(self, op: Op, result: Tensor) -> None:
        """Send the result of `op` to the operation that waits for it; returns at once."""
        target = self.topology.target(op)
        assert target is not None, f"nothing waits for the result of {op}"
        expected = self.shape(op.microbatch)
        assert tuple(result.shape) == expected, f"{op}: message {tuple(result.shape)}, planned {expected}"
        message = result.detach().contiguous()
        channel = self.topology.channel(target)
        work = dist.isend(
            message, dst=self.topology.holder(target), group=self.groups[channel], tag=_tag(target, self.topology)
        )
        self.num_bytes_sent += message.numel() * message.element_size()
        if channel not in self._outboxes:
            self._outboxes[channel] = Outbox(needs_waiting=self.device.type == "cpu")
        self._outboxes[channel].add(work, message)

    def finish(self) -> None:
        """Wait until everything is sent; every expected message must have been taken."""
        for channel, outbox in self._outboxes.items():
            try:
                outbox.finish()
            except RuntimeError as error:
                error.add_note(
                    f"PrefixFlow: rank {dist.get_rank()} has run all its operations, but the rank that takes its "
                    f"{channel.value} messages failed or is gone: its own message, if it left one, says why."
                )
                raise
        self._outboxes = {}
        assert not self._incoming, f"messages nobody took: {[str(op) for op in self._incoming]}"

    def _post(self, op: Op) -> None:
        buffer = torch.empty(self.shape(op.microbatch), dtype=self.dtype, device=self.device)
        work = dist.irecv(
            buffer,
            src=self.topology.source(op),
            group=self.groups[self.topology.channel(op)],
            tag=_tag(op, self.topology),
        )
        self._incoming[op] = _Incoming(buffer, work)


def _tag(op: Op, topology: Topology) -> int:
    return op.microbatch * topology.num_stages + op.stage


def _following_on_channel(row: Sequence[Op], topology: Topology) -> dict[Op, Op]:
    last: dict[Channel, Op] = {}
    following: dict[Op, Op] = {}
    for op in row:
        if topology.needs_input(op):
            channel = topology.channel(op)
            if channel in last:
                following[last[channel]] = op
            last[channel] = op
    return following
