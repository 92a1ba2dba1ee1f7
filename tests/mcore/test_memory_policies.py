"""Activations that wait for their backward elsewhere, or are made again: the gradients are the same, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from megatron.prefixflow.bench import Bench, Cell, Job
from megatron.prefixflow.parity import Case, Runner
from megatron.prefixflow.stage import StageRunner
from prefixflow.cli import main as plan_main
from prefixflow.plan.shapes import ModelShape
from prefixflow.runtime.attention.function import Operation
from prefixflow.runtime.host import HostArena
from prefixflow.runtime.memory import LiveBytes
from prefixflow.runtime.offload import SavedTensors
from prefixflow.runtime.world import Worlds
from tests.mcore.faults import Setup, patch, restore
from tests.mcore.parity_files import write_small_files

FLOAT64_LIMIT = 1e-9
FLOAT64_LIMIT_MOE = 1e-6
TIMEOUT_S = 300.0

TINY = "--prefix-reuse on --dtype float64 --model tiny --num-layers 2"
EXPERTS = (
    "--prefix-reuse on --dtype float64 --model tiny-moe --num-layers 2 --max-tokens 16 --moe-z-loss-coeff 0.01 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1"
)
EXPERT_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_small_files(tmp_path_factory.mktemp("trajectories"))


@pytest.fixture(scope="module")
def runner(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One runner, so that references are computed once; its processes are left unpatched."""
    with Runner(tmp_path_factory.mktemp("parity"), TIMEOUT_S, worlds=worlds) as kept:
        yield kept
        for size in (1, 2):
            worlds[size].run(restore)


def run(runner: Runner, file: str, text: str, mutant: Callable[[], None] | None = None) -> dict[str, Any]:
    runner.setup = Setup(mutant)
    return runner.run(Case(file, tuple(text.split())))


def assert_exact(result: dict[str, Any], text: str, limit: float = FLOAT64_LIMIT) -> None:
    assert result["ok"], result["reasons"]
    assert result["max_rel_grad_err"] < limit
    assert result["max_logprob_err"] < limit
    assert result["context_bytes"] == result["context_bytes_planned"]
    assert (result["host_bytes"] > 0) == ("--prefix-memory offload" in text)
    assert (result["recomputed_microbatches"] > 0) == ("--prefix-memory recompute" in text)


ORDINARY = [
    ("groups", "--max-tokens 16 --prefix-memory offload --recompute selective"),
    ("groups", "--max-tokens 16 --prefix-memory auto"),
    ("chains", "--max-tokens 32 --prefix-memory recompute"),
    ("trees", "--max-tokens 16 --prefix-memory offload"),
    ("trees", "--max-tokens 16 --prefix-memory recompute --recompute full"),
    ("groups", "--max-tokens 16 --pp 2 --prefix-memory recompute"),
    ("trees", "--max-tokens 16 --pp 2 --prefix-memory offload --recompute full"),
    ("groups", "--max-tokens 16 --cp 2 --prefix-memory recompute --recompute full"),
    ("groups", "--max-tokens 16 --cp 2 --prefix-memory recompute --context-parallel-kv ring"),
]
LAYOUTS = (
    "",
    "--pp 2",
    "--pp 2 --vpp 2 --num-layers 4",
    "--tp 2 --sequence-parallel",
    "--cp 2",
    "--dp 2 --overlap-grad-reduce",
)
GRID = [
    (file, f"--max-tokens 16 {layout} --prefix-memory {policy} --recompute {recompute}")
    for file in ("groups", "chains", "trees")
    for layout in LAYOUTS
    for policy in ("offload", "recompute")
    for recompute in ("none", "full")
]


@pytest.mark.parametrize(("file", "text"), [*ORDINARY, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in GRID)])
def test_float64(runner, files, file, text, tmp_path, capsys):
    result = run(runner, files[file], f"{TINY} {text}")
    assert_exact(result, text)
    if "--cp" in text:
        model = tmp_path / "model.json"
        model.write_text(json.dumps(asdict(replace(ModelShape.from_name("tiny"), num_layers=2))))
        argv = [*text.split(), "--model", str(model), "--dtype", "float64", "--device", "cpu", "--json"]
        capsys.readouterr()
        assert plan_main(["plan", files[file], *argv]) == 0
        assert json.loads(capsys.readouterr().out)["context_bytes"] == result["context_bytes"]


@pytest.mark.parametrize(
    "text",
    [
        f"{EXPERT_BIAS} --prefix-memory recompute --recompute full",
        *(
            pytest.param(f"{more} --prefix-memory {policy}", marks=pytest.mark.slow)
            for more in (
                "",
                EXPERT_BIAS,
                "--ep 2",
                "--ep 2 --recompute full",
                "--ep 2 --pp 2",
                "--routing-replay record",
            )
            for policy in ("offload", "recompute")
        ),
    ],
)
def test_experts(runner, files, text):
    """Losses and counts of the routers would change if a recomputation left any."""
    result = run(runner, files["trees"], f"{EXPERTS} {text}")
    assert_exact(result, text, FLOAT64_LIMIT_MOE)
    assert result["router_loss_rel_err"] < FLOAT64_LIMIT_MOE
    assert result["max_expert_count_err"] == 0


