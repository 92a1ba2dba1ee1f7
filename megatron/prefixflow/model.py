"""Build the model that the plan runs on: Megatron's GPTModel with our layer spec, wrapped in Megatron's DDP."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.prefixflow.spec import block_spec


def build_model(config: TransformerConfig, **gpt_kwargs: Any) -> GPTModel:
    """GPTModel in `config.params_dtype`; `gpt_kwargs` are GPTModel's own (vocab_size, max_sequence_length, ...)."""
    model = GPTModel(config=config, transformer_layer_spec=block_spec(config), **gpt_kwargs)
    return model.to(config.params_dtype)


def wrap_data_parallel(model: GPTModel, ddp_config: DistributedDataParallelConfig) -> DistributedDataParallel:
    """Megatron's DDP with its own bucket triggers off.

    Its ready counts assume that every parameter gets a gradient in the last microbatch; a delayed prefix backward leaves
    the LM head without one. Reduction starts once, after the last operation (`gradients.reduce_gradients`). Sums, not
    means: the loss carries its own normaliser.

    Raises ValueError when the configuration would average or overlap.
    """
    if ddp_config.overlap_grad_reduce:
        raise ValueError(
            "--overlap-grad-reduce lets DDP count ready parameters per microbatch, which a delayed prefix backward "
            "breaks; leave it out."
        )
    if not model.config.calculate_per_token_loss or ddp_config.average_in_collective:
        raise ValueError(
            "Data-parallel gradients must be summed: set calculate_per_token_loss in the model configuration and "
            "leave average_in_collective off."
        )
    return DistributedDataParallel(model.config, ddp_config, model, disable_bucketing=False)


def parameter_dtype(model: torch.nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
