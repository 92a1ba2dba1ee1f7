"""Build the model that the plan runs on: Megatron's GPTModel with our layer spec, wrapped in Megatron's DDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.prefixflow.experts import mark_expert_parameters
from megatron.prefixflow.groups import Groups
from megatron.prefixflow.spec import block_spec


def build_model(config: TransformerConfig, groups: Groups, **gpt_kwargs: Any) -> tuple[GPTModel, ...]:
    """This rank's model chunks in `config.params_dtype`; global stage of chunk c on pipeline rank r of p is c * p + r.

    `gpt_kwargs` are GPTModel's own (vocab_size, max_sequence_length, ...).
    """
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    last = num_chunks * groups.pipeline.size() - 1
    chunks = []
    for number in range(num_chunks):
        stage = number * groups.pipeline.size() + groups.pipeline_rank
        vp_stage = number if num_chunks > 1 else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, vp_stage),
            pre_process=stage == 0,
            post_process=stage == last,
            vp_stage=vp_stage,
            **gpt_kwargs,
        )
        mark_expert_parameters(model)
        chunks.append(model.to(config.params_dtype))
    return tuple(chunks)


def bare_model(model: Any) -> Any:
    """What is inside the wrappers (DDP, Float16Module, anything with `.module`) of a model chunk."""
    while not isinstance(model, GPTModel) and hasattr(model, "module"):
        model = model.module
    return model


def wrap_data_parallel(
    chunks: Sequence[GPTModel], ddp_config: DistributedDataParallelConfig
) -> tuple[DistributedDataParallel, ...]:
    """Megatron's DDP around each chunk, with its own bucket triggers off.

    Its ready counts assume that every parameter gets a gradient in the last microbatch; a delayed prefix backward
    leaves the LM head without one. With `overlap_grad_reduce` there are several buckets, which reduce asynchronously, but
    it is `overlap.EarlyReduction` that starts them. Sums, not means: the loss carries its own normaliser.

    Raises ValueError when the configuration would average.
    """
    if not chunks[0].config.calculate_per_token_loss or ddp_config.average_in_collective:
        raise ValueError(
            "Data-parallel gradients must be summed: set calculate_per_token_loss in the model configuration and "
            "leave average_in_collective off."
        )
    model = tuple(DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks)
    for chunk in model:
        # Its backward hooks read this, the buckets keep the configuration they were made with.
        chunk.ddp_config = dataclasses.replace(ddp_config, overlap_grad_reduce=False)
    return model
