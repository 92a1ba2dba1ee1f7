"""Cut full parameters into tensor-parallel shards and put them together again, by Megatron's own parameter attributes.

Names are Megatron's, as in `GPTModel.state_dict()`. A sharded parameter has `tensor_model_parallel` and
`partition_dim`. Two layouts need care: a gated MLP's first linear holds [gate; up] on every rank, and the vocabulary
is padded to a multiple of the tensor-parallel size. An expert is cut over expert tensor parallel ranks, and has the number
that it has in the whole model in its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron.prefixflow.experts import global_expert_name, is_expert, local_expert_numbers
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
    chunks: Sequence[torch.nn.Module], full: Mapping[str, Tensor], groups: Groups, *, gated: bool
) -> None:
    """Copy this rank's shards of `full` into `chunks`; every parameter, and the bias of every router, must be there.

    Raises ValueError naming a parameter that is missing or has another shape.
    """
    for chunk in chunks:
        for name, parameter in global_parameters(chunk):
            group = _tensor_group(parameter, groups)
            whole = _find(full, name)
            shard = split_parameter(name, whole, parameter, rank=group.rank(), size=group.size(), gated=gated)
            if shard.shape != parameter.shape:
                raise ValueError(
                    f"Parameter {name!r}: expected shape {tuple(parameter.shape)} on tensor-parallel rank "
                    f"{group.rank()} of {group.size()}, got {tuple(shard.shape)}."
                )
            with torch.no_grad():
                parameter.copy_(shard)
        for name, bias in expert_biases(chunk):
            bias.copy_(_find(full, name))


def whole_shapes(chunks: Sequence[Any], groups: Groups) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the whole model by name, layers in order, on every rank; collective over the world.

    Vocabularies are padded.
    """
    mine = {
        name: _whole_shape(parameter, _tensor_group(parameter, groups).size())
        for chunk in chunks
        for name, parameter in global_parameters(chunk)
    }
    everyone: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {name: shape for part in everyone for name, shape in part.items()}
    return {name: found[name] for name in sorted(found, key=_natural_order)}


@torch.no_grad()
def whole_parameters(
    chunks: Sequence[Any], groups: Groups, shapes: Mapping[str, tuple[int, ...]], *, gated: bool
) -> Iterator[tuple[str, Tensor | None]]:
    """Parameters of the whole model one at a time, in the order of `shapes`; all ranks iterate together.

    Rank 0 gets them, the others None. Only one parameter at a time is whole.

    shapes: `whole_shapes`.
    """
    held = {name: parameter for chunk in chunks for name, parameter in global_parameters(chunk)}
    owners = _owners(held, groups)
    for name, shape in shapes.items():
        owner = owners[name]
        whole = None
        if name in held:
            group = _tensor_group(held[name], groups)
            if owner in dist.get_process_group_ranks(group):
                whole = _gathered(name, held[name], group, gated=gated)
        if owner == 0:
            yield name, whole if dist.get_rank() == 0 else None
        elif dist.get_rank() == 0:
            like = next(chunks[0].parameters())
            received = torch.empty(shape, dtype=like.dtype, device=like.device)
            dist.recv(received, src=owner)
            yield name, received
        else:
            if dist.get_rank() == owner:
                assert whole is not None
                dist.send(whole, dst=0)
            yield name, None


def _owners(held: Mapping[str, torch.nn.Parameter], groups: Groups) -> dict[str, int]:
    """The rank that hands out each parameter: the lowest that is the first of a tensor-parallel group which holds it."""
    mine = [name for name, parameter in held.items() if _tensor_group(parameter, groups).rank() == 0]
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: rank for rank, names in reversed(list(enumerate(everyone))) for name in names}


def _gathered(name: str, parameter: torch.nn.Parameter, group: dist.ProcessGroup, *, gated: bool) -> Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return parameter.detach().contiguous()
    mine = parameter.detach().contiguous()
    shards = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(shards, mine, group=group)
    padded = parameter.shape[0] * group.size()
    return join_parameter(name, shards, parameter, gated=gated, vocab_size=padded).contiguous()


def _whole_shape(parameter: torch.nn.Parameter, size: int) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[_partition_dim(parameter)] *= size
    return tuple(shape)


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _find(full: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in full:
        raise ValueError(f"Parameter {name!r} of the model is not among the given weights.")
    return full[name]


def _tensor_group(parameter: torch.nn.Parameter, groups: Groups) -> dist.ProcessGroup:
    return groups.expert_tensor if is_expert(parameter) else groups.tensor


def global_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a chunk under the names of the whole model.

    Megatron numbers the layers of every chunk and the experts of every rank from 0, and keeps a copy of a tied embedding on
    the last stage.
    """
    experts = local_expert_numbers(chunk)
    tied_copy = chunk.share_embeddings_and_output_weights and not chunk.pre_process
    for name, parameter in chunk.named_parameters():
        if tied_copy and name == "output_layer.weight":
            yield "embedding.word_embeddings.weight", parameter
        else:
            yield _global_layer_name(chunk, global_expert_name(name, experts)), parameter


def global_routers(chunk: Any) -> Iterator[tuple[str, TopKRouter]]:
    """Routers of a chunk under the names of the whole model, in layer order."""
    for name, module in chunk.named_modules():
        if isinstance(module, TopKRouter):
            yield _global_layer_name(chunk, name), module


def expert_biases(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    """Biases of the routers of a chunk (buffers, float32 [experts]) under the names of the whole model."""
    for name, router in global_routers(chunk):
        if router.expert_bias is not None:
            yield f"{name}.expert_bias", router.expert_bias


def _global_layer_name(chunk: Any, name: str) -> str:
    if not name.startswith("decoder.layers."):
        return name
    _, _, number, rest = name.split(".", 3)
    return f"decoder.layers.{chunk.decoder.layers[int(number)].layer_number - 1}.{rest}"


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
            group = _tensor_group(parameter, groups)
            shards = [torch.empty_like(gradient) for _ in range(group.size())]
            dist.all_gather(shards, gradient, group=group)
            mine[name] = join_parameter(name, shards, parameter, gated=gated, vocab_size=vocab_size).contiguous()
    experts = {name: gradient for name, gradient in mine.items() if ".mlp.experts." in name}
    return _gather_names({**mine, **_gather_names(experts, groups.expert)}, groups.pipeline)


def _gather_names(mine: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    if group.size() == 1:
        return mine
    everyone: list[dict[str, Tensor]] = [{}] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return {name: tensor for part in everyone for name, tensor in part.items()}


def _gather_buckets(chunk: DistributedDataParallel, groups: Groups) -> None:
    for buffers, group in (
        (chunk.buffers, groups.data_context),
        (chunk.expert_parallel_buffers, groups.expert_data),
    ):
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            length = bucket.grad_data.numel() // group.size()
            start = group.rank() * length
            shard = bucket.grad_data[start : start + length].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
