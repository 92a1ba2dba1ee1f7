"""Mixtures of experts against the independent reference: layouts, scores, routing replay, losses of routers, expert counts.

Megatron rounds router scores to float32, so float64 runs agree to about 1e-7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron.prefixflow import model
from megatron.prefixflow.reference import effective_routes
from prefixflow.schedule import search
from prefixflow.trajectories import Trajectory, read_trajectories
from tests.mcore.faults import patch

LIMIT = 1e-6
MOE = "--model tiny-moe --num-layers 2"
LOSSES = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.05 --moe-z-loss-coeff 0.01"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
GROUPED = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"
SHARED = "--moe-shared-expert-intermediate-size 96"
ROLLOUT = "--routing-replay rollout"

CASES = [
    ("mixed", f"{MOE} --max-tokens 64 --recompute full {LOSSES} --moe-router-pre-softmax {SHARED}"),
    ("mixed-routes", f"{MOE} --max-tokens 32 --recompute full {ROLLOUT} {LOSSES}"),
    ("mixed-conflicts", f"{MOE} --max-tokens 64 {ROLLOUT} --route-mismatch first {BIAS} {GROUPED}"),
    # Small microbatches: those that meet in F must meet in B, whatever tree each rank is in.
    ("mixed", f"{MOE} --max-tokens 16 --ep 2 --recompute full {LOSSES}"),
    # One rank has nothing but dummies.
    ("one-group", f"{MOE} --max-tokens 32 --ep 2 {BIAS} {GROUPED} {LOSSES} --moe-token-dispatcher-type allgather"),
    # Each tensor-parallel rank sends its own tokens through its own copy of all experts.
    ("groups", f"{MOE} --max-tokens 32 --tp 2"),
    ("groups", f"{MOE} --max-tokens 32 --ep 2 --pp 2 --recompute full {BIAS} --routing-replay record"),
]
SLOW = [
    *(
        (file, f"{MOE} {layout} --max-tokens {budget} --recompute {recompute} {more}")
        for layout in ("--ep 2", "--ep 2 --pp 2", "--ep 2 --tp 2", "--ep 4", "--ep 2 --etp 2", "--ep 2 --tp 2 --etp 2")
        for recompute, budget in (("none", 64), ("full", 16))
        for file, more in (
            ("mixed", LOSSES),
            ("mixed", f"{BIAS} --routing-replay record"),
            ("mixed-routes", f"{ROLLOUT} {BIAS}"),
            ("mixed-conflicts", f"{ROLLOUT} {LOSSES}"),
        )
    ),
    ("mixed-routes", f"{MOE} --max-tokens 64 --ep 2 --tp 2 --dp 2 {ROLLOUT} {LOSSES}"),
    ("one-against-nine", f"{MOE} --max-tokens 32 --ep 2 --recompute full {LOSSES}"),
    ("one-against-nine", f"{MOE} --max-tokens 32 --ep 4 {BIAS}"),
    ("groups", "--model tiny-moe --max-tokens 32 --ep 2 --pp 2 --vpp 2 --recompute full --moe-aux-loss-coeff 0.1"),
    ("deep", "--model tiny-moe --max-tokens 16 --ep 2 --pp 2 --vpp 2 --recompute full"),
    ("edges", f"{MOE} --max-tokens 16 --ep 2 --tp 2 {LOSSES}"),
    ("some-zero", f"{MOE} --max-tokens 64 --ep 2 --skip-zero-advantage {LOSSES}"),
    ("mixed", f"{MOE} --max-tokens 16 --ep 2 --moe-token-dispatcher-type allgather {LOSSES}"),
    ("mixed", f"{MOE} --max-tokens 64 --recompute selective --recompute-modules moe --moe-layer-freq [0,1] {SHARED}"),
    ("mixed", f"{MOE} --max-tokens 64 --ep 2 {SHARED} --moe-shared-expert-gate --moe-router-dtype fp32"),
]
FLOAT32 = [
    ("mixed", f"{MOE} --max-tokens 64 --ep 2 --tp 2 --dp 2 --use-distributed-optimizer --moe-aux-loss-coeff 0.1")
]
BFLOAT16 = [
    ("groups", f"{MOE} --max-tokens 32 --recompute full --moe-aux-loss-coeff 0.01"),
    ("mixed", f"{MOE} --max-tokens 64 --ep 2 --use-distributed-optimizer"),
]


def assert_exact(result: dict[str, Any]) -> None:
    assert result["ok"], result["reasons"]
    assert result["max_rel_grad_err"] < LIMIT
    assert result["grad_norm_rel_err"] < LIMIT
    assert result["max_logprob_err"] < LIMIT
    assert result["router_loss_rel_err"] < LIMIT
    assert result["max_expert_count_err"] == 0
    assert result["clipped"]
    assert result["logical_tokens"] > result["computed_tokens"] > 0


@pytest.mark.parametrize(("file", "text"), CASES)
def test_float64(compare, file, text):
    result = compare(file, text)
    assert_exact(result)
    num_routes = 2 * result["computed_tokens"]
    assert result["routes_replayed"] + result["routes_native"] == num_routes
    if ROLLOUT in text:
        assert result["routes_replayed"] >= 0.8 * num_routes
        assert result["route_mismatch"] == pytest.approx(0.05 if "conflicts" in file else 0.0, abs=0.01)
    else:
        assert result["routes_replayed"] == (num_routes if "record" in text else 0)
        assert result["route_mismatch"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), SLOW)
def test_every_layout(compare, file, text):
    assert_exact(compare(file, text))


@pytest.mark.parametrize(("file", "text"), FLOAT32)
def test_float32(compare, file, text):
    result = compare(file, text, "float32")
    assert result["ok"], result["reasons"]


@pytest.mark.parametrize(("file", "text"), BFLOAT16)
def test_bfloat16_with_pinned_routes(compare, file, text):
    result = compare(file, text, "bfloat16")
    assert result["ok"], result["reasons"]
    assert 0 < result["reuse_err"] <= 2 * result["dense_err"]
    assert result["routes_native"] == 0 < result["routes_replayed"]


# Faults.


def each_rank_runs_its_own_order() -> None:
    """Only the kinds of operations agree: a B meets another microbatch's."""
    patch(search, "block_reads", lambda plan, rank: [m.reads for m in plan.ranks[rank]])


