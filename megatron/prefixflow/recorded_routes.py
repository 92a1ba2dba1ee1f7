"""Routes that a pass has taken, by trajectory: what a framework keeps of an old-policy pass to replay it in the updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.prefixflow.routing import RouteStore, chunk_routers
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.microbatch import Microbatch
from prefixflow.plan.plan import Plan


def recorded_routes(
    runner: StepRunner, plan: Plan, trajectories: Sequence[int], store: RouteStore
) -> list[dict[int, np.ndarray]]:
    """Of each model chunk of this rank: trajectory to routes [positions, MoE layers of the chunk, top-k], int16.

    trajectories: all that this data-parallel rank has. store: filled by a pass of `runner` over `plan`. Collective over tensor- and
    context-parallel ranks, which hold parts of the rows of a microbatch.
    """
    kept = [store.chunk(number, plan.digest) for number in range(len(runner.chunks))]
    return [_of_chunk(runner, plan, trajectories, number, of_chunk) for number, of_chunk in enumerate(kept)]


def _of_chunk(
    runner: StepRunner, plan: Plan, trajectories: Sequence[int], number: int, kept: Mapping[int, Mapping[int, Tensor]]
) -> dict[int, np.ndarray]:
    chunk, groups = runner.chunks[number], runner.groups
    layers = [router.layer_number for router in chunk_routers(chunk)]
    found = {
        i: np.full((plan.forest.lengths[i], len(layers), chunk.config.moe_router_topk), -1, np.int16)
        for i in trajectories
    }
    if not layers:
        return found
    for microbatch in plan.ranks[groups.data_rank]:
        held = torch.stack([kept[microbatch.id][layer] for layer in layers], dim=1)
        routes = _whole(runner, microbatch, held).to(torch.int16).cpu().numpy()
        for s, span in zip(microbatch.segments, microbatch.spans, strict=True):
            segment = plan.forest.segments[s]
            for member in segment.members:
                found[member][segment.span.slice] = routes[span.slice]
    return found


def _whole(runner: StepRunner, microbatch: Microbatch, held: Tensor) -> Tensor:
    """Routes [T, layers, top-k] of a microbatch out of the rows that this rank's routers saw."""
    rows = held.int()
    group = runner.groups.tensor
    if runner.chunks[0].config.sequence_parallel and group.size() > 1:
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        rows = torch.cat(parts)
    if runner.parallel is None:
        return rows
    return runner.parallel.gather(rows)[runner.parallel.split(microbatch, runner.device).flat_order]
