"""Predicted against measured peak memory, by pipeline stage and phase, in cells that were fixed before the model was fitted."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

import pytest

from megatron.prefixflow.arguments import parallel_layout, parse_arguments
from prefixflow.runtime.world import Worlds
from prefixflow.schedule.memory import Holder, Phase
from prefixflow.testing.generate import Style, stepwise_chains, trees, two_level_groups
from prefixflow.trajectories import Trajectory

TIMEOUT_S = 300.0
TOLERANCE = 0.10
STYLE = Style(vocab_size=500)


def _group(prefix: int, suffix: int, size: int = 8, groups: int = 1) -> tuple[Trajectory, ...]:
    return two_level_groups(groups, size, prefix, suffix, seed=1, style=STYLE)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is run: a batch and a command line. slow: not in the ordinary suite. to_host: something must go there."""

    name: str
    trajectories: tuple[Trajectory, ...]
    command: str
    slow: bool = False
    to_host: bool = False


CELLS = (
    Cell("group", _group(240, 48), "--model tiny --max-tokens 256"),
    Cell("dense, selective", _group(112, 32), "--model tiny --max-tokens 300 --prefix-reuse off --recompute selective"),
    Cell("head, full", _group(300, 90), "--model small --max-tokens 320 --recompute full", slow=True),
    Cell(
        "tree, bfloat16",
        trees(1, 4, 2, (20, 40), seed=2, style=STYLE),
        "--model tiny --max-tokens 128 --dtype bfloat16",
    ),
    Cell("stages", _group(400, 80, 4, 2), "--model small --max-tokens 256 --pp 2", slow=True),
    Cell(
        "tensor and sequence parallel, full",
        stepwise_chains(2, 5, (60, 90), (20, 40), seed=3, style=STYLE),
        "--model tiny --max-tokens 128 --tp 2 --sequence-parallel --recompute full",
    ),
    Cell("context parallel", _group(251, 37), "--model tiny --max-tokens 256 --cp 2"),
    Cell("experts", _group(120, 40, 4, 4), "--model tiny-moe --max-tokens 160 --ep 2", slow=True),
    Cell("offload", _group(300, 60), "--model small --max-tokens 320 --prefix-memory offload", slow=True),
    Cell(
        "stages, recompute",
        _group(240, 40, 4, 3),
        "--model tiny --max-tokens 128 --pp 2 --prefix-memory recompute",
    ),
    Cell("cache budget", _group(240, 40, 6, 3), "--model tiny --max-tokens 128 --pp 2 --kv-budget-gib 0.001"),
    Cell(
        "streams and evictions",
        _group(240, 40, 6, 3),
        "--model tiny --num-layers 8 --max-tokens 128 --pp 2 --kv-budget-gib 0.00062",
        to_host=True,
    ),
    Cell(
        "evictions",
        _group(240, 40, 6, 3),
        "--model tiny --max-tokens 128 --pp 2 --kv-budget-gib 0.00046",
        to_host=True,
    ),
    Cell(
        "logits in chunks",
        _group(8, 140),
        "--model tiny --num-layers 1 --vocab-size 6000 --max-tokens 640 --prefix-reuse off",
    ),
)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Measured and predicted bytes of one rank in each phase, beyond the state; measured and predicted state."""

    measured: dict[Phase, int]
    predicted: dict[Phase, int]
    measured_state: int
    predicted_state: int
    measured_holders: dict[Holder, int]
    predicted_holders: dict[Holder, int]
    host_bytes: int


def measure(cell: Cell) -> RankMemory:
    """One training pass of a cell on this rank, after one that pays for what is made once."""
    from megatron.prefixflow.bench import Bench, Job
    from megatron.prefixflow.peaks import measured_memory, predicted_memory, state_bytes

    bench = Bench(Job(tuple(shlex.split(cell.command)), None, (), 1, 1))
    reuse = bench.args.prefix_reuse if bench.args.was_given("prefix_reuse") else "on"
    plan = bench.plan(cell.trajectories, reuse)
    bench.step(plan, cell.trajectories)
    with measured_memory(bench.runner, plan) as measured:
        bench.step(plan, cell.trajectories)
    groups, settings = bench.groups, bench.runner.memory
    assert settings is not None
    curve = predicted_memory(settings, plan, cell.trajectories, groups.data_rank, groups.pipeline_rank)
    state = settings.model.state(groups.pipeline_rank)
    return RankMemory(
        measured=measured.phases,
        predicted={phase: max(p.total_bytes for p in curve if p.phase is phase) for phase in measured.phases},
        measured_state=state_bytes(bench.ddp),
        predicted_state=state[Holder.WEIGHTS] + state[Holder.GRADIENTS],
        measured_holders=measured.by_holder,
        predicted_holders=max(curve, key=lambda p: p.total_bytes).by_holder,
        host_bytes=max(p.host for p in curve),
    )


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in CELLS]
)
def test_prediction_is_near_the_measurement(cell: Cell, worlds: Worlds) -> None:
    """On every pipeline stage: of the whole step and of each phase."""
    layout = parallel_layout(parse_arguments(shlex.split(cell.command)))
    ranks = worlds[layout.world_size].run(measure, cell, timeout_s=TIMEOUT_S)
    assert any(memory.host_bytes for memory in ranks) or not cell.to_host
    for rank, memory in enumerate(ranks):
        peak = max(memory.measured.values())
        assert max(memory.predicted.values()) == pytest.approx(peak, rel=TOLERANCE), f"rank {rank}"
        for phase, num_bytes in memory.measured.items():
            assert memory.predicted[phase] == pytest.approx(num_bytes, rel=TOLERANCE), f"rank {rank}, phase {phase}"
        assert memory.predicted_state == pytest.approx(memory.measured_state, rel=0.01)
        for holder in (Holder.KEYS_VALUES, Holder.KV_GRADIENTS):
            measured = memory.measured_holders.get(holder, 0)
            assert memory.predicted_holders[holder] == pytest.approx(measured, abs=0.03 * peak), (
                f"rank {rank}, {holder}"
            )


def fitted(trajectories: tuple[Trajectory, ...], command: str) -> tuple[str, int, int]:
    """What a rank chose to stay within the budget, the budget, and what it then took."""
    from megatron.prefixflow.bench import Bench, Job
    from megatron.prefixflow.peaks import measured_memory

    bench = Bench(Job(tuple(shlex.split(command)), None, (), 1, 1))
    plan = bench.plan(trajectories, "on")
    bench.step(plan, trajectories)
    settings = bench.runner.memory
    assert settings is not None
    assert settings.budget_bytes is not None
    with measured_memory(bench.runner, plan) as measured:
        bench.step(plan, trajectories)
    state = sum(settings.model.state(bench.groups.pipeline_rank).values())
    return f"{plan.digest} {settings.choice}", settings.budget_bytes, state + measured.peak_bytes


def test_ranks_that_exchange_tokens_fit_a_budget_together(worlds: Worlds) -> None:
    """One rank's group is larger: both take the same choice, run it, and stay near what was predicted."""
    batch = (*_group(120, 40, 6), *(replace(t, id=f"b{t.id}", group="b") for t in _group(50, 20, 6)))
    command = (
        "--model tiny-moe --num-layers 2 --max-tokens 160 --ep 2 --prefix-memory recompute --memory-budget-gib 0.025"
    )
    results = worlds[2].run(fitted, batch, command, timeout_s=TIMEOUT_S)
    choices = {choice for choice, _, _ in results}
    assert len(choices) == 1
    assert "RECOMPUTE" in choices.pop()
    for _, budget, taken in results:
        assert taken <= (1 + TOLERANCE) * budget
