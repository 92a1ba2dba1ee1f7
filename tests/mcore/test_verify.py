"""Verification against a dense run: what is compared, and what a mismatch does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixflow.runtime.world import Worlds
from prefixflow.trajectories import write_trajectories
from tests.mcore.faults import patch, restore
from tests.mcore.test_training import arguments, groups_of, read_metrics, run_main


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
    wide = GradientErrors({"a": 0.1}, total=0.16)
    assert "0.16 of their norm" in str(wide.problem(torch.bfloat16, has_experts=False))


# --- training --------------------------------------------------------------------------------------------------------

MOE_BIAS = (
    *("--model", "tiny-moe", "--num-layers", "2", "--ep", "2", "--moe-aux-loss-coeff", "0.1"),
    *(
        "--moe-router-score-function",
        "sigmoid",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate",
        "0.1",
    ),
)
VERIFIED = {
    "sharded and overlapped": ("float32", ("--use-distributed-optimizer", "--overlap-grad-reduce")),
    "updates with a reference": ("float64", ("--kl-coef", "0.1", "--updates-per-batch", "2")),
    "experts": ("float64", (*MOE_BIAS, "--updates-per-batch", "2", "--routing-replay", "record")),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A batch of two groups of 5 and 3 trajectories of about 110 tokens."""
    write_trajectories(tmp_path / "t.jsonl", groups_of(5, 3))
    return tmp_path / "t.jsonl"


def train(worlds: Worlds, file: Path, *more: str, steps: int = 3, dtype: str = "float64") -> tuple[Any, list[Any]]:
    """(status, stdout, stderr) of both ranks, and the metrics."""
    metrics = file.with_name("metrics.jsonl")
    metrics.unlink(missing_ok=True)
    # Trajectories are longer than this: the dense run needs a budget of its own.
    line = arguments(file, "--max-tokens", "64", *more, dtype=dtype, steps=steps)
    results = worlds[2].run(run_main, [*line, "--metrics-file", str(metrics)])
    return results, read_metrics(metrics) if metrics.exists() else []


@pytest.mark.parametrize("name", VERIFIED)
def test_a_verified_step_is_the_step_itself(file: Path, worlds: Worlds, name: str) -> None:
    dtype, more = VERIFIED[name]
    runs = [train(worlds, file, *more, *verify, dtype=dtype) for verify in ((), ("--verify-steps", "2"))]
    for results, metrics in runs:
        assert [status for status, *_ in results] == [0, 0], results[0][2]
        assert len(metrics) == 3
    (_, plain), (_, verified) = runs
    for key in ("loss", "grad_norm", "kl", "computed_tokens", "routes_native", "load_balancing_loss", "fallback"):
        assert [line[key] for line in verified] == [line[key] for line in plain], key
    errors = [line["verify_rel_err"] for line in verified]
    assert errors[2] is None
    assert all(0 < error < {"float32": 1e-5, "float64": 1e-6}[dtype] for error in errors[:2])
    assert {line["verify_rel_err"] for line in plain} == {None}
    said = [line for line in runs[1][0][0][1].splitlines() if "the same step run dense" in line]
    assert [line.split(" agrees")[0] for line in said] == ["step 1", "step 2"]
    assert f"gradient error {errors[0]:.3g}, limit " in said[0]


def value_gradients_of_prefixes_are_dropped() -> None:
    from prefixflow.runtime.cache import KVCache

    add = KVCache.add_gradient
    patch(KVCache, "add_gradient", lambda self, layer, blocks, dk, dv: add(self, layer, blocks, dk, dv * 0))


@pytest.fixture
def corrupted(worlds: Worlds) -> Iterator[None]:
    """Gradients of shared prefixes are wrong, those of a dense run are not."""
    worlds[2].run(value_gradients_of_prefixes_are_dropped)
    yield
    worlds[2].run(restore)


