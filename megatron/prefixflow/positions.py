"""Rotary tables for explicit positions.

Megatron's RoPE restarts at 0 in every call and ignores `position_ids`. We ask the model's own rotary module for its table
(so scaling, percent, interpolation and interleaving are kept) and pick the rows of the microbatch's positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORTEST_TABLE = 1024


class RotaryTable:
    """Rows of a model's rotary embedding (upstream: `RotaryEmbedding.get_emb`)."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._table: Tensor | None = None

    def rows(self, positions: Tensor, num_positions: int) -> Tensor:
        """Angles [T, 1, 1, d] of `positions` [T], all below `num_positions`."""
        if self._table is None or self._table.shape[0] < num_positions:
            length = max(SHORTEST_TABLE, 1 << (num_positions - 1).bit_length())
            with torch.no_grad():
                self._table = self._rotary.get_emb(length)
        return self._table.index_select(0, positions.to(self._table.device))
