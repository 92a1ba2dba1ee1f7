"""Reduction during the last backwards: the same gradients, started early, in one order on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.prefixflow.arguments import (
    ddp_config,
    gpt_model_kwargs,
    loss_config,
    parallel_layout,
    parse_arguments,
    plan_config,
    transformer_config,
)
from megatron.prefixflow.gradients import gradient_norm, reduce_gradients
from megatron.prefixflow.model import build_model, wrap_data_parallel
from megatron.prefixflow.overlap import EarlyReduction, Reducible
from megatron.prefixflow.planning import plan_step
from megatron.prefixflow.session import start_session
from megatron.prefixflow.shards import full_gradients
from megatron.prefixflow.step import StepRunner
from prefixflow.runtime.attention.kernels import select_kernel
from prefixflow.runtime.world import Worlds
from prefixflow.schedule.ops import Op
from prefixflow.testing.generate import Style, two_level_groups
from prefixflow.trajectories import Trajectory

TINY = "--model tiny --num-layers 4 --max-tokens 24 --prefix-reuse on --ddp-bucket-size 100000"
TIED = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --max-position-embeddings 256
--max-tokens 24 --prefix-reuse on --ddp-bucket-size 20000"""
LAYOUTS = {
    "dp 2": f"{TINY} --dp 2 --dtype float64",
    "full recomputation": f"{TINY} --dp 2 --dtype float64 --recompute full",
    "distributed optimizer": f"{TINY} --dp 2 --dtype float32 --use-distributed-optimizer",
    "interleaved": f"{TINY} --dp 2 --pp 2 --vpp 2 --dtype float64",
    "tied over stages": f"{TIED} --dp 2 --pp 2 --dtype float64",
    "tensor parallel, tied": f"{TIED} --dp 2 --tp 2 --sequence-parallel --qk-layernorm --dtype float64",
}


def trajectories(num_groups: int) -> tuple[Trajectory, ...]:
    return two_level_groups(num_groups, 4, (40, 60), (8, 16), seed=5, style=Style(vocab_size=512))


class Step:
    """One step on this rank, with the log of what started and ended when."""

    def __init__(self, text: str, num_groups: int) -> None:
        args = parse_arguments(text.split())
        self.groups = start_session(parallel_layout(args), args.seed)
        chunks = build_model(transformer_config(args), self.groups, **gpt_model_kwargs(args))
        self.ddp = wrap_data_parallel(chunks, ddp_config(args))
        kernel = select_kernel("auto", next(chunks[0].parameters()).device)
        runner = StepRunner(chunks, self.groups, kernel, vocab_size=args.vocab_size)
        runner.reduction = EarlyReduction.of(self.ddp, self.groups)
        runner.observe = self._observe
        self.log: list[Any] = []
        loss = loss_config(args)
        plan = plan_step(trajectories(num_groups), plan_config(args), loss)
        start = Reducible.start

        def logged_start(reducible: Reducible) -> None:
            self.log.append((reducible.chunk, reducible.depth))
            start(reducible)

        with patch.object(Reducible, "start", logged_start):
            for _ in range(2):
                self.log.clear()
                for chunk in self.ddp:
                    chunk.zero_grad_buffer()
                runner.forward_backward(plan, trajectories(num_groups), loss)
                reduce_gradients(self.ddp)
        self.norm = gradient_norm(self.ddp, self.groups)
        gated = transformer_config(args).gated_linear_unit
        self.gradients = full_gradients(self.ddp, self.groups, gated=gated, vocab_size=args.vocab_size)

    @contextlib.contextmanager
    def _observe(self, op: Op) -> Iterator[None]:
        yield
        self.log.append(str(op))


def run_both(text: str, num_groups: int = 5) -> tuple[float, float, list[Any], int]:
    """Largest difference of a gradient and of the norm with and without overlap; log and pipeline rank of the overlap."""
    plain, early = Step(text, num_groups), Step(f"{text} --overlap-grad-reduce", num_groups)
    assert plain.gradients.keys() == early.gradients.keys()
    differences = [
        float((early.gradients[name] - g).norm() / g.norm().clamp_min(1e-300)) for name, g in plain.gradients.items()
    ]
    assert all(float(g.norm()) > 0 for g in plain.gradients.values())
    assert not any(isinstance(event, tuple) for event in plain.log)
    return max(differences), abs(early.norm / plain.norm - 1), early.log, early.groups.pipeline_rank


