"""The output of a stage is gone once the next stage has received it: only its graph stays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

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
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.links import Links
from prefixflow.runtime.world import Worlds
from prefixflow.schedule.ops import Kind, Op, backward
from prefixflow.schedule.search import rank_table
from prefixflow.testing.generate import Style, two_level_groups

ARGUMENTS = "--model tiny --dtype float32 --max-tokens 24 --prefix-reuse on --pp 2"
TRAJECTORIES = two_level_groups(3, 4, (40, 60), (8, 16), seed=5, style=Style(vocab_size=512))


def run_watching_outputs(more: str) -> tuple[int, int]:
    """Outputs (and their bytes) still alive in the first B of stage 0, of those that stage 1 has received by then."""
    args = parse_arguments(f"{ARGUMENTS} {more}".split())
    groups = start_session(parallel_layout(args), args.seed)
    chunks = build_model(transformer_config(args), groups, **gpt_model_kwargs(args))
    kernel = select_kernel("auto", next(chunks[0].parameters()).device)
    runner = StepRunner(chunks, groups, kernel, vocab_size=args.vocab_size)
    loss = loss_config(args)
    plan = plan_step(TRAJECTORIES, plan_config(args), loss)
    outputs: dict[Op, StorageWeakRef] = {}
    sizes: dict[Op, int] = {}
    found: list[tuple[int, int]] = []
    behind = rank_table(plan, 0).rows[1]
    first = next(op for op in behind if op.kind is Kind.BACKWARD and op.stage == 1)
    received = {op.microbatch for op in behind[: behind.index(first)] if op.kind is Kind.FORWARD and op.stage == 1}
    send = Links.send

    def watched_send(links: Links, op: Op, result: torch.Tensor) -> None:
        outputs[op] = StorageWeakRef(result.untyped_storage())
        sizes[op] = result.nbytes
        send(links, op, result)

    @contextlib.contextmanager
    def look(op: Op) -> Iterator[None]:
        yield
        if op == backward(first.microbatch) and groups.pipeline_rank == 0:
            sent = [f for f in outputs if f.kind is Kind.FORWARD and f.stage == 0 and f.microbatch in received]
            assert len(sent) == len(received) > 1
            deadline = time.monotonic() + 20
            while not all(outputs[f].expired() for f in sent) and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append((len(sent), sum(sizes[f] for f in sent if not outputs[f].expired())))

    runner.observe = look
    with patch.object(Links, "send", watched_send):
        runner.forward_backward(plan, TRAJECTORIES, loss)
    return found[0] if found else (0, 0)


@pytest.mark.parametrize("more", ["", "--recompute full", "--vpp 2"])
def test_outputs_that_were_received_are_gone(worlds: Worlds, more: str) -> None:
    (num_sent, bytes_alive), _ = worlds[2].run(run_watching_outputs, more, timeout_s=120)
    assert num_sent > 1
    assert bytes_alive == 0