def copies_of_experts_are_not_summed() -> None:
    patch(model, "mark_expert_parameters", lambda chunk: None)


@pytest.mark.parametrize(
    ("mutant", "file", "text"),
    [
        (each_rank_runs_its_own_order, "one-against-nine", f"{MOE} --max-tokens 32 --ep 2"),
        (copies_of_experts_are_not_summed, "groups", f"{MOE} --max-tokens 32 --tp 2"),
    ],
)
def test_mutant_is_caught(compare, mutant, file, text):
    result = compare(file, text, mutant=mutant)
    assert not result["ok"]
    assert result.get("max_rel_grad_err", 1.0) > 1e-2, result["reasons"]


# The routes that the reference gives.


def trajectory(name: str, tokens: list[int], routes: list[int], group: str = "g") -> Trajectory:
    """`routes`: one expert a position."""
    rows = np.array(routes, np.int16).reshape(-1, 1, 1)
    mask = np.arange(len(tokens)) > 0
    return Trajectory(id=name, group=group, tokens=tokens, loss_mask=mask, advantages=1.0, routes=rows)


def test_effective_routes():
    batch = [
        trajectory("a", [1, 2, 3, 4], [5, -1, 6]),
        trajectory("b", [1, 2, 3, 9], [7, 4, -1]),
        trajectory("c", [1, 2, 8], [-1, 3]),
        trajectory("d", [1, 2, 3, 4], [0, 0, 0], group="other"),
    ]
    exact = [rows_of(t).ravel().tolist() for t in effective_routes(batch, "exact")]
    # Token 3 of b is that of a's path, though another token follows; c's first token is known to a and b, a comes first.
    assert exact == [[5, 4, 6], [7, 4, 6], [5, 3], [0, 0, 0]]
    first = [rows_of(t).ravel().tolist() for t in effective_routes(batch, "first")]
    assert first == [[5, 4, 6], [5, 4, 6], [5, 3], [0, 0, 0]]


def rows_of(t: Trajectory) -> np.ndarray:
    assert t.routes is not None
    return t.routes


def test_generated_routes_are_unlike_native_ones(files):
    """Otherwise the cases above would pass with a replay that does nothing."""
    batch = read_trajectories(files["mixed-routes"], routes=True)
    rows = np.concatenate([rows_of(t).reshape(-1, 2) for t in batch])
    pairs = np.unique(np.sort(rows[rows[:, 0] >= 0]), axis=0)
    assert len(pairs) == 8 * 7 // 2