def starts(log: list[Any]) -> list[tuple[int, int]]:
    return [event for event in log if isinstance(event, tuple)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_the_same_and_start_early(worlds: Worlds, layout: str) -> None:
    text = LAYOUTS[layout]
    world_size = parallel_layout(parse_arguments(text.split())).world_size
    limit = 1e-6 if "float32" in text else 1e-12
    orders: dict[int, list[Any]] = {}
    for difference, norm_difference, log, pipeline_rank in worlds[world_size].run(run_both, text):
        assert difference < limit
        assert norm_difference < limit
        # Ranks that reduce together have different microbatches.
        assert orders.setdefault(pipeline_rank, starts(log)) == starts(log)
        chunks = {chunk for chunk, _ in starts(log)}
        for chunk in chunks if pipeline_rank == 0 else ():
            assert len([1 for c, _ in starts(log) if c == chunk]) > 1, "one bucket shows nothing"
            # Its first bucket starts inside the chunk's last backward: before that has ended, and not with the last bucket.
            place = min(i for i, event in enumerate(log) if isinstance(event, tuple) and event[0] == chunk)
            stage = chunk * (2 if "--pp" in text else 1)
            end = max(i for i, event in enumerate(log) if isinstance(event, str) and event.startswith(f"{stage}B"))
            assert place < end
        if len(chunks) > 1:
            assert starts(log)[0][0] == max(chunks)
            last_chunk = max(i for i, e in enumerate(log) if isinstance(e, tuple) and e[0] == max(chunks))
            assert any(isinstance(event, str) for event in log[last_chunk:]), "the other chunk had no operation left"


def test_a_rank_without_a_microbatch_takes_part(worlds: Worlds) -> None:
    results = worlds[2].run(run_lone_trajectory, LAYOUTS["dp 2"])
    (_, idle), (_, busy) = sorted(results, key=lambda r: len(r[1]))
    assert starts(idle) == idle
    assert starts(busy) == idle
    assert {norm for norm, _ in results} == {results[0][0]}


def run_lone_trajectory(text: str) -> tuple[float, list[Any]]:
    with patch(
        f"{__name__}.trajectories", lambda _: two_level_groups(1, 1, 40, 8, seed=5, style=Style(vocab_size=512))
    ):
        step = Step(f"{text} --overlap-grad-reduce", 1)
    return step.norm, step.log


def test_gradients_after_the_end_would_show(worlds: Worlds) -> None:
    """Mutant: a bucket starts one layer too early."""
    assert max(worlds[2].run(differ_when_too_early, LAYOUTS["dp 2"])) > 1e-6


def differ_when_too_early(text: str) -> float:
    advance, start = EarlyReduction._advance, Reducible.start

    def start_and_end(reducible: Reducible) -> None:
        """The sum is there before the gradients that come too late: otherwise it would depend on who is faster."""
        start(reducible)
        reducible.buckets.grad_reduce_handle.wait()

    with (
        patch.object(EarlyReduction, "_advance", lambda self, chunk, depth: advance(self, chunk, max(depth - 2, 0))),
        patch.object(Reducible, "start", start_and_end),
    ):
        return run_both(text)[0]


def test_megatrons_own_triggers_are_off(worlds: Worlds) -> None:
    (counted,) = worlds[1].run(ready_counts)
    assert not counted


def ready_counts() -> bool:
    args = parse_arguments(f"{TINY} --overlap-grad-reduce".split())
    groups = start_session(parallel_layout(args), args.seed)
    (ddp,) = wrap_data_parallel(
        build_model(transformer_config(args), groups, **gpt_model_kwargs(args)), ddp_config(args)
    )
    weight = next(ddp.module.parameters())
    (weight.sum() * 2).backward()
    assert torch.equal(weight.main_grad, torch.full_like(weight, 2))
    return any(group.per_param_grad_ready_counts for group in ddp.bucket_groups)
