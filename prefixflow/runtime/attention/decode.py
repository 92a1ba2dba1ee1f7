"""Attention of decoding: one new token of each live response, without gradients.

Shapes: B live responses, n query and n_kv key heads, d head size, L tokens of a response so far.

Steps, for q [B, n, d] and k, v [B, n_kv, d] of one layer
1. k and v join their responses' own K/V.
2. Each response attends to its own K/V: one batched product over all responses.
3. The responses of a prompt attend to the prompt's blocks in one full slice, merged by logsumexp.

Responses that start together stay equally long until they end and leave, so there is neither padding
nor a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefixflow.plan.slices import CachedSlice
from prefixflow.runtime.attention.function import merge_part
from prefixflow.runtime.attention.kernels import AttentionKernel
from prefixflow.runtime.cache import KVCache, accumulation_dtype

_FIRST_CAPACITY = 64


class ResponseCache:
    """K/V of the live responses, [B, n_kv, L, d] in each layer; all responses are equally long."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v ([B, n_kv, d]) as token `length`; returns views [B, n_kv, length + 1, d]."""
        stored = self._layers.get(layer)
        if stored is None:
            stored = self._layers[layer] = (_room(k, _FIRST_CAPACITY), _room(v, _FIRST_CAPACITY))
        if stored[0].shape[2] == self.length:
            stored = self._layers[layer] = (_grown(stored[0]), _grown(stored[1]))
        assert stored[0].shape[0] == k.shape[0], "responses left without `keep`"
        for old, new in zip(stored, (k, v), strict=True):
            old[:, :, self.length] = new
        return stored[0][:, :, : self.length + 1], stored[1][:, :, : self.length + 1]

    def advance(self) -> None:
        """All layers have their K/V of the present token."""
        self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Keep the responses `rows` (int64, ascending); the others have ended."""
        for layer, (k, v) in self._layers.items():
            self._layers[layer] = (k.index_select(0, rows), v.index_select(0, rows))


@dataclass(slots=True, eq=False)
class DecodeContext:
    """What the attention of one decoding step needs beside q, k, v; shared by all layers.

    prompts: ranges of live responses and the blocks of their prompt; together they cover the B responses.
    num_live: B. Rows after it are padding (sequence parallelism wants a multiple): their output is zero.
    """

    prompts: tuple[CachedSlice, ...]
    num_live: int
    cache: KVCache
    responses: ResponseCache
    kernel: AttentionKernel
    keys_only_layer: int | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, scale: float) -> Tensor:
        """Attention of the new tokens in one layer: [T, n, d], T >= B."""
        live = slice(0, self.num_live)
        keys, values = self.responses.append(layer, k[live], v[live])
        out, lse = _own_attention(q[live], keys, values, scale)
        for part in self.prompts:
            rows = part.queries.slice
            keys, values = self.cache.read(layer, part.blocks)
            part_out, part_lse = self.kernel.forward(q[rows], keys, values, False, scale)
            merge_part(out[rows], lse[rows], part_out.to(out.dtype), part_lse)
        padding = out.new_zeros(q.shape[0] - self.num_live, *out.shape[1:])
        return torch.cat([out, padding]).to(q.dtype)


def _own_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, n, d], keys and values [B, n_kv, L, d] -> out [B, n, d] and lse [B, n] in accumulation precision."""
    high = accumulation_dtype(q.dtype)
    grouped = q.to(high).unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys.to(high).transpose(2, 3) * scale
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ values.to(high)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _room(x: Tensor, capacity: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], capacity, x.shape[2])


def _grown(x: Tensor) -> Tensor:
    grown = x.new_empty(x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[3])
    grown[:, :, : x.shape[2]] = x
    return grown
