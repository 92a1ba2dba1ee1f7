"""Verification against a dense run: what is compared, and what a mismatch does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from prefixflow.runtime.world import Worlds


def compare_on_this_rank() -> dict[str, tuple[float, float, str]]:
    """Errors of a shard of "a", of a whole "b" on each of two ranks, and of a "c" that has a gradient on one side only."""
    import torch
    import torch.distributed as dist

    from megatron.prefixflow.verify import Named, compare_gradients, copied

    rank = dist.get_rank()
    a, b, c = torch.tensor([3.0, 4.0])[rank].double(), torch.tensor([1e-30, 0.0]), torch.tensor([0.5])
    before = copied([("a", a), ("b", b), ("c", None)])
    cases: dict[str, Named] = {
        "same": [("a", a), ("b", b), ("c", torch.zeros(1))],
        "shard": [("a", a + 1e-3 * rank), ("b", b), ("c", None)],
        "tiny": [("a", a), ("b", 3 * b), ("c", None)],
        "one side": [("a", a), ("b", b), ("c", c)],
        "not a number": [("a", a), ("b", b * (math.nan if rank else 1.0)), ("c", None)],
    }
    found = {}
    for name, ours in cases.items():
        errors = compare_gradients(ours, before)
        found[name] = errors.largest, errors.total, errors.worst
    return found


def test_errors_are_of_the_whole_parameter_and_alike_on_all_ranks(worlds: Worlds) -> None:
    first, second = worlds[2].run(compare_on_this_rank)
    assert first == second
    assert first["same"][:2] == (0.0, 0.0)
    assert first["shard"] == pytest.approx((1e-3 / 5, 1e-3 / 5, "a"))
    # Far below all others a gradient is rounding, not an error of its whole size.
    assert first["tiny"][0] < 1e-20
    assert first["one side"][0] > 1e4
    assert first["one side"][2] == "c"
    assert first["not a number"] == (math.inf, math.inf, "b")


def snapshots_on_this_rank() -> None:
    import torch

    from megatron.prefixflow.verify import Snapshot

    class Chunk(torch.nn.Module):
        share_embeddings_and_output_weights = False

        def __init__(self) -> None:
            super().__init__()
            self.main, self.plain, self.empty = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
            self.register_buffer("counts", torch.ones(3), persistent=False)

    chunk: Any = Chunk()
    chunk.main.main_grad = torch.full((2,), 5.0)
    chunk.plain.grad = torch.full((2,), 6.0)
    buffer, plain = chunk.main.main_grad, chunk.plain.grad
    taken = Snapshot([chunk])
    for tensor in (buffer, plain, chunk.counts):
        tensor.zero_()
    chunk.empty.grad = torch.ones(2)
    taken.restore()
    assert chunk.main.main_grad is buffer
    assert buffer.tolist() == [5.0, 5.0]
    assert chunk.plain.grad is plain
    assert plain.tolist() == [6.0, 6.0]
    assert chunk.empty.grad is None
    assert chunk.counts.tolist() == [1.0] * 3
    chunk.plain.grad = None
    taken.restore()
    assert chunk.plain.grad.tolist() == [6.0, 6.0]
    chunk.plain.grad.zero_()
    taken.restore()
    assert chunk.plain.grad.tolist() == [6.0, 6.0], "the snapshot was handed out"


def test_a_snapshot_puts_gradients_and_buffers_back(worlds: Worlds) -> None:
    worlds[1].run(snapshots_on_this_rank)


def test_limits_depend_on_precision_and_experts() -> None:
    import torch

    from megatron.prefixflow.verify import GradientErrors

    errors = GradientErrors({"decoder.layers.0.a": 1e-7, "decoder.layers.1.b": 1e-3}, total=1e-2)
    assert errors.problem(torch.bfloat16, has_experts=False) is None
    sentence = errors.problem(torch.float32, has_experts=False)
    assert sentence is not None
    assert "decoder.layers.1.b differs by 0.001" in sentence
    assert "order that differs is decoder.layers.1.b" in sentence
    exact = errors.problem(torch.float64, has_experts=False)
    assert exact is not None
    assert "order that differs is decoder.layers.0.a" in exact
    assert "decoder.layers.1.b" in str(errors.problem(torch.float64, has_experts=True)).split(";")[1]
    wide = GradientErrors({"a": 0.1}, total=0.06)
    assert "0.06 of their norm" in str(wide.problem(torch.bfloat16, has_experts=False))
