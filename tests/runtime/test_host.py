"""The host arena: what comes back is what went in, and the account is exact."""

from __future__ import annotations

import pytest
import torch

from prefixflow.runtime.host import HostArena
from prefixflow.runtime.memory import LiveBytes


def test_values_come_back_and_bytes_are_counted() -> None:
    arena = HostArena()
    first, second = torch.randn(4, 6).t(), torch.randn(3, dtype=torch.float64)
    handles = [arena.put(first), arena.put(second)]
    assert arena.num_bytes == arena.peak_bytes == 4 * 24 + 8 * 3
    assert torch.equal(arena.take(handles[1]), second)
    assert arena.num_bytes == 4 * 24
    arena.prefetch(handles[0])
    assert torch.equal(arena.take(handles[0]), first)
    assert arena.num_bytes == 0
    assert arena.peak_bytes == 4 * 24 + 8 * 3
    assert arena.num_bytes_moved == 2 * arena.peak_bytes
    arena.begin_step()
    assert arena.peak_bytes == 0


def test_a_handle_is_good_for_one_take() -> None:
    arena = HostArena()
    handle = arena.put(torch.ones(2))
    with pytest.raises(AssertionError, match=r"1 tensors \(8 bytes\) were left"):
        arena.begin_step()
    arena.take(handle)
    with pytest.raises(AssertionError, match="taken or discarded"):
        arena.take(handle)


def test_what_is_on_the_host_is_not_live_on_the_device() -> None:
    arena = HostArena()
    with LiveBytes() as live:
        tensor = torch.ones(1000)
        handle = arena.put(tensor)
        del tensor
        assert live.now == 0
        back = arena.take(handle)
        assert live.now == 4000
        assert back.sum() == 1000
