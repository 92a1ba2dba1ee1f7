"""Saved tensors in host memory: each storage once, parameters never, and nothing stays when a graph is dropped."""

from __future__ import annotations

import pytest
import torch

from prefixflow.runtime.host import HostArena
from prefixflow.runtime.offload import SavedTensors

WEIGHT = torch.randn(6, 6, dtype=torch.float64).requires_grad_()
INPUT = torch.randn(5, 6, dtype=torch.float64)


def saved_tensors(arena: HostArena, storages_ahead: int = 0) -> SavedTensors:
    return SavedTensors(arena, {WEIGHT.untyped_storage().data_ptr()}, storages_ahead=storages_ahead)


@pytest.mark.parametrize("storages_ahead", [0, 2, 100])
def test_gradients_are_the_same(storages_ahead):
    expected = torch.autograd.grad((INPUT @ WEIGHT).tanh().square().sum(), WEIGHT)[0]
    arena = HostArena()
    saved = saved_tensors(arena, storages_ahead)
    with saved.saving():
        result = (INPUT @ WEIGHT).tanh().square().sum()
    # The input and the output of tanh; the weight stays.
    assert arena.num_bytes == 2 * INPUT.numel() * 8
    saved.fetch()
    assert torch.equal(torch.autograd.grad(result, WEIGHT)[0], expected)
    arena.assert_empty()


def test_a_storage_goes_out_once_for_each_value_that_it_had():
    arena = HostArena()
    with saved_tensors(arena).saving():
        hidden = INPUT @ WEIGHT
        buffer = hidden.detach().clone()
        total = (hidden[:, ::2] * hidden[:, 1::2]).sum() + (hidden * buffer).sum()
        assert arena.num_bytes == 3 * INPUT.numel() * 8
        buffer.mul_(2)
        total = total + (hidden * buffer).sum()
    assert arena.num_bytes == 4 * INPUT.numel() * 8
    got = torch.autograd.grad(total, WEIGHT)[0]
    hidden = (INPUT @ WEIGHT).detach()
    swapped = torch.stack([hidden[:, 1::2], hidden[:, ::2]], dim=2).flatten(1)
    assert torch.allclose(got, INPUT.t() @ (swapped + 3 * hidden), rtol=1e-12)
    arena.assert_empty()


def test_a_graph_that_is_dropped_leaves_nothing():
    arena = HostArena()
    with saved_tensors(arena).saving():
        result = (INPUT @ WEIGHT).exp()
    assert arena.num_bytes > 0
    del result
    arena.assert_empty()
