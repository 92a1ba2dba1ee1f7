"""A framework of its own, as small as can be: stock Megatron models, microbatches, forward steps and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.prefixflow.adapter import SequenceInput, SequenceScores
from megatron.prefixflow.configs import cpu_safe
from megatron.prefixflow.session import start_session
from megatron.prefixflow.spec import SequenceParallelNorm
from prefixflow.plan.layout import ParallelLayout
from prefixflow.testing.generate import Style, two_level_groups
from tests.mcore.faults import patch

VOCAB = 96


class UnusedAttention(MegatronModule):
    """Core attention of layouts that Megatron's own does not run on the CPU; reuse stands in for it."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("the model was run without reuse")


@dataclass(frozen=True, slots=True)
class Model:
    """How a test's model is built. dtype: float64, or bfloat16. options: of TransformerConfig. ddp: of DDP; None leaves the model bare."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    num_layers: int = 2
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] | None = field(default_factory=dict)
    attention: type[Any] | None = None

    def build(self) -> list[Any]:
        """Start the session of the layout and build this rank's chunks, wrapped."""
        start_session(self.layout, 7)
        if self.dtype == torch.float64:
            patch_cross_entropy()
        config = TransformerConfig(**cpu_safe(self._keywords()))
        size = self.layout.vpp if self.layout.vpp > 1 else 1
        return [self._wrapped(self._chunk(config, number if size > 1 else None)) for number in range(size)]

    def _keywords(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "num_layers": self.num_layers,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
            "pipeline_dtype": self.dtype,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "sequence_parallel": layout.tp > 1,
            "finalize_model_grads_func": finalize_model_grads,
            **self.options,
        }

    def _chunk(self, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
        from megatron.core import parallel_state

        spec = get_gpt_decoder_block_spec(config, False, config.normalization, vp_stage=vp_stage)
        spec.layer_norm = SequenceParallelNorm
        for layer in spec.layer_specs:
            # Megatron's local norm refuses sequence parallelism.
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
            if self.attention is not None:
                layer.submodules.self_attention.submodules.core_attention = self.attention
        model = GPTModel(
            config,
            spec,
            VOCAB,
            256,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        return model.to(self.dtype)

    def _wrapped(self, model: GPTModel) -> Any:
        if self.ddp is None:
            model.config.finalize_model_grads_func = None
            return model
        inner = Float16Module(model.config, model) if self.dtype == torch.bfloat16 else model
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(**self.ddp), inner)
        ddp.broadcast_params()
        return ddp


def patch_cross_entropy() -> None:
    """Megatron's cross entropy in the precision of the model, until the next `faults.restore`: a sharper comparison."""

    def logits_max(logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.clone(), logits.max(dim=-1)[0]

    patch(VocabParallelCrossEntropy, "calculate_logits_max", staticmethod(logits_max))


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """tokens: int [n]. weights: float [n], of the loss of each token; 0 in the prompt."""

    tokens: np.ndarray
    weights: np.ndarray


def samples(seed: int, data_rank: int, *, num_groups: int = 3, group_size: int = 4) -> list[Sample]:
    """Groups that share a prompt, in shuffled order; other ones on each data-parallel rank."""
    made = two_level_groups(
        num_groups, group_size, (14, 20), (3, 9), seed=1000 * seed + data_rank, style=Style(vocab_size=VOCAB)
    )
    rng = np.random.default_rng(seed)
    found = [Sample(t.tokens, np.where(t.loss_mask, 0.5 + rng.random(len(t)), 0.0)) for t in made]
    return [found[i] for i in rng.permutation(len(found))]


def split(found: Sequence[Sample], num_microbatches: int) -> list[list[Sample]]:
    return [list(found[i::num_microbatches]) for i in range(num_microbatches)]


def dense(microbatch: Sequence[Sample], width: int) -> dict[str, Any]:
    """Tokens, labels and weights [b, width], padded on the right."""
    tokens, labels, weights = (
        torch.zeros(len(microbatch), width, dtype=t) for t in (torch.int64, torch.int64, torch.float64)
    )
    for row, sample in enumerate(microbatch):
        n = len(sample.tokens)
        tokens[row, :n] = torch.from_numpy(sample.tokens.copy())
        labels[row, : n - 1] = tokens[row, 1:n]
        weights[row, : n - 1] = torch.from_numpy(sample.weights[1:])
    positions = torch.arange(width).expand(len(microbatch), width)
    return {"tokens": tokens, "labels": labels, "weights": weights, "positions": positions, "packed": None}


def packed(microbatch: Sequence[Sample], room: int = 3) -> dict[str, Any]:
    """The same in one row, each sequence without its last token and with padding up to a multiple of `room`."""
    rows = [dense([sample], -(-(len(sample.tokens) - 1) // room) * room + 1) for sample in microbatch]
    one = {
        name: torch.cat([row[name][:, :-1] for row in rows], 1) for name in ("tokens", "labels", "weights", "positions")
    }
    bounds = [
        torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        for lengths in ([len(s.tokens) - 1 for s in microbatch], [row["tokens"].shape[1] - 1 for row in rows])
    ]
    return {**one, "packed": PackedSeqParams("thd", bounds[0], bounds[0], bounds[1], bounds[1])}


def joint_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """Reads all sequences of a microbatch together, and is no sum over its tokens."""
    weighted = (losses * weights).sum() / (weights > 0).sum()
    return weighted + (0.3 * weighted).square() + (torch.exp(-0.1 * losses) * weights).sum() / (weights > 0).sum()


def pair(weights: Tensor, losses: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return losses.detach().clone() * (weights > 0)
    loss = joint_loss(losses, weights)
    return loss, {"loss": loss.detach().clone()}


def triple(weights: Tensor, losses: Tensor, non_loss_data: bool = False) -> Any:
    assert not non_loss_data
    loss = (losses * weights).sum()
    return loss, (weights > 0).sum().int(), {"loss": loss.detach().clone(), "tokens": (weights > 0).sum()}


LOSSES: dict[str, Callable[..., Any]] = {"pair": pair, "triple": triple}


def forward_step(loss: str, with_mask: bool, data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """Of a framework that hands all stages all data."""
    batch = next(data_iterator)
    keywords = {"loss_mask": batch["weights"] > 0} if with_mask else {}
    if batch["packed"] is not None:
        keywords["packed_seq_params"] = batch["packed"]
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], **keywords)
    return output, partial(LOSSES[loss], batch["weights"])


def staged_forward_step(loss: str, data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """As Megatron-LM: tokens on the first stage, labels on the last one, nothing between."""
    from megatron.core import parallel_state

    batch, vp_stage = next(data_iterator), model.module.vp_stage
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    tokens, positions = (batch["tokens"], batch["positions"]) if is_first else (None, None)
    labels, mask = (batch["labels"], batch["weights"] > 0) if is_last else (None, None)
    output = model(tokens, positions, None, labels=labels, loss_mask=mask)
    return output, partial(LOSSES[loss], batch["weights"])


class Adapter:
    """Hands the loss the log-probabilities of whole sequences."""

    needs_entropy = False

    def __init__(self, loss: str) -> None:
        self._loss = LOSSES[loss]

    def sequences(self, microbatch: Sequence[Sample]) -> list[SequenceInput]:
        return [SequenceInput(sample.tokens, sample.weights > 0) for sample in microbatch]

    def loss(
        self, microbatch: Sequence[Sample], scores: Sequence[SequenceScores], *, non_loss_data: bool = False
    ) -> Any:
        losses = torch.cat([-entry.logprobs[1:] for entry in scores])
        weights = torch.cat([torch.from_numpy(sample.weights[1:]) for sample in microbatch])
        keywords = {"non_loss_data": True} if non_loss_data else {}
        return self._loss(weights, losses, **keywords)


def sample_step(loss: str, width: int, data_iterator: Iterator[Sequence[Sample]], model: Any) -> tuple[Any, Any]:
    """The forward step of a framework whose microbatches are lists of samples."""
    batch = dense(next(data_iterator), width)
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, partial(LOSSES[loss], batch["weights"])
