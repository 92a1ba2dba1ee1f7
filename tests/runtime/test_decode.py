"""Decoding attention: own K/V and the prompt's block, merged, against one attention over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefixflow.plan.slices import CachedSlice
from prefixflow.ranges import Range
from prefixflow.runtime.attention.decode import DecodeContext, ResponseCache
from prefixflow.runtime.attention.kernels import AtenCpuKernel, EinsumKernel
from prefixflow.runtime.cache import KVCache

NUM_HEADS, NUM_KV, HEAD = 6, 2, 8
PROMPT_TOKENS = (5, 9)
# The block of prompt 0 is read by responses 0 and 1, that of prompt 1 by 2, 3 and 4.
PROMPT_OF = (0, 0, 1, 1, 1)


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _prompt_cache(dtype: torch.dtype) -> tuple[KVCache, list[tuple[Tensor, Tensor]]]:
    cache, stored = KVCache(), []
    for block, length in enumerate(PROMPT_TOKENS):
        k, v = (_random(length, NUM_KV, HEAD, seed=10 * block + s, dtype=dtype) for s in (1, 2))
        cache.write(7, block, k, v)
        stored.append((k, v))
    return cache, stored


def _slices(live: list[int]) -> tuple[CachedSlice, ...]:
    prompts = [PROMPT_OF[r] for r in live]
    return tuple(
        CachedSlice(Range(prompts.index(p), prompts.index(p) + prompts.count(p)), (p,)) for p in sorted(set(prompts))
    )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_decoding_is_attention_over_prompt_and_response(dtype: torch.dtype, limit: float) -> None:
    cache, stored = _prompt_cache(dtype)
    own = ResponseCache()
    live = list(range(len(PROMPT_OF)))
    history: dict[int, list[tuple[Tensor, Tensor]]] = {r: [] for r in live}
    # More steps than the first capacity; responses 1 and 2 end on the way, and with 0 the first prompt's.
    for step in range(70):
        ending = {20: {1}, 40: {2}, 66: {0}}.get(step, set())
        if ending:
            own.keep(torch.tensor([place for place, r in enumerate(live) if r not in ending]))
            live = [r for r in live if r not in ending]
        q, k, v = (
            _random(len(live), n, HEAD, seed=100 * step + n + s, dtype=dtype) for s, n in ((0, 6), (1, 2), (2, 2))
        )
        context = DecodeContext(_slices(live), len(live), cache, own, AtenCpuKernel())
        out = context.attend(q, k, v, layer=7, scale=0.3)
        own.advance()
        assert out.dtype == dtype
        for place, r in enumerate(live):
            history[r].append((k[place], v[place]))
            keys, values = (
                torch.cat([stored[PROMPT_OF[r]][i], torch.stack([pair[i] for pair in history[r]])]) for i in (0, 1)
            )
            expected, _ = EinsumKernel().forward(q[place : place + 1], keys, values, False, 0.3)
            torch.testing.assert_close(out[place : place + 1], expected, rtol=limit, atol=limit)


def test_padding_rows_are_zero_and_are_not_stored() -> None:
    cache, _ = _prompt_cache(torch.float64)
    own = ResponseCache()
    context = DecodeContext(_slices([0, 1, 2]), 3, cache, own, EinsumKernel())
    q, k, v = (_random(4, n, HEAD, seed=n + 50) for n in (NUM_HEADS, NUM_KV, NUM_KV))
    out = context.attend(q, k, v, layer=7, scale=0.3)
    assert out.shape == (4, NUM_HEADS, HEAD)
    assert not out[3].any()
    assert out[2].any()
    own.advance()
    keys, _ = own.append(7, k[:3], v[:3])
    assert keys.shape == (3, NUM_KV, 2, HEAD)
