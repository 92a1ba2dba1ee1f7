"""Context parallelism with gathered K/V against the independent reference: layouts, lengths, losses, bytes moved, faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.prefixflow.parity import Case, Runner
from prefixflow.runtime.context import ContextParallel, Pending, SplitMicrobatch
from prefixflow.runtime.world import Worlds
from tests.mcore.parity_files import write_files
from tests.mcore.test_mutants import Setup, patch, restore

LIMIT = 1e-9
MOE_LIMIT = 1e-6
TIMEOUT_S = 300.0
TINY = "--model tiny --num-layers 2"
UNEVEN = "--decoder-first-pipeline-num-layers 2"
MOE = "--model tiny-moe --num-layers 2 --moe-router-load-balancing-type aux_loss seq_aux_loss"
LOSSES = "--moe-aux-loss-coeff 0.1 0.05 --moe-z-loss-coeff 0.01"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
GSPO = "--policy-loss gspo --clip-low 0.02 --clip-high 0.03 --kl-coef 0.1 --entropy-coef 0.01"

CASES = [
    ("mixed-near", f"{TINY} --max-tokens 64 --cp 2 {GSPO}"),
    # Segments of one token and fewer than 2 * cp, odd lengths, empty responses.
    ("edges", f"{TINY} --max-tokens 17 --cp 2 --recompute full"),
    ("chains", f"{TINY} --max-tokens 16 --cp 4"),
    ("deep", f"{TINY} --max-tokens 64 --cp 2 --tp 2 --sequence-parallel --recompute selective"),
    ("deep", f"--model tiny --num-layers 3 --max-tokens 32 --cp 2 --pp 2 {UNEVEN} --recompute full"),
    # Reference log-probabilities that the file lacks come from forward-only passes.
    ("mixed-partly-old", f"{TINY} --max-tokens 64 --cp 2 --dp 2 --kl-coef 0.1"),
]
SLOW = [
    *(
        (file, f"--model tiny --max-tokens {budget} {layout} --recompute {recompute}")
        for layout in (
            "--cp 2",
            "--cp 3",
            "--cp 4",
            "--cp 2 --tp 2",
            "--cp 2 --pp 2",
            "--cp 2 --pp 2 --vpp 2",
            "--cp 2 --dp 2",
        )
        for file, budget, recompute in (("edges", 16, "none"), ("mixed", 64, "full"), ("deep", 4096, "selective"))
    ),
    (
        "mixed",
        f"{TINY} --max-tokens 64 --cp 2 --attention-kernel einsum --recompute selective --recompute-modules core_attn",
    ),
    ("some-zero", f"{TINY} --max-tokens 64 --cp 2 --dp 2 --skip-zero-advantage"),
]
MOE_CASES = [
    ("mixed", f"{MOE} --max-tokens 32 --cp 2 --ep 2 --recompute full {LOSSES} {BIAS}"),
]
SLOW_MOE = [
    ("mixed-routes", f"{MOE} --max-tokens 64 --cp 2 --routing-replay rollout {LOSSES}"),
    ("mixed", f"{MOE} --max-tokens 64 --cp 2 --ep 2 --tp 2 {LOSSES}"),
    ("mixed", f"{MOE} --max-tokens 64 --cp 2 --ep 2 --pp 2 {LOSSES} {BIAS} --routing-replay record"),
    ("mixed", f"{MOE} --max-tokens 64 --cp 2 --ep 4 --dp 2 --moe-token-dispatcher-type allgather {LOSSES}"),
]
FACTORISATIONS = [
    f"--{a} 2 --{b} 2" for a, b in (("dp", "cp"), ("dp", "tp"), ("dp", "pp"), ("cp", "tp"), ("cp", "pp"), ("tp", "pp"))
] + [f"--{name} 4" for name in ("dp", "cp", "tp", "pp")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("trajectories"))


@pytest.fixture(scope="module")
def runner(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("parity"), TIMEOUT_S, setup=Setup(), worlds=worlds) as kept:
        yield kept
        worlds[2].run(restore)


def compare(
    runner: Runner, file: str, text: str, dtype: str = "float64", mutant: Callable[[], None] | None = None
) -> dict[str, Any]:
    runner.setup = Setup(mutant)
    return runner.run(Case(file, ("--prefix-reuse", "on", *text.split(), "--dtype", dtype)))


def assert_exact(result: dict[str, Any], limit: float = LIMIT) -> None:
    assert result["ok"], result["reasons"]
    for name in ("max_rel_grad_err", "max_logprob_err", "loss_rel_err", "grad_norm_rel_err"):
        assert result[name] < limit, name
    assert result["context_bytes"] == result["context_bytes_planned"] > 0
    assert result["shared_segments"] > 0


@pytest.mark.parametrize(("file", "text"), CASES)
def test_float64(runner, files, file, text):
    assert_exact(compare(runner, files[file], text))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), SLOW)
def test_every_layout(runner, files, file, text):
    assert_exact(compare(runner, files[file], text))


def assert_moe(result: dict[str, Any]) -> None:
    assert_exact(result, MOE_LIMIT)
    assert result["router_loss_rel_err"] < MOE_LIMIT
    assert result["max_expert_count_err"] == 0


@pytest.mark.parametrize(("file", "text"), MOE_CASES)
def test_experts(runner, files, file, text):
    assert_moe(compare(runner, files[file], text))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), SLOW_MOE)
def test_experts_in_every_layout(runner, files, file, text):
    assert_moe(compare(runner, files[file], text))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision(runner, files, dtype):
    result = compare(runner, files["mixed"], f"{TINY} --max-tokens 64 --cp 2 --use-distributed-optimizer", dtype)
    assert result["ok"], result["reasons"]


def test_the_gradient_norm_does_not_depend_on_the_layout(runner, files):
    norms = []
    for layout in FACTORISATIONS:
        result = compare(runner, files["two-groups"], f"--model tiny --max-tokens 64 {layout}")
        assert result["ok"], (layout, result["reasons"])
        norms.append(result["grad_norm_reuse"])
    assert max(norms) - min(norms) < 1e-12 * min(norms), dict(zip(FACTORISATIONS, norms, strict=True))


def test_prefix_keys_move_once_whatever_the_number_of_microbatches(runner, files):
    """Each position's K/V are gathered by its own microbatch and its gK/gV reduced there, and never again."""
    cp, num_layers, num_kv_heads, head_size = 2, 2, 4, 16
    position_bytes = num_layers * 2 * num_kv_heads * head_size * 8
    numbers = set()
    for budget, recompute in ((64, "none"), (64, "full"), (128, "none"), (4096, "none")):
        text = f"{TINY} --max-tokens {budget} --cp {cp} --recompute {recompute}"
        result = compare(runner, files["groups"], text)
        assert_exact(result)
        # F gathers, a recomputation gathers again, B reduces. Over both ranks each position is received once.
        moved = result["context_bytes"] / position_bytes / (3 if recompute == "full" else 2)
        padding = moved - result["computed_tokens"]
        assert 0 <= padding < 2 * cp * result["microbatches"]
        numbers.add(result["microbatches"])
    assert len(numbers) == 3


