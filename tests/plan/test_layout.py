"""Parallel layouts: the world they need, and what does not fit."""

from __future__ import annotations

import itertools

import pytest

from prefixflow.plan.layout import ParallelLayout, layers_per_stage


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (8, {"tp": 2}, ParallelLayout(tp=2, dp=4)),
        (8, {"tp": 2, "pp": 2, "cp": 2}, ParallelLayout(tp=2, pp=2, cp=2)),
        (None, {"tp": 3, "pp": 5}, ParallelLayout(tp=3, pp=5)),
        (None, {"ep": 4}, ParallelLayout(ep=4, dp=4)),
        (None, {"ep": 4, "tp": 2}, ParallelLayout(ep=4, tp=2, dp=2)),
        (None, {"ep": 2, "etp": 2, "tp": 4}, ParallelLayout(ep=2, etp=2, tp=4)),
        (None, {"tp": 2, "dp": 7}, ParallelLayout(tp=2, dp=7)),
    ],
)
def test_layouts(world, sizes, expected):
    layout = ParallelLayout.for_world(world, **sizes)
    assert layout == expected
    assert layout.world_size == (world or layout.tp * layout.pp * layout.cp * layout.dp)


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (6, {"tp": 4}, "the world has 6 processes"),
        (8, {"tp": 2, "dp": 3}, "make it 4"),
        (2, {"ep": 4}, "expert groups do not fit"),
        (4, {"tp": 0}, "--tp is 0"),
        (4, {"dp": 0}, "--dp is 0"),
        (4, {"vpp": 2}, "needs pipeline stages"),
    ],
)
def test_layouts_that_do_not_fit(world, sizes, words):
    with pytest.raises(ValueError, match=words):
        ParallelLayout.for_world(world, **sizes)


def test_lengths_are_padded_for_tensor_and_context_parallelism():
    assert ParallelLayout(tp=4).token_multiple == 4
    assert ParallelLayout(tp=4, cp=3).token_multiple == 24


def test_experts_regroup_the_same_ranks():
    layout = ParallelLayout(tp=2, cp=2, dp=4, ep=8, etp=1)
    assert layout.expert_dp == 2
    assert str(layout) == "tp 2 pp 1 cp 2 dp 4 ep 8 etp 1"


@pytest.mark.parametrize(
    ("num_layers", "sizes", "expected"),
    [
        (4, {}, (4,)),
        (8, {"pp": 2, "vpp": 2}, (2, 2, 2, 2)),
        (4, {"pp": 2, "first": 1}, (1, 3)),
        (6, {"pp": 4, "first": 1, "last": 1}, (1, 2, 2, 1)),
        (6, {"pp": 2, "vpp": 2, "first": 2}, (1, 2, 1, 2)),
        (3, {"pp": 2, "with_embedding": True}, (1, 2)),
        (2, {"pp": 4, "with_embedding": True, "with_loss": True}, (0, 1, 1, 0)),
        (6, {"pp": 2, "vpp": 2, "with_embedding": True, "with_loss": True}, (1, 2, 2, 1)),
    ],
)
def test_layers_per_stage(num_layers, sizes, expected):
    assert layers_per_stage(num_layers, **sizes) == expected


@pytest.mark.parametrize(
    ("num_layers", "sizes", "words"),
    [
        (4, {"pp": 3}, "does not divide evenly over 3 model chunks"),
        (4, {"pp": 2, "with_loss": True}, "counted as a layer"),
        (5, {"pp": 3, "first": 2}, "3 stages with --decoder-first-pipeline-num-layers"),
        (5, {"pp": 2, "first": 2, "last": 2}, "does not divide evenly"),
        (4, {"pp": 2, "first": 3, "last": 3}, "does not divide evenly"),
        (4, {"pp": 1, "first": 2}, "needs pipeline stages"),
        (4, {"pp": 2, "last": 0}, "--decoder-last-pipeline-num-layers is 0"),
        (4, {"pp": 2, "first": 4}, "is 4"),
        (6, {"pp": 2, "vpp": 2, "first": 3}, "multiple of the 2 model chunks"),
        (4, {"pp": 2, "first": 1, "with_loss": True}, "give one of them"),
    ],
)
def test_layers_that_do_not_fit_the_stages(num_layers, sizes, words):
    with pytest.raises(ValueError, match=words):
        layers_per_stage(num_layers, **sizes)


def test_expert_blocks_join_overlapping_groups():
    """Neighbouring data-parallel ranks that a chain of tensor, context and expert groups connects, found by joining."""
    for tp, cp, ep, etp, dp in itertools.product((1, 2, 3), (1, 2), (1, 2, 3, 4), (1, 2), (1, 2, 3, 4, 6)):
        if tp * cp * dp % (ep * etp):
            continue
        block = {0}
        while True:
            wider = {r // size * size + i for size in (tp * cp, ep * etp) for r in block for i in range(size)}
            if wider == block:
                break
            block = wider
        assert ParallelLayout(tp=tp, cp=cp, ep=ep, etp=etp, dp=dp).expert_block == -(-len(block) // (tp * cp))
