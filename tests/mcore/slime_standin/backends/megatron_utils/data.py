"""Stand-in for slime's data module, written for these tests from its documented behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn import functional

from tests.mcore.slime_standin.backends.megatron_utils.cp_utils import slice_with_cp


class DataIterator:
    """Samples of this rank in microbatches of given indices."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.reset()

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        data = self.rollout_data
        return {key: None if data.get(key) is None else [data[key][i] for i in indices] for key in keys}

    def reset(self) -> DataIterator:
        self.offset = 0
        return self


def get_batch(
    data_iterator: Any, keys: Sequence[str], pad_multiplier: int, allgather_cp: bool = False
) -> dict[str, Any]:
    """One packed row of a microbatch, padded as a sequence of its own; the unpacked tokens stay beside it."""
    batch = data_iterator.get_next(keys)
    batch["unconcat_tokens"] = batch["tokens"]
    samples = [slice_with_cp(sample, 0) for sample in batch["tokens"]]
    ends = [0]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    padding = -ends[-1] % (parallel_state.get_tensor_model_parallel_world_size() * pad_multiplier)
    if padding:
        ends.append(ends[-1] + padding)
    lengths = torch.tensor(ends, dtype=torch.int) * parallel_state.get_context_parallel_world_size()
    longest = int(lengths.diff().max())
    batch["tokens"] = functional.pad(torch.cat(samples), (0, padding)).unsqueeze(0)
    batch["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    masks = [
        slice_with_cp(functional.pad(mask, (total - len(mask) - 1, 1)), 0)
        for mask, total in zip(batch["loss_masks"], batch["total_lengths"], strict=True)
    ]
    images = batch.get("multimodal_train_inputs")
    if images is not None:
        batch["multimodal_train_inputs"] = {name: x for of_sample in images for name, x in of_sample.items()}
    batch["full_loss_masks"] = functional.pad(torch.cat(masks), (0, padding)).unsqueeze(0)
    return batch