# Faults.


def gathered_in_rank_order() -> None:
    patch(SplitMicrobatch, "start_gather", lambda self, k, v: self._start(torch.cat([k, v], dim=-1), self.rank_order))


def one_gathered_element_is_off() -> None:
    start = SplitMicrobatch.start_gather

    def mutant(self: SplitMicrobatch, k: Tensor, v: Tensor) -> Pending:
        pending = start(self, k, v)
        pending.wait()[0][0, 0, 0] += 1e-3
        return pending

    patch(SplitMicrobatch, "start_gather", mutant)


def written_segments_are_completed_in_rank_order() -> None:
    start = SplitMicrobatch.start_completing

    def mutant(self: SplitMicrobatch, k: Tensor, v: Tensor, known: Any) -> Pending:
        order = torch.argsort(self.rank_order)
        return start(
            self, k, v, [(tokens, (key[order[: len(key)] % len(key)], value)) for tokens, (key, value) in known]
        )

    patch(SplitMicrobatch, "start_completing", mutant)


def other_ranks_gradients_are_dropped() -> None:
    start = ContextParallel.start_reduce_scatter

    def mutant(self: ContextParallel, x: Tensor) -> Any:
        own = x.chunk(self.size)[self.rank]
        reduced, work = start(self, x)
        work.wait()
        return reduced.copy_(self.size * own), work

    patch(ContextParallel, "start_reduce_scatter", mutant)


def rows_stand_in_rank_order() -> None:
    padded = SplitMicrobatch._padded

    def mutant(self: SplitMicrobatch, values: Tensor, owners: Any) -> tuple[Tensor, Tensor]:
        send, place = padded(self, values, owners)
        return send, place.flip(0)

    patch(SplitMicrobatch, "_padded", mutant)


MUTANTS = [
    gathered_in_rank_order,
    one_gathered_element_is_off,
    other_ranks_gradients_are_dropped,
    rows_stand_in_rank_order,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_caught(runner, files, mutant):
    result = compare(runner, files["groups-near"], f"{TINY} --max-tokens 64 --cp 2", mutant=mutant)
    assert not result["ok"]
    assert result["max_rel_grad_err"] > 1e-6, result["reasons"]
