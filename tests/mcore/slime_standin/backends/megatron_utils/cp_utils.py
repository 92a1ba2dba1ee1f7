"""Stand-in for slime's cp_utils module, written for these tests from its documented behaviour.

Under context parallelism a sample, padded to 2 * size chunks, is on rank r with its chunks r and 2 * size - 1 - r.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import functional


def local_positions(length: int) -> Tensor:
    """Positions of this rank in a sample of `length` tokens; those from `length` on are padding."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return torch.arange(length)
    chunk = -(-length // (2 * size))
    return torch.cat([torch.arange(start * chunk, (start + 1) * chunk) for start in (rank, 2 * size - 1 - rank)])


def local_responses(total_length: int, response_length: int) -> tuple[Tensor, Tensor]:
    """Rows of this rank's part of a sample that speak of response tokens, and which of the response they speak of."""
    place = local_positions(total_length) - (total_length - response_length - 1)
    rows = torch.nonzero((place >= 0) & (place < response_length)).flatten()
    return rows, place[rows]


def slice_with_cp(tokens: Tensor, pad_value: Any) -> Tensor:
    """This rank's part of a sample [n, ...]."""
    positions = local_positions(len(tokens))
    padding = max(int(positions.max()) + 1 - len(tokens), 0)
    return functional.pad(tokens, (*(0, 0) * (tokens.dim() - 1), 0, padding), value=pad_value)[positions]


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    return log_prob[local_responses(total_length, response_length)[1]]
