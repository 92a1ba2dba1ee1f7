"""The K/V cache: what goes in comes out, and every misuse is an error that says where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefixflow.runtime.cache import CacheError, CacheTotals, DeviceBytes, KVCache
from prefixflow.runtime.memory import LiveBytes
from prefixflow.schedule.residency import Part


def block(num_tokens: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((num_tokens, 2, 4), value, dtype=dtype)


@pytest.fixture
def cache() -> KVCache:
    """Blocks 7 (3 tokens) and 9 (2 tokens) in layers 0 and 1; values 1000 * layer + block."""
    cache = KVCache()
    for layer in (0, 1):
        for b, num_tokens in ((7, 3), (9, 2)):
            value = 1000.0 * layer + b
            cache.write(layer, b, block(num_tokens, value), block(num_tokens, -value))
    return cache


def test_read_joins_blocks_in_the_order_given(cache: KVCache) -> None:
    k, v = cache.read(1, (9, 7))
    assert k[:, 0, 0].tolist() == [1009.0, 1009.0, 1007.0, 1007.0, 1007.0]
    assert torch.equal(v, -k)


def test_read_of_one_block_copies_nothing(cache: KVCache) -> None:
    assert cache.read(0, (7,))[0].data_ptr() == cache.read(0, (7,))[0].data_ptr()


def test_stored_tensors_are_detached_and_own_their_memory() -> None:
    cache = KVCache()
    fused = torch.zeros(5, 2, 12, requires_grad=True)
    cache.write(0, 0, fused[:3, :, :4], fused[:3, :, 4:8])
    for stored in cache.read(0, (0,)):
        assert not stored.requires_grad
        assert stored.untyped_storage().nbytes() == 3 * 2 * 4 * 4


def test_gradients_split_over_blocks_and_sum_in_float32() -> None:
    cache = KVCache()
    for b, num_tokens in ((1, 1), (2, 2)):
        cache.write(0, b, *[block(num_tokens, 0, torch.bfloat16)] * 2)
    # 256 + 1 is 256 in bfloat16: a sum in the model's precision would lose every one of the ones.
    cache.add_gradient(0, (1, 2), *[block(3, 256, torch.bfloat16)] * 2)
    for _ in range(8):
        cache.add_gradient(0, (2,), *[block(2, 1, torch.bfloat16)] * 2)
    one, two = cache.take_gradient(0, 1), cache.take_gradient(0, 2)
    assert one is not None
    assert two is not None
    assert two[0].dtype == torch.float32
    assert one[0].unique().tolist() == [256.0]
    assert two[1].unique().tolist() == [264.0]


def test_float64_gradients_stay_float64(cache: KVCache) -> None:
    for value in (1e-12, 1.0):
        dk, dv = block(2, value, torch.float64), block(2, -value, torch.float64)
        cache.add_gradient(0, (9,), dk, dv)
    taken = cache.take_gradient(0, 9)
    assert taken is not None
    assert float(taken[0][0, 0, 0]) == -float(taken[1][1, 1, 3]) == 1.0 + 1e-12


def test_adding_does_not_touch_neighbours(cache: KVCache) -> None:
    dk = torch.arange(5.0).reshape(5, 1, 1).expand(5, 2, 4).contiguous()
    cache.add_gradient(0, (7, 9), dk, dk)
    cache.add_gradient(0, (7,), block(3, 100), block(3, 100))
    seven, nine = cache.take_gradient(0, 7), cache.take_gradient(0, 9)
    assert seven is not None
    assert nine is not None
    assert seven[0][:, 0, 0].tolist() == [100.0, 101.0, 102.0]
    assert nine[0][:, 0, 0].tolist() == [3.0, 4.0]


def test_take_removes(cache: KVCache) -> None:
    cache.add_gradient(1, (7,), block(3, 1), block(3, 1))
    assert cache.take_gradient(0, 7) is None
    assert cache.take_gradient(1, 7) is not None
    assert cache.take_gradient(1, 7) is None


def test_bytes_and_counters(cache: KVCache) -> None:
    per_token = 2 * 2 * 4 * 4  # k and v, 2 heads of 4, float32
    assert cache.kv_bytes == 2 * 5 * per_token
    cache.add_gradient(0, (7, 9), block(5, 1), block(5, 1))
    assert cache.gradient_bytes == 5 * per_token
    cache.take_gradient(0, 7)
    cache.take_gradient(0, 9)
    cache.release(7)
    assert (cache.kv_bytes, cache.gradient_bytes) == (2 * 2 * per_token, 0)
    assert (cache.peak_kv_bytes, cache.peak_gradient_bytes) == (10 * per_token, 5 * per_token)
    assert cache.peak_bytes == 15 * per_token
    cache.read(0, (9,))
    assert (cache.num_writes, cache.num_reads, cache.num_gradient_adds) == (4, 1, 1)
    assert cache.live_blocks == (9,)


def test_second_write_is_refused(cache: KVCache) -> None:
    with pytest.raises(CacheError, match=r"write of block 7, layer 1: it is already written"):
        cache.write(1, 7, block(3, 0), block(3, 0))


def test_freed_block_cannot_be_used(cache: KVCache) -> None:
    cache.release(7)
    with pytest.raises(CacheError, match=r"write of block 7, layer 0: the block was freed"):
        cache.write(0, 7, block(3, 0), block(3, 0))
    with pytest.raises(CacheError, match=r"read of block 7, layer 1: the block was freed"):
        cache.read(1, (9, 7))
    with pytest.raises(CacheError, match=r"add_gradient of block 7, layer 0: the block was freed"):
        cache.add_gradient(0, (7,), block(3, 0), block(3, 0))
    with pytest.raises(CacheError, match=r"release of block 7: the block was freed"):
        cache.release(7)


def test_unknown_block_or_layer_is_named(cache: KVCache) -> None:
    with pytest.raises(CacheError, match=r"read of block 3, layer 0: .*never written.*\[7, 9\]"):
        cache.read(0, (3,))
    with pytest.raises(CacheError, match=r"read of block 7, layer 5: only layers \[0, 1\]"):
        cache.read(5, (7,))


def test_wrong_shapes_are_refused(cache: KVCache) -> None:
    with pytest.raises(CacheError, match="expected 5 tokens"):
        cache.add_gradient(0, (7, 9), block(4, 0), block(4, 0))
    with pytest.raises(CacheError, match="one shape"):
        cache.write(0, 1, block(4, 0), block(3, 0))


def test_gradients_cannot_be_lost_by_freeing(cache: KVCache) -> None:
    cache.add_gradient(1, (7,), block(3, 1), block(3, 1))
    cache.release(7)
    assert 7 in cache.live_blocks
    with pytest.raises(CacheError, match=r"close of block 7.* gradients of layers \[1\] are left"):
        cache.close(7)
    cache.take_gradient(1, 7)
    cache.close(7)
    assert cache.gradient_bytes == 0


def test_block_that_is_still_read_cannot_be_closed(cache: KVCache) -> None:
    with pytest.raises(CacheError, match=r"close of block 7.* not released"):
        cache.close(7)


def test_leftovers_are_named_at_the_end_of_a_step(cache: KVCache) -> None:
    cache.release(9)
    cache.add_gradient(1, (7,), block(3, 1), block(3, 1))
    with pytest.raises(CacheError, match=r"blocks \[7\] .* took: 7 \(layers \[1\]\)"):
        cache.assert_empty()
    with pytest.raises(CacheError, match="still holds"):
        cache.begin_step()
    cache.take_gradient(1, 7)
    cache.release(7)
    cache.assert_empty()


def test_ids_can_be_used_again_in_the_next_step(cache: KVCache) -> None:
    cache.release(7)
    cache.release(9)
    cache.begin_step()
    cache.write(0, 7, block(3, 0), block(3, 0))
    assert (cache.num_writes, cache.peak_kv_bytes) == (1, cache.kv_bytes)


# Under a budget.

EVERY_PART = pytest.mark.parametrize("part", Part)


def with_gradients(cache: KVCache) -> KVCache:
    for layer in (0, 1):
        cache.add_gradient(layer, (7, 9), block(5, 10.0 + layer), block(5, -10.0 - layer))
    return cache


def test_evicted_parts_come_back_as_they_were(cache: KVCache) -> None:
    with_gradients(cache)
    before = [[x.clone() for x in cache.read(layer, (7,))] for layer in (0, 1)]
    device_bytes, per_block = cache.kv_bytes + cache.gradient_bytes, 2 * 3 * 2 * 2 * 4 * 4
    for part in Part:
        cache.evict(7, part)
    assert cache.kv_bytes + cache.gradient_bytes == device_bytes - 2 * per_block
    assert cache.host_bytes == cache.arena.num_bytes == 2 * per_block
    for part in Part:
        cache.fetch(7, part)
    # 9 was evicted by nobody.
    cache.add_gradient(0, (9, 7), block(5, 1), block(5, 1))
    for layer in (0, 1):
        for expected, got in zip(before[layer], cache.read(layer, (7,)), strict=True):
            assert torch.equal(expected, got)
    taken = [cache.take_gradient(layer, 7) for layer in (0, 1)]
    assert [[float(x.unique()) for x in pair] for pair in taken if pair] == [[11.0, -9.0], [11.0, -11.0]]
    assert (cache.host_bytes, cache.arena.num_bytes, cache.peak_host_bytes) == (0, 0, 2 * per_block)
    assert (cache.num_evictions, cache.num_fetches) == (2, 2)


@EVERY_PART
def test_eviction_frees_the_device_until_the_fetch(part: Part) -> None:
    """Of the storages themselves: an account alone would not show a copy that somebody holds."""
    with LiveBytes() as live:
        cache = KVCache()
        cache.write(0, 7, torch.zeros(3, 2, 4), torch.zeros(3, 2, 4))
        cache.add_gradient(0, (7,), torch.zeros(3, 2, 4), torch.zeros(3, 2, 4))
        held = live.now
        cache.evict(7, part)
        assert live.now == held - 2 * 3 * 2 * 4 * 4
        cache.fetch(7, part)
        assert live.now == held


@EVERY_PART
def test_streamed_parts_are_on_the_host_between_calls(part: Part) -> None:
    with LiveBytes() as live:
        cache = KVCache()
        cache.stream(7, part)
        for layer in (0, 1):
            cache.write(layer, 7, torch.full((3, 2, 4), 1.0 + layer), torch.zeros(3, 2, 4))
            for _ in range(2):
                cache.add_gradient(layer, (7,), torch.full((3, 2, 4), 5.0 + layer), torch.zeros(3, 2, 4))
        per_layer = 2 * 3 * 2 * 4 * 4
        assert live.now == cache.kv_bytes + cache.gradient_bytes == cache.host_bytes == 2 * per_layer
        assert [float(cache.read(layer, (7,))[0].unique()) for layer in (0, 1)] == [1.0, 2.0]
        assert cache.peak_bytes == 3 * per_layer
        cache.release(7)
        taken = [cache.take_gradient(layer, 7) for layer in (1, 0)]
        assert [float(pair[0].unique()) for pair in taken if pair] == [12.0, 10.0]
        assert cache.take_gradient(1, 7) is None
        cache.close(7)
        cache.assert_empty()
    assert cache.arena.num_bytes == 0


def test_the_next_layer_of_a_streamed_entry_is_on_its_way() -> None:
    cache = KVCache(prefetches=True)
    for part in Part:
        cache.stream(7, part)
    for layer in range(4):
        cache.write(layer, 7, block(3, 1.0 + layer), block(3, 0))
        cache.add_gradient(layer, (7,), block(3, 10.0 + layer), block(3, 0))
    entry = cache._entries[7, Part.KEYS_VALUES]
    under_way = []
    for layer in (0, 1, 2, 3, 3, 2, 1, 0):
        assert float(cache.read(layer, (7,))[0].unique()) == 1.0 + layer
        under_way.append([n for n, (k, _) in entry.away.items() if k.arriving is not None])
    # At the first layer of a backward nobody knows yet that it goes down.
    assert under_way == [[1], [2], [3], [], [], [1], [0], []]
    cache.release(7)
    assert [float(pair[0].unique()) for n in (3, 2, 1, 0) if (pair := cache.take_gradient(n, 7))] == [13, 12, 11, 10]
    cache.close(7)
    assert cache.arena.num_bytes == 0


def test_streaming_begins_before_a_part_does(cache: KVCache) -> None:
    with pytest.raises(CacheError, match=r"stream of the K/V of block 7: expected an entry that has nothing yet"):
        cache.stream(7, Part.KEYS_VALUES)
    cache.stream(7, Part.GRADIENTS)
    with pytest.raises(CacheError, match=r"evict of the gK/gV of block 7: its gK/gV are streamed"):
        cache.evict(7, Part.GRADIENTS)
    cache.add_gradient(1, (7,), block(3, 1), block(3, 1))
    cache.release(7)
    with pytest.raises(CacheError, match=r"close of block 7.* gradients of layers \[1\] are left"):
        cache.close(7)


def test_evicted_parts_cannot_be_used(cache: KVCache) -> None:
    with_gradients(cache)
    for part in Part:
        cache.evict(7, part)
    on_host = r"of block 7, layer 0: its K/V are on the host; the memory plan must fetch them before"
    with pytest.raises(CacheError, match=f"read {on_host}"):
        cache.read(0, (9, 7))
    with pytest.raises(CacheError, match=f"add_gradient {on_host}"):
        cache.add_gradient(0, (7,), block(3, 1), block(3, 1))
    with pytest.raises(CacheError, match=r"write of block 7, layer 0: it is already written"):
        cache.write(0, 7, block(3, 1), block(3, 1))
    with pytest.raises(CacheError, match=r"take_gradient of block 7, layer 1: its gK/gV are on the host"):
        cache.take_gradient(1, 7)
    with pytest.raises(CacheError, match=r"evict of the K/V of block 7: its K/V are on the host"):
        cache.evict(7, Part.KEYS_VALUES)
    with pytest.raises(CacheError, match=r"release of block 7: its K/V are on the host"):
        cache.release(7)
    with pytest.raises(CacheError, match=r"drop of the K/V of block 7: its K/V are on the host"):
        cache.drop(7)
    cache.fetch(7, Part.KEYS_VALUES)
    with pytest.raises(CacheError, match=r"add_gradient of block 7, layer 0: its gK/gV are on the host"):
        cache.add_gradient(0, (7,), block(3, 1), block(3, 1))
    with pytest.raises(CacheError, match=r"fetch of the K/V of block 7: expected them on the host"):
        cache.fetch(7, Part.KEYS_VALUES)


def test_gradients_cannot_be_lost_on_the_host(cache: KVCache) -> None:
    cache.add_gradient(1, (7,), block(3, 1), block(3, 1))
    cache.evict(7, Part.GRADIENTS)
    cache.release(7)
    cache.release(9)
    with pytest.raises(CacheError, match=r"close of block 7: its gK/gV are on the host"):
        cache.close(7)
    with pytest.raises(CacheError, match=r"blocks \[7\] .* not on the device: gK/gV of block 7"):
        cache.assert_empty()


def test_gradients_that_nobody_added_to_are_evicted_too(cache: KVCache) -> None:
    """The last layer of a microbatch without rows reads nothing, and may be all that a stage has."""
    cache.evict(7, Part.GRADIENTS)
    with pytest.raises(CacheError, match=r"add_gradient of block 7, layer 0: its gK/gV are on the host"):
        cache.add_gradient(0, (7,), block(3, 1), block(3, 1))
    cache.fetch(7, Part.GRADIENTS)
    assert cache.take_gradient(0, 7) is None


def test_dropped_blocks_are_written_anew_in_every_layer(cache: KVCache) -> None:
    cache.drop(7)
    assert cache.kv_bytes == 2 * 2 * 2 * 2 * 4 * 4
    again = r"its K/V were dropped; the memory plan must recompute the microbatch that wrote them"
    for refused in (lambda: cache.read(0, (7,)), lambda: cache.drop(7), lambda: cache.release(7)):
        with pytest.raises(CacheError, match=again):
            refused()
    with pytest.raises(CacheError, match="already written"):
        cache.write(0, 7, block(3, 7), block(3, -7))
    cache.rewrite(0, 7, block(3, 7), block(3, -7))
    with pytest.raises(CacheError, match=r"read of block 7, layer 1: .*dropped"):
        cache.read(1, (7,))
    with pytest.raises(CacheError, match=r"rewrite of block 7, layer 0: .* its dropped layers are \[1\]"):
        cache.rewrite(0, 7, block(3, 7), block(3, -7))
    with pytest.raises(CacheError, match=r"evict of the K/V of block 7: .*dropped"):
        cache.evict(7, Part.KEYS_VALUES)
    cache.rewrite(1, 7, block(3, 1007), block(3, -1007))
    assert float(cache.read(1, (7,))[0][0, 0, 0]) == 1007.0
    assert (cache.num_recomputes, cache.dropped_blocks) == (1, frozenset())
    with pytest.raises(CacheError, match=r"rewrite of block 9, layer 0: .* it is not dropped"):
        cache.rewrite(0, 9, block(2, 0), block(2, 0))


def test_caches_of_one_rank_have_one_peak() -> None:
    device = DeviceBytes()
    caches = [KVCache(device=device) for _ in range(2)]
    for cache in caches:
        cache.write(0, 7, block(3, 1), block(3, 1))
        cache.release(7)
    totals = CacheTotals.of(caches, device)
    assert totals.peak_bytes == caches[0].peak_bytes == caches[1].peak_bytes
