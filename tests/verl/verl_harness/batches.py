"""GRPO batches in verl's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """Samples of one step, all data-parallel ranks together, in the order that they are dealt in.

    tokens, prompt_lengths: of each sample. advantages, old: [response] each.
    """

    tokens: list[np.ndarray]
    prompt_lengths: list[int]
    advantages: list[np.ndarray]
    old: list[np.ndarray]


def make_samples(
    num_groups: int, group_size: int, *, prompt: int, response: int, vocab_size: int, seed: int, multiple: int = 1
) -> Samples:
    """Groups with one prompt each, shuffled; lengths vary and are multiples of `multiple`."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_groups):
        start = rng.integers(2, vocab_size, _length(rng, prompt, multiple))
        for _ in range(group_size):
            tokens = rng.integers(2, vocab_size, _length(rng, response, multiple))
            advantage = rng.choice([-1.0, 1.0]) * 10 ** rng.uniform(-1, 0.5)
            old = np.log(1 / vocab_size) + rng.normal(0, 0.3, len(tokens))
            rows.append((np.concatenate([start, tokens]), len(start), np.full(len(tokens), advantage), old))
    order = rng.permutation(len(rows))
    return Samples(*(list(column) for column in zip(*(rows[i] for i in order), strict=True)))


def _length(rng: np.random.Generator, around: int, multiple: int) -> int:
    return max(multiple, int(rng.integers(around * 3 // 4, around * 5 // 4)) // multiple * multiple)


def verl_batch(samples: Samples, rank: int, num_ranks: int, **options: Any) -> Any:
    """TensorDict of a data-parallel rank: every `num_ranks`-th sample.

    options: entries of the batch that are no tensors (`use_dynamic_bsz`, ...). With `is_dense` responses and what belongs to
    them are padded on the right and prompts on the left, as verl's `left_right_2_no_padding` leaves them; `is_dense_input`
    pads `input_ids` too. `temperatures` go round.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    is_dense_input = options.pop("is_dense_input", False)
    is_dense = options.pop("is_dense", is_dense_input)
    temperatures = options.pop("temperatures", None)
    chosen = range(rank, len(samples.tokens), num_ranks)
    tokens = [torch.from_numpy(samples.tokens[i]) for i in chosen]
    cuts = [samples.prompt_lengths[i] for i in chosen]
    responses = [x[cut:] for x, cut in zip(tokens, cuts, strict=True)]
    masks = [_response_mask(x) for x in responses]
    columns = {
        "prompts": [x[:cut] for x, cut in zip(tokens, cuts, strict=True)],
        "responses": responses,
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": [torch.from_numpy(samples.old[i]).float() for i in chosen],
        "ref_log_prob": [torch.from_numpy(samples.old[i]).float() - 0.1 for i in chosen],
        "advantages": [torch.from_numpy(samples.advantages[i]).float() for i in chosen],
    }
    fields = {name: _padded(x, left=name == "prompts") if is_dense else jagged(x) for name, x in columns.items()}
    if is_dense:
        fields["attention_mask"] = torch.cat(
            [
                _padded([torch.ones_like(x) for x in columns["prompts"]], left=True),
                _padded([torch.ones_like(x) for x in responses], left=False),
            ],
            dim=1,
        )
    fields["input_ids"] = jagged(tokens)
    if is_dense_input:
        fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], dim=1)
    batch = TensorDict(fields, batch_size=len(tokens))
    tu.assign_non_tensor(batch, temperature=1.0, global_batch_size=len(samples.tokens))
    if temperatures is not None:
        batch["temperature"] = torch.tensor([temperatures[i % len(temperatures)] for i in chosen])
    tu.assign_non_tensor(batch, **options)
    return batch


def with_routes(batch: Any, config: Any) -> Any:
    """The batch with routes as a rollout engine sends them (R3): [tokens - 1, layers, top-k] of each sample.

    They follow from the tokens up to each position, so a shared prompt is routed alike, but for every fifth sample.
    """
    rows = []
    for number, tokens in enumerate(batch["input_ids"].unbind()):
        routes = []
        for n in range(1, len(tokens)):
            path = [*tokens[:n].tolist(), config.num_moe_experts, number if number % 5 == 4 else -1]
            rng = np.random.default_rng(np.abs(path))
            draws = [
                rng.permutation(config.num_moe_experts)[: config.moe_router_topk] for _ in range(config.num_layers)
            ]
            routes.append(np.stack(draws))
        rows.append(torch.from_numpy(np.stack(routes).astype(np.int16)))
    batch["routed_experts"] = jagged(rows)
    return batch


def _response_mask(response: Tensor) -> Tensor:
    """Every seventh token is no action of the policy (a tool's output, say)."""
    mask = torch.ones_like(response)
    mask[3::7] = 0
    return mask


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _padded(rows: list[Tensor], *, left: bool) -> Tensor:
    width = max(len(x) for x in rows)
    pads = [(width - len(x), 0) if left else (0, width - len(x)) for x in rows]
    return torch.stack([torch.nn.functional.pad(x, pad) for x, pad in zip(rows, pads, strict=True)])