@pytest.mark.usefixtures("corrupted")
def test_a_mismatch_stops_the_run_before_it_updates(file: Path, worlds: Worlds) -> None:
    results, metrics = train(worlds, file, "--verify-steps", "1")
    assert [status for status, *_ in results] == [1, 1]
    assert metrics == []
    assert "step 1 differs from the same step run dense" in results[0][2]
    assert "the gradient of decoder.layers.0.self_attention.linear_qkv.weight differs by" in results[0][2]
    assert "log-probabilities" not in results[0][2], "a backward fault alone"
    assert "differs" not in results[1][2], "rank 0 speaks"


@pytest.mark.parametrize("more", [("--kl-coef", "0.1"), MOE_BIAS])
@pytest.mark.usefixtures("corrupted")
def test_a_mismatch_falls_back_for_good(file: Path, worlds: Worlds, more: tuple[str, ...]) -> None:
    more = (*more, "--updates-per-batch", "2")
    results, fallen = train(worlds, file, *more, "--verify-steps", "1", "--on-verify-mismatch", "fallback")
    _, dense = train(worlds, file, *more, "--prefix-reuse", "off", "--max-tokens", "160")
    assert results[0][1].count("differs from the same step run dense") == 1
    assert [line["fallback"] for line in fallen] == [2, 2, 2]
    assert [line["verify_rel_err"] is None for line in fallen] == [False, True, True]
    assert fallen[0]["verify_rel_err"] > 0.01
    assert {line["reuse_ratio"] for line in fallen} == {1.0}
    for key in ("loss", "grad_norm"):
        expected = [line[key] for line in dense]
        assert [line[key] for line in fallen] == pytest.approx(expected, rel=1e-6, abs=1e-9), key


def test_nothing_shared_is_an_error_where_sharing_is_required(file: Path, worlds: Worlds) -> None:
    assert [status for status, *_ in train(worlds, file, "--require-sharing", steps=1)[0]] == [0, 0]
    write_trajectories(file, groups_of(1, 1))
    for more in ((), ("--logprobs-only", str(file.with_name("out.jsonl")))):
        results, metrics = train(worlds, file, "--require-sharing", *more)
        assert [status for status, *_ in results] == [1, 1]
        assert "--require-sharing: nothing is shared among 2 trajectories in 2 groups" in results[0][2]
        assert metrics == []
    assert not file.with_name("out.jsonl").exists()


def test_a_trajectory_that_is_scored_otherwise_is_named() -> None:
    import torch

    from megatron.prefixflow.dense import Outcome, problems_of
    from megatron.prefixflow.verify import GradientErrors

    trajectories = groups_of(3)
    dense = Outcome({0: np.zeros(9), 1: np.zeros(9), 2: np.zeros(0)}, loss=1.0, norm=2.0)
    near = replace(dense, logprobs={**dense.logprobs, 1: np.full(9, 1e-8)})
    far = replace(dense, logprobs={**dense.logprobs, 1: np.r_[np.full(8, 1e-8), 2e-2]}, loss=1.5)
    wild = replace(dense, logprobs={**dense.logprobs, 0: np.full(9, np.nan), 1: np.full(9, 0.6)})

    def found(outcome: Outcome, dtype: torch.dtype) -> tuple[str, ...]:
        return problems_of(outcome, dense, GradientErrors({}, 0.0), trajectories, dtype, has_experts=False)

    assert found(near, torch.float64) == ()
    logprobs, loss = found(far, torch.float32)
    assert logprobs == "log-probabilities of trajectory 'g0-1' differ by 0.02, limit 0.001"
    assert loss == "the loss is 1.5 and not 1"
    # Rounding of single logits is allowed in bfloat16.
    assert found(replace(far, loss=1.1), torch.bfloat16) == ()
    assert "'g0-0' differ by inf" in found(wild, torch.bfloat16)[0]


def test_a_dense_run_beyond_the_memory_budget_is_refused_before_the_start(file: Path) -> None:
    from megatron.prefixflow.job import prepare

    line = arguments(file, "--max-tokens", "64", "--memory-budget-gib", "0.046")
    assert prepare(line, 1).memory is not None
    with pytest.raises(
        ValueError, match=r"--verify-steps: a step cannot be run dense\. --memory-budget-gib: the step needs"
    ):
        prepare([*line, "--verify-steps", "1"], 1)
