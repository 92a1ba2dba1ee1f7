"""Messages between stages: what has been sent is not kept."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from prefixflow.runtime.executor import execute
from prefixflow.runtime.links import Channel, Links, Topology
from prefixflow.runtime.memory import LiveBytes
from prefixflow.runtime.world import Worlds
from prefixflow.schedule.ops import Kind, Op
from prefixflow.schedule.residency import MemoryAction
from prefixflow.schedule.table import OpTable

SHAPE = (1000, 1, 16)
MESSAGE_BYTES = 1000 * 16 * 8
NUM_MICROBATCHES = 6


class DoublingStage:
    """y = 2 x, whose graph saves nothing."""

    def __init__(self, *, is_first: bool) -> None:
        self.is_first = is_first
        self.roots: dict[int, tuple[Tensor, GradientEdge]] = {}
        self.gradients: dict[int, float] = {}

    def forward(self, m: int, received: Tensor | None, *, keep_logits: bool) -> Tensor:
        leaf = torch.full((1,), float(m), dtype=torch.float64) if received is None else received
        out = 2 * leaf.requires_grad_().expand(SHAPE)
        self.roots[m] = (leaf, get_gradient_edge(out))
        return out

    def backward(self, m: int, received: Tensor | None) -> Tensor | None:
        leaf, root = self.roots.pop(m)
        torch.autograd.backward(root, torch.ones(SHAPE, dtype=torch.float64) if received is None else received)
        assert leaf.grad is not None
        self.gradients[m] = float(leaf.grad.sum())
        return None if self.is_first else leaf.grad

    def act(self, action: MemoryAction) -> None:
        raise AssertionError(f"there is no memory plan, but {action} ran")

    def finish(self) -> None:
        assert not self.roots


def bytes_alive_before_the_first_backward() -> int:
    """All forwards run first; what is alive on the first rank when the other one has taken every message."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    rows = tuple(tuple(Op(r, kind, m) for kind in Kind for m in range(NUM_MICROBATCHES)) for r in (0, 1))
    links = Links(
        rows[rank],
        Topology((0, 1), rank, 2),
        dict.fromkeys((Channel.FORWARD, Channel.BACKWARD), group),
        shape=lambda m: SHAPE,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    live = LiveBytes()
    seen: list[int] = []
    stage = DoublingStage(is_first=rank == 0)

    class Watched:
        def __enter__(self) -> None:
            if rank == 0 and len(stage.roots) == NUM_MICROBATCHES:
                seen.append(settled(live))

        def __exit__(self, *exception: object) -> None: ...

    with live:
        execute(OpTable(rows, ((),) * NUM_MICROBATCHES), rank, {rank: stage}, links, lambda op: Watched())
    if rank == 0:
        assert stage.gradients == dict.fromkeys(range(NUM_MICROBATCHES), 4.0 * 16000)
    return seen[0] if seen else 0


def settled(live: LiveBytes) -> int:
    """Bytes alive once they no longer fall: messages leave on their own."""
    deadline = time.monotonic() + 20
    while live.now >= 3 * MESSAGE_BYTES and time.monotonic() < deadline:
        time.sleep(0.01)
    return live.now


def test_what_has_been_sent_is_not_kept(worlds: Worlds) -> None:
    alive, _ = worlds[2].run(bytes_alive_before_the_first_backward)
    # The gradient that the first backward has received, and room for the next one.
    assert 2 * MESSAGE_BYTES <= alive < 3 * MESSAGE_BYTES
