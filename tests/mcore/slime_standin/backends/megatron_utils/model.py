"""Stand-in for slime's model module, written for these tests from its documented behaviour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from tests.mcore.slime_standin.backends.megatron_utils.data import get_batch
from tests.mcore.slime_standin.backends.megatron_utils.loss import loss_function

_SCORE_KEYS = ("tokens", "loss_masks", "multimodal_train_inputs", "total_lengths", "response_lengths")
_TRAIN_KEYS = (*_SCORE_KEYS, "log_probs", "ref_log_probs", "advantages", "rollout_mask_sums")


def _call(model: Any, batch: dict[str, Any]) -> Tensor:
    inputs = {"input_ids": batch["tokens"], "position_ids": None, "attention_mask": None, "labels": None}
    inputs |= {"packed_seq_params": batch["packed_seq_params"], "loss_mask": batch["full_loss_masks"]}
    inputs |= batch["multimodal_train_inputs"] or {}
    return model(**inputs)


@torch.no_grad()
def forward_only(
    f: Callable[..., Any],
    args: Any,
    model: Sequence[Any],
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """What `f` makes of the logits, per sample in the rollout's order, on the last stage."""
    for iterator in data_iterator:
        iterator.reset()

    def forward_step(
        iterator: Any, chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, _SCORE_KEYS, args.data_pad_size_multiplier, args.allgather_cp)
        read = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
        return _call(chunk, batch), partial(f, args=args, with_entropy=args.use_rollout_entropy, **read)

    for chunk in model:
        chunk.eval()
    forward_backward_func = get_forward_backward_func()
    results: list[dict[str, list[Tensor]]] = []
    for number in num_microbatches:
        results += forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=number,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
        )
    for chunk in model:
        chunk.train()
    if not parallel_state.is_pipeline_last_stage():
        return {}
    order = [index for indices in data_iterator[0].micro_batch_indices for index in indices]
    stored = {}
    for name in results[0]:
        values = dict(zip(order, [value for result in results for value in result[name]], strict=True))
        stored[f"{store_prefix}{name}"] = [values[index] for index in range(len(order))]
    return stored


def train_one_step(
    args: Any,
    rollout_id: int,
    step_id: int,
    data_iterator: Sequence[Any],
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_microbatches: int,
    step_global_batch_size: int,
) -> tuple[dict[str, float], float]:
    """Losses (on the last stage) and gradient norm of a step."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    def forward_step(
        iterator: Any, chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, Callable[..., Any]]:
        batch = get_batch(iterator, _TRAIN_KEYS, args.data_pad_size_multiplier, args.allgather_cp)
        return _call(chunk, batch), partial(loss_function, args, batch, num_microbatches, step_global_batch_size)

    forward_backward_func = get_forward_backward_func()
    results = forward_backward_func(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.decoder_seq_length,
        forward_only=False,
    )
    succeeded, grad_norm, _ = optimizer.step()
    assert succeeded
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return {}, grad_norm
    values = torch.stack([result["values"] for result in results]).sum(0)
    torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # Every context-parallel rank counts all tokens.
    copies = parallel_state.get_context_parallel_world_size()
    count = values[0] / copies if args.calculate_per_token_loss else step_global_batch_size
    return dict(zip(results[0]["keys"], (values[1:] / count).tolist(), strict=True)), grad_norm
