"""Cut full parameters into tensor-parallel shards and put them together again, by Megatron's own parameter attributes.

Names are Megatron's, as in `GPTModel.state_dict()`. A sharded parameter has `tensor_model_parallel` and
`partition_dim`. Two layouts need care: a gated MLP's first linear holds [gate; up] on every rank, and the vocabulary
is padded to a multiple of the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron.prefixflow.groups import Groups

VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


def split_parameter(name: str, full: Tensor, like: torch.nn.Parameter, *, rank: int, size: int, gated: bool) -> Tensor:
    """Shard of `full` for tensor-parallel `rank` of `size`, shaped as the local parameter `like`.

    A vocabulary shorter than the padded one is filled with zeros.
    """
    if not getattr(like, "tensor_model_parallel", False):
        return full
    dim = _partition_dim(like)
    if name in VOCABULARY_PARAMETERS and full.shape[0] < like.shape[0] * size:
        padding = full.new_zeros(like.shape[0] * size - full.shape[0], *full.shape[1:])
        full = torch.cat([full, padding])
    if gated and _is_gated(name):
        return torch.cat([half.chunk(size, dim)[rank] for half in full.chunk(2, dim)], dim)
    return full.chunk(size, dim)[rank].contiguous()


def join_parameter(
    name: str, shards: Sequence[Tensor], like: torch.nn.Parameter, *, gated: bool, vocab_size: int
) -> Tensor:
    """Inverse of `split_parameter`, padded vocabulary rows left out."""
    if not getattr(like, "tensor_model_parallel", False):
        full = shards[0]
    elif gated and _is_gated(name):
        halves = [shard.chunk(2, _partition_dim(like)) for shard in shards]
        full = torch.cat([half[which] for which in (0, 1) for half in halves], dim=_partition_dim(like))
    else:
        full = torch.cat(list(shards), dim=_partition_dim(like))
    return full[:vocab_size] if name in VOCABULARY_PARAMETERS else full


def load_full_parameters(
    chunks: Sequence[torch.nn.Module], full: Mapping[str, Tensor], *, rank: int, size: int, gated: bool
) -> None:
    """Copy this rank's shards of `full` into `chunks`; every parameter must be there.

    Raises ValueError naming a parameter that is missing or has another shape.
    """
    for chunk in chunks:
        for name, parameter in global_parameters(chunk):
            if name not in full:
                raise ValueError(f"Parameter {name!r} of the model is not among the given weights.")
            shard = split_parameter(name, full[name], parameter, rank=rank, size=size, gated=gated)
            if shard.shape != parameter.shape:
                raise ValueError(
                    f"Parameter {name!r}: expected shape {tuple(parameter.shape)} on tensor-parallel rank "
                    f"{rank} of {size}, got {tuple(shard.shape)}."
                )
            with torch.no_grad():
                parameter.copy_(shard)


def global_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a chunk under the names of the whole model.

    Megatron numbers the layers of every chunk from 0, and keeps a copy of a tied embedding on the last stage.
    """
    numbers = {str(i): str(layer.layer_number - 1) for i, layer in enumerate(chunk.decoder.layers)}
    tied_copy = chunk.share_embeddings_and_output_weights and not chunk.pre_process
    for name, parameter in chunk.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            name = f"decoder.layers.{numbers[number]}.{rest}"
        elif tied_copy and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def _partition_dim(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "partition_dim"))  # noqa: B009 - set by Megatron, unknown to type checkers


def _is_gated(name: str) -> bool:
    return name.endswith("linear_fc1.weight") or name.endswith("linear_fc1.bias")


@torch.no_grad()
def full_gradients(
    model: Sequence[DistributedDataParallel], groups: Groups, *, gated: bool, vocab_size: int
) -> dict[str, Tensor]:
    """Main gradients of the whole model by global Megatron name, unsharded, on every rank; collective.

    Call after `gradients.reduce_gradients`. With the distributed optimizer each rank holds a valid shard of every
    bucket, which is gathered first.
    """
    mine: dict[str, Tensor] = {}
    for chunk in model:
        if chunk.ddp_config.use_distributed_optimizer:
            _gather_buckets(chunk, groups)
        for name, parameter in global_parameters(chunk.module):
            gradient = parameter.main_grad.detach().clone()  # type: ignore[attr-defined]
            shards = [torch.empty_like(gradient) for _ in range(groups.tensor.size())]
            dist.all_gather(shards, gradient, group=groups.tensor)
            mine[name] = join_parameter(name, shards, parameter, gated=gated, vocab_size=vocab_size).contiguous()
    stages: list[dict[str, Tensor]] = [{}] * groups.pipeline.size()
    dist.all_gather_object(stages, mine, group=groups.pipeline)
    return {name: gradient for stage in stages for name, gradient in stage.items()}


def _gather_buckets(chunk: DistributedDataParallel, groups: Groups) -> None:
    for buffer in chunk.buffers:
        for bucket in buffer.buckets:
            length = bucket.grad_data.numel() // groups.data_context.size()
            start = groups.data_context.rank() * length
            shard = bucket.grad_data[start : start + length].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=groups.data_context)