def test_both_budgets(runner, files):
    """K/V are worked on layer by layer from the host while the activations of their writers are there, too."""
    text = "--max-tokens 32 --num-layers 4 --prefix-memory offload --kv-budget-gib 5e-4"
    result = run(runner, files["chains"], f"{TINY} {text}")
    assert_exact(result, text)
    assert result["streamed_parts"] + result["evictions"] > 0


# Faults.


def values_are_lost_on_the_host() -> None:
    take = HostArena.take
    patch(HostArena, "take", lambda self, handle: take(self, handle).zero_())


def views_come_back_dense() -> None:
    """Of a storage that operations saved a part of each row of."""
    unpack = SavedTensors._unpack

    def mutant(self, saved):
        view = unpack(self, saved)
        return view.as_strided(view.shape, torch.empty(view.shape, device="meta").stride())

    patch(SavedTensors, "_unpack", mutant)


def stage_input_is_lost() -> None:
    recompute = StageRunner._recompute

    def mutant(self, m, alive):
        if alive.received is not None:
            alive.received = alive.received * 0
        return recompute(self, m, alive)

    patch(StageRunner, "_recompute", mutant)


def rows_get_other_hidden_states() -> None:
    recompute = StageRunner._recompute

    def mutant(self, m, alive):
        graph = recompute(self, m, alive)
        if alive.scored is not None:
            alive.scored.rows.put_hidden(alive.scored.rows.take_hidden().flip(0))
        return graph

    patch(StageRunner, "_recompute", mutant)


def recomputation_is_a_forward() -> None:
    recompute = StageRunner._recompute

    def mutant(self, m, alive):
        alive.context.operation = Operation.FORWARD
        graph = recompute(self, m, alive)
        alive.context.operation = Operation.BACKWARD
        return graph

    patch(StageRunner, "_recompute", mutant)


def recomputation_is_scored() -> None:
    recompute = StageRunner._recompute

    def mutant(self, m, alive):
        if alive.scored is not None:
            nothing = self.model.output_layer.weight.new_zeros(alive.scored.entry_index.shape)
            self._head.objective.record(alive.scored.entry_index, nothing, None)
        return recompute(self, m, alive)

    patch(StageRunner, "_recompute", mutant)


def experts_are_counted_again() -> None:
    routed = StageRunner._routed
    patch(StageRunner, "_routed", lambda self, routing, operation: routed(self, routing, Operation.FORWARD))


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        (values_are_lost_on_the_host, "--prefix-memory offload"),
        (views_come_back_dense, "--prefix-memory offload"),
        (stage_input_is_lost, "--prefix-memory recompute --pp 2"),
        (rows_get_other_hidden_states, "--prefix-memory recompute"),
    ],
)
def test_mutant_is_caught(runner, files, mutant, text):
    result = run(runner, files["trees"], f"{TINY} --max-tokens 16 {text}", mutant)
    assert not result["ok"]
    assert result["max_rel_grad_err"] > 1e-6, result["reasons"]


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (recomputation_is_a_forward, "must run with operation BACKWARD so that it stores nothing"),
        pytest.param(recomputation_is_scored, "an entry was scored twice", marks=pytest.mark.slow),
    ],
)
def test_guard_stops_mutant(runner, files, mutant, words):
    result = run(runner, files["trees"], f"{TINY} --max-tokens 16 --prefix-memory recompute", mutant)
    assert not result["ok"]
    assert words in result["reasons"][0]


@pytest.mark.slow
def test_experts_counted_again_are_caught(runner, files):
    text = f"{EXPERTS} {EXPERT_BIAS} --prefix-memory recompute"
    assert not run(runner, files["trees"], text, experts_are_counted_again)["ok"]


# Nothing leaks.


def live_bytes(text: str, steps: tuple[int, ...]) -> list[tuple[int, int]]:
    """(bytes on the device, bytes on the host) after each of `steps`."""
    bench = Bench(Job(tuple(text.split()), None, (), 1, 1))
    trajectories = Cell(0.8, 4, 40, 1).trajectories(bench.args.vocab_size, seed=1)
    plan = bench.plan(trajectories, "on")
    left = []
    with LiveBytes() as live:
        for step in range(1, max(steps) + 1):
            bench.step(plan, trajectories)
            if step in steps:
                left.append((live.now, bench.runner.arena.num_bytes))
    return left


@pytest.mark.parametrize(
    "policy",
    [
        "keep",
        "offload",
        "recompute",
        pytest.param("offload --num-layers 4 --kv-budget-gib 8e-5", marks=pytest.mark.slow),
    ],
)
def test_nothing_leaks(worlds, policy):
    text = f"--model tiny --num-layers 2 --max-tokens 40 --prefix-memory {policy}"
    (after_2, after_20), *_ = worlds[1].run(live_bytes, text, (2, 20))
    assert after_2 == after_20
    assert after_2[1] == 0
