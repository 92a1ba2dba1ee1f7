"""Context parallelism with gathered K/V against the independent reference: layouts, lengths, losses, bytes moved, faults."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.prefixflow import parity
from prefixflow.runtime.context import Pending, SplitMicrobatch
from tests.mcore.faults import Setup, patch, restore

LIMIT = 1e-9
MOE_LIMIT = 1e-6
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
]
SLOW = [
    ("chains", f"{TINY} --max-tokens 16 --cp 4"),
    ("deep", f"--model tiny --num-layers 3 --max-tokens 32 --cp 2 --pp 2 {UNEVEN} --recompute full"),
    # Reference log-probabilities that the file lacks come from forward-only passes.
    ("mixed-partly-old", f"{TINY} --max-tokens 64 --cp 2 --dp 2 --kl-coef 0.1"),
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
FACTORISATIONS += [f"{layout} --context-parallel-kv ring" for layout in FACTORISATIONS if "--cp" in layout]


def assert_exact(result: dict[str, Any], limit: float = LIMIT) -> None:
    assert result["ok"], result["reasons"]
    for name in ("max_rel_grad_err", "max_logprob_err", "loss_rel_err", "grad_norm_rel_err"):
        assert result[name] < limit, name
    assert result["context_bytes"] == result["context_bytes_planned"] > 0
    assert result["shared_segments"] > 0


@pytest.mark.parametrize(("file", "text"), CASES)
def test_float64(compare, file, text):
    assert_exact(compare(file, text))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), SLOW)
def test_every_layout(compare, file, text):
    assert_exact(compare(file, text))


def assert_moe(result: dict[str, Any]) -> None:
    assert_exact(result, MOE_LIMIT)
    assert result["router_loss_rel_err"] < MOE_LIMIT
    assert result["max_expert_count_err"] == 0


@pytest.mark.parametrize(("file", "text"), MOE_CASES)
def test_experts(compare, file, text):
    assert_moe(compare(file, text))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), SLOW_MOE)
def test_experts_in_every_layout(compare, file, text):
    assert_moe(compare(file, text))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision(compare, dtype):
    result = compare("mixed", f"{TINY} --max-tokens 64 --cp 2 --use-distributed-optimizer", dtype)
    assert result["ok"], result["reasons"]


def test_every_factorisation_is_exact_and_has_the_same_gradient_norm(compare):
    norms = []
    for layout in FACTORISATIONS:
        result = compare("two-groups", f"--model tiny --max-tokens 32 {layout} --recompute full")
        assert result["ok"], (layout, result["reasons"])
        assert result["context_bytes"] == result["context_bytes_planned"]
        assert (result["context_bytes"] > 0) == ("--cp" in layout)
        norms.append(result["grad_norm_reuse"])
    assert max(norms) - min(norms) < 1e-12 * min(norms), dict(zip(FACTORISATIONS, norms, strict=True))


def test_prefix_keys_move_once_whatever_the_number_of_microbatches(compare):
    """Each position's K/V are gathered by its own microbatch and its gK/gV reduced there. Recomputation gathers again
    what is not in the cache."""
    cp, num_layers, num_kv_heads, head_size = 2, 2, 4, 16
    position_bytes = num_layers * 2 * num_kv_heads * head_size * 8
    results = [
        compare("groups", f"{TINY} --max-tokens {budget} --cp {cp} --recompute {recompute}")
        for budget, recompute in ((36, "none"), (4096, "none"), (36, "full"))
    ]
    for result in results:
        assert_exact(result)
    many, few, again = results
    computed, num_microbatches = many["computed_tokens"], many["microbatches"]
    assert num_microbatches == again["microbatches"] > few["microbatches"]
    # Over both ranks each position is received once; padding comes on top.
    for result in (many, few):
        moved = result["context_bytes"] / position_bytes
        assert 0 <= moved - 2 * computed < 2 * 2 * cp * result["microbatches"]
    # Three prefixes of 20 positions or more are in the cache.
    moved_again = (again["context_bytes"] - many["context_bytes"]) / position_bytes
    assert 0 < moved_again <= computed - 3 * 20 + 2 * cp * num_microbatches


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


def written_segments_are_mistaken() -> None:
    start = SplitMicrobatch.start_completing

    def mutant(self: SplitMicrobatch, k: Tensor, v: Tensor, known: Any) -> Pending:
        return start(self, k, v, [(tokens, (key.flip(0), value)) for tokens, (key, value) in known])

    patch(SplitMicrobatch, "start_completing", mutant)


def other_ranks_gradients_are_dropped() -> None:
    start = SplitMicrobatch.start_reduce

    def mutant(self: SplitMicrobatch, dk: Tensor, dv: Tensor) -> Pending:
        own = dk.new_zeros(len(dk), 1, 1)
        own[torch.from_numpy(self.index)] = self.parallel.size
        return start(self, own * dk, own * dv)

    patch(SplitMicrobatch, "start_reduce", mutant)


def rows_stand_in_rank_order() -> None:
    gather = SplitMicrobatch.gather_rows

    def mutant(self: SplitMicrobatch, *args: Any) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy = gather(self, *args)
        return logprobs.flip(0), entropy

    patch(SplitMicrobatch, "gather_rows", mutant)


@pytest.mark.parametrize(
    ("mutant", "more"),
    [
        (gathered_in_rank_order, ""),
        (one_gathered_element_is_off, ""),
        (written_segments_are_mistaken, "--recompute full"),
        (other_ranks_gradients_are_dropped, ""),
        (rows_stand_in_rank_order, ""),
    ],
)
def test_a_fault_is_caught(compare, mutant, more):
    result = compare("groups-near", f"{TINY} --max-tokens 36 --cp 2 {more}", mutant=mutant)
    assert not result["ok"]
    assert result["max_rel_grad_err"] > 1e-6, result["reasons"]


def test_command_exits_1_when_a_gather_is_corrupted(worlds, files, monkeypatch, capsys):
    setup = Setup(one_gathered_element_is_off)
    monkeypatch.setattr(parity, "Runner", functools.partial(parity.Runner, setup=setup, worlds=worlds))
    argv = [files["groups-near"], *f"{TINY} --dtype float64 --max-tokens 64 --cp 2".split()]
    assert parity.main(argv) == 1
    assert "FAILED" in capsys.readouterr().out
    worlds[2].run(restore)
