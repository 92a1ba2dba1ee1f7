"""Context parallelism with sharded K/V against the independent reference and against gathered K/V: layouts, bytes, faults."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megatron.prefixflow import parity
from megatron.prefixflow.parity import Case
from prefixflow.cli import main
from prefixflow.plan.ring import Ring
from prefixflow.runtime.attention import ring
from prefixflow.runtime.attention.kernels import AtenCpuKernel
from tests.mcore.faults import Setup, patch, restore
from tests.mcore.test_parity_context import assert_exact, assert_moe

RING = "--context-parallel-kv ring"
TINY = f"--model tiny --num-layers 2 {RING}"
MOE = f"--model tiny-moe --num-layers 2 {RING} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1"
GSPO = "--policy-loss gspo --clip-low 0.02 --clip-high 0.03 --kl-coef 0.1 --entropy-coef 0.01"
NORM = "--model tiny --max-tokens 64"

CASES = [
    # Segments of one token and fewer than 2 * cp, odd lengths, empty responses; every microbatch reads others.
    ("edges", f"{TINY} --max-tokens 17 --cp 4 --recompute full"),
    # Reference log-probabilities come from forward-only passes.
    ("mixed-partly-old", f"{TINY} --max-tokens 32 --cp 2 --pp 2 {GSPO}"),
]
SLOW = [
    *(
        (file, f"--model tiny {RING} --max-tokens {budget} {layout} --recompute {recompute}")
        for layout in (
            "--cp 2",
            "--cp 3",
            "--cp 4",
            "--cp 2 --tp 2 --sequence-parallel",
            "--cp 2 --pp 2",
            "--cp 2 --pp 2 --vpp 2",
            "--cp 2 --dp 2",
        )
        for file, budget, recompute in (("edges", 16, "none"), ("mixed", 64, "full"), ("deep", 32, "selective"))
    ),
    ("some-zero", f"{TINY} --max-tokens 64 --cp 2 --dp 2 --skip-zero-advantage"),
]
SLOW_MOE = [
    f"{MOE} --max-tokens 32 --cp 2 --ep 2 --recompute full",
    f"{MOE} --max-tokens 64 --cp 2 --ep 2 --pp 2 --routing-replay record",
    f"{MOE} --max-tokens 64 --cp 2 --ep 4 --dp 2",
]


def assert_sharded(result: dict[str, Any]) -> None:
    assert_exact(result)
    assert result["peak_context_shards"] == ring.MOST_SHARDS


@pytest.mark.parametrize(("file", "text"), CASES)
def test_float64(compare, file, text):
    assert_sharded(compare(file, text))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), SLOW)
def test_every_layout(compare, file, text):
    assert_sharded(compare(file, text))


@pytest.mark.slow
@pytest.mark.parametrize("text", SLOW_MOE)
def test_experts(compare, text):
    assert_moe(compare("mixed", text))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision(compare, dtype):
    result = compare("mixed", f"{TINY} --max-tokens 64 --cp 2 --use-distributed-optimizer", dtype)
    assert result["ok"], result["reasons"]


def test_the_same_gradients_and_norm_as_gathered_and_the_bytes_of_the_plan(parity_runner, files, tmp_path, capsys):
    parity_runner.setup = Setup()
    sides, norms = [], []
    for kv in ("gather", "ring"):
        dump = tmp_path / kv
        argv = ("--prefix-reuse", "on", *NORM.split(), "--cp", "4", "--context-parallel-kv", kv, "--dtype", "float64")
        result = parity_runner.run(Case(files["two-groups"], argv, str(dump)))
        assert_exact(result)
        sides.append(load_file(dump / "grads_reuse.safetensors"))
        norms.append(result["grad_norm_reuse"])
    assert abs(norms[1] - norms[0]) < 1e-12 * norms[0]
    gathered, sharded = sides
    assert gathered.keys() == sharded.keys()
    for name, expected in gathered.items():
        assert (sharded[name] - expected).norm() < 1e-12 * expected.norm(), name
    assert main(["plan", files["two-groups"], *argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["context_bytes"] == report["context_kv"]["context_bytes"]["ring"] == result["context_bytes"]


# Faults.


def one_element_of_a_hop_is_off() -> None:
    wait = ring.Exchange.wait

    def mutant(self: ring.Exchange) -> Tensor:
        arrived = wait(self)
        arrived.view(-1)[0] += 1e-3
        return arrived

    patch(ring.Exchange, "wait", mutant)


def gradients_go_home_one_hop_short() -> None:
    pass_on = ring._Gradients.pass_on

    class Arrived:
        def __init__(self, gradient: Tensor) -> None:
            self.gradient = gradient

        def wait(self) -> Tensor:
            return self.gradient

    def mutant(self: Any, part: Tensor, hop: int) -> None:
        if hop + 1 < self.context.ring.size:
            return pass_on(self, part, hop)
        part += self._exchange.wait()
        home = ring._empty_shard(self.context, 0, part, part.dtype).zero_()
        num_tokens = min(home.shape[1], part.shape[1])
        home[:, :num_tokens] = part[:, :num_tokens]
        self._exchange = Arrived(home)
        return None

    patch(ring._Gradients, "pass_on", mutant)


def a_causal_chunk_is_taken_as_full() -> None:
    for name in ("forward", "backward"):
        original = vars(AtenCpuKernel)[name]

        def mutant(self: Any, *args: Any, original: Any = original) -> Any:
            *tensors, _causal, scale = args
            return original(self, *tensors, False, scale)

        patch(AtenCpuKernel, name, mutant)


def a_hop_is_skipped() -> None:
    original = vars(Ring)["of"].__func__

    def mutant(cls: type[Ring], *args: Any) -> Ring:
        made = original(cls, *args)
        return replace(made, hops=(*made.hops[:-1], ()))

    patch(Ring, "of", classmethod(mutant))


def a_shard_is_kept() -> None:
    advance = ring._Shards.advance
    kept: list[Tensor] = []

    def mutant(self: Any) -> None:
        kept.append(self.at_hand)
        advance(self)

    patch(ring._Shards, "advance", mutant)


@pytest.mark.parametrize("mutant", [gradients_go_home_one_hop_short, a_causal_chunk_is_taken_as_full, a_hop_is_skipped])
def test_a_fault_is_caught(compare, mutant):
    result = compare("groups-near", f"{TINY} --max-tokens 64 --cp 2", mutant=mutant)
    assert not result["ok"]
    assert result["max_rel_grad_err"] > 1e-6, result["reasons"]


def test_a_third_shard_is_an_error(compare):
    result = compare("groups-near", f"{TINY} --max-tokens 64 --cp 2", mutant=a_shard_is_kept)
    assert not result["ok"]
    assert "shards of K/V held" in result["reasons"][0]


def test_command_exits_1_when_a_hop_is_corrupted(worlds, files, monkeypatch, capsys):
    setup = Setup(one_element_of_a_hop_is_off)
    monkeypatch.setattr(parity, "Runner", functools.partial(parity.Runner, setup=setup, worlds=worlds))
    argv = [files["groups-near"], *TINY.split(), "--max-tokens", "64", "--cp", "2", "--dtype", "float64", "--json"]
    try:
        assert parity.main(argv) == 1
    finally:
        worlds[2].run(restore)
    assert json.loads(capsys.readouterr().out)["max_rel_grad_err"] > 1e-6
