"""Gradients after the last backward: one reduction, then norm and clipping in the precision of the gradients.

Megatron's norm is float32 by construction and its clipping refuses float64 by type, so both are ours in every precision.
The loss is already normalised by logical counts, so the reduction is a plain sum (`calculate_per_token_loss`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron.prefixflow.experts import is_expert
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.overlap import reduction_order
from megatron.prefixflow.shards import global_parameters

_RUN = 1024
"""Elements whose squares are summed in float32."""


def reduce_gradients(model: Sequence[DistributedDataParallel]) -> None:
    """Sum gradients over data-parallel ranks and finish Megatron's other gradient reductions; once per step.

    Reductions that the step has started early are waited for, and the others started in the order that all ranks share.
    """
    for reducible in reduction_order(model):
        if reducible.overlaps and not reducible.has_started:
            reducible.start()
    finalize_model_grads(list(model))


def gradient_norm(model: Sequence[DistributedDataParallel], groups: Groups) -> float:
    """L2 norm over all parameters of the whole model, each counted once, accumulated in float64.

    Call after `reduce_gradients`. With the distributed optimizer each rank holds a valid shard of each bucket only,
    so the sum runs over data-parallel ranks too.
    """
    device = next(model[0].parameters()).device
    dense, experts = torch.zeros(2, dtype=torch.float64, device=device)
    for parameter, gradient in _owned_gradients(model, groups):
        (experts if is_expert(parameter) else dense).add_(square_sum(gradient))
    sharded = model[0].ddp_config.use_distributed_optimizer
    total = _sum_over(dense, groups.model_parallel, groups.data_context if sharded else None)
    if any(is_expert(parameter) for chunk in model for parameter in chunk.parameters()):
        total += _sum_over(experts, groups.expert_model_parallel, groups.expert_data if sharded else None)
    return float(total.sqrt())


def clip_gradients(model: Sequence[DistributedDataParallel], max_norm: float, norm: float) -> float:
    """Scale all gradients by max_norm / norm where that is below 1; returns the factor (1.0: untouched)."""
    if max_norm <= 0 or norm <= max_norm:
        return 1.0
    factor = max_norm / norm
    for chunk in model:
        chunk.scale_gradients(factor)
    return factor


def _sum_over(value: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
    for group in groups:
        if group is not None:
            dist.all_reduce(value, group=group)
    return value


def square_sum(gradient: Tensor) -> Tensor:
    """Sum of squares as a float64 scalar.

    torch's norm of a float32 tensor on the CPU is off by 1e-3 at the size of an embedding, and converting every gradient to
    float64 is slow: float32 only within runs, float64 over them.
    """
    if gradient.dtype == torch.float64:
        return torch.linalg.vector_norm(gradient).square()
    flat = gradient.reshape(-1)
    num_in_runs = flat.numel() - flat.numel() % _RUN
    runs, rest = flat[:num_in_runs].view(-1, _RUN), flat[num_in_runs:]
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in (runs, rest[None])]
    return torch.cat(norms).double().square().sum()


def _owned_gradients(
    model: Sequence[DistributedDataParallel], groups: Groups
) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Parameters that no other model-parallel rank counts, with their main gradient (or this rank's shard of it)."""
    for chunk in model:
        shards = _shards(chunk, groups) if chunk.ddp_config.use_distributed_optimizer else None
        for parameter in chunk.parameters():
            tensor = groups.expert_tensor if is_expert(parameter) else groups.tensor
            counted = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, tensor)
            if not parameter.requires_grad or not counted:
                continue
            if shards is None:
                yield parameter, parameter.main_grad
            elif (piece := shards.get(parameter)) is not None:
                yield parameter, piece


def reduced_gradients(model: Sequence[DistributedDataParallel], groups: Groups) -> Iterator[tuple[str, Tensor]]:
    """Gradients by name in the whole model, as far as this rank has them: with the distributed optimizer a shard of each bucket.

    Call after `reduce_gradients`.
    """
    for chunk in model:
        shards = _shards(chunk, groups) if chunk.ddp_config.use_distributed_optimizer else None
        for name, parameter in global_parameters(chunk.module):
            if not parameter.requires_grad:
                continue
            if shards is None:
                yield name, parameter.main_grad  # type: ignore[attr-defined]
            elif (piece := shards.get(parameter)) is not None:
                yield name, piece


def _shards(chunk: Any, groups: Groups) -> dict[torch.nn.Parameter, Tensor]:
    """The part of each parameter's gradient that the reduce-scatter left on this rank."""
    return {
        **_buffer_shards(chunk.buffers, groups.data_context),
        **_buffer_shards(chunk.expert_parallel_buffers, groups.expert_data),
    }


def _buffer_shards(buffers: Sequence[Any], group: dist.ProcessGroup) -> dict[torch.nn.Parameter, Tensor]:
    size, rank = group.size(), group.rank()
    shards: dict[torch.nn.Parameter, Tensor] = {}
    for buffer in buffers:
        for bucket in buffer.buckets:
            length = bucket.grad_data.numel() // size
            low, high = rank * length, (rank + 1) * length
            for parameter in bucket.params:
                # Not `bucket.param_to_index`, which leaves out the padding between parameters.
                first, last, _ = buffer.param_index_map[parameter]
                start, stop = max(first - bucket.offset, low), min(last - bucket.offset, high)
                if start < stop:
                    shards[parameter] = bucket.grad_data[start:stop]
    return shards
