"""Stand-in for slime's loss module, written for these tests from its documented behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.mcore.slime_standin.backends.megatron_utils.cp_utils import (
    local_positions,
    local_responses,
    slice_log_prob_with_cp,
)


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """logits [T, vocabulary of this rank], tokens [T] -> [T, 1] and [T]."""
    logprobs = torch.log_softmax(gather_from_tensor_model_parallel_region(logits), dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return logprobs.gather(-1, tokens.unsqueeze(-1)), entropy


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Per sample what the rows before its response tokens say of them."""
    assert logits.dim() == 3
    assert logits.size(0) == 1
    assert logits.dtype in (torch.float32, torch.float64)
    logits = logits[0] / args.rollout_temperature
    following = torch.cat([_following(sample) for sample in unconcat_tokens])
    tokens = functional.pad(following, (0, len(logits) - len(following)))
    logprobs, entropy = calculate_log_probs_and_entropy(
        logits,
        tokens,
        parallel_state.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        with_entropy_grad=with_entropy and args.entropy_coef != 0,
        chunk_size=args.log_probs_chunk_size,
    )
    result = {"log_probs": responses_of(logprobs.squeeze(-1), total_lengths, response_lengths)}
    if entropy is not None:
        result["entropy"] = responses_of(entropy, total_lengths, response_lengths)
    return torch.empty(0), result


def _following(tokens: Tensor) -> Tensor:
    """The token after each of this rank's rows; after the last one, anything."""
    return tokens[(local_positions(len(tokens)) + 1).clamp(max=len(tokens) - 1)]


def responses_of(packed: Tensor, total_lengths: list[int], response_lengths: list[int]) -> list[Tensor]:
    parts, start = [], 0
    for total, length in zip(total_lengths, response_lengths, strict=True):
        parts.append(packed[start + local_responses(total, length)[0]])
        start += len(local_positions(total))
    return parts


def get_values(logits: Tensor, *, args: Any, **_: Any) -> tuple[Tensor, dict[str, list[Tensor]]]:
    raise NotImplementedError("values are not what these tests compare")


def get_sum_of_sample_mean(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    denominators: list[Tensor] | None,
    per_token: bool,
) -> Callable[[Tensor], Tensor]:
    samples = zip(loss_masks, total_lengths, response_lengths, strict=True)
    own_masks = [slice_log_prob_with_cp(*sample) for sample in samples]

    def reduce(x: Tensor) -> Tensor:
        parts = x.split([len(mask) for mask in own_masks])
        sums = [(part * mask).sum() for part, mask in zip(parts, own_masks, strict=True)]
        if per_token:
            return torch.stack(sums).sum()
        counts = denominators or [mask.sum() for mask in loss_masks]
        return torch.stack([s / torch.clamp_min(n, 1) for s, n in zip(sums, counts, strict=True)]).sum()

    return reduce


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, reduce: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    _, scores = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    now, old, advantages = torch.cat(scores["log_probs"]), torch.cat(batch["log_probs"]), torch.cat(batch["advantages"])
    drift = old - now
    if args.advantage_estimator == "gspo":
        parts = zip(drift.split(batch["response_lengths"]), batch["loss_masks"], strict=True)
        means = [((part * mask).sum() / torch.clamp_min(mask.sum(), 1)).expand_as(part) for part, mask in parts]
        drift = torch.cat(means)
    ratio = torch.exp(-drift)
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    if args.custom_tis_function_path is not None:
        losses = losses * (ratio / ratio.mean()).detach()  # a weight that mixes the samples of a microbatch
    policy = reduce(losses)
    entropy = reduce(torch.cat(scores["entropy"]))
    loss = policy - args.entropy_coef * entropy
    log = {"pg_loss": policy, "entropy_loss": entropy, "ppo_kl": reduce(drift)}
    if args.use_kl_loss:
        log_ratio = torch.cat(batch["ref_log_probs"]) - now
        log["kl_loss"] = reduce(log_ratio.exp() - 1 - log_ratio)
        loss = loss + args.kl_loss_coef * log["kl_loss"]
    if not now.numel():
        loss = loss + 0 * logits.sum()
    return loss, {"loss": loss.detach().clone(), **{name: value.detach().clone() for name, value in log.items()}}


def sft_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, reduce: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    _, scores = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    logprobs = torch.cat(scores["log_probs"])
    loss = -reduce(logprobs) if logprobs.numel() else 0 * logits.sum()
    return loss, {"loss": loss.detach().clone()}


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, step_global_batch_size: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(loss, normaliser, metrics): scaled so that Megatron's average over microbatches and data-parallel ranks is the sum."""
    per_token = args.calculate_per_token_loss
    num_tokens = torch.stack([torch.clamp_min(mask.sum(), 1) for mask in batch["loss_masks"]]).sum()
    reduce = get_sum_of_sample_mean(
        batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], batch["rollout_mask_sums"], per_token
    )
    function = {"policy_loss": policy_loss_function, "sft_loss": sft_loss_function}[args.loss_type]
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits, reduce, use_reentrant=False)
    else:
        loss, log = function(args, batch, logits, reduce)
    if per_token:
        loss = loss * parallel_state.get_context_parallel_world_size()
    else:
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        loss = loss * num_microbatches / step_global_batch_size * ranks
    values = [num_tokens if per_token else torch.tensor(0), *log.values()]
    return (
        loss,
        num_tokens if per_token else torch.tensor(1),
        {"keys": list(log), "values": torch.stack([value.to(logits.dtype) for value in values])},
    )
