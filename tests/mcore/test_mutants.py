"""Faults that parity must catch: each patches a shipped function in the processes of the shipped path, and is put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.prefixflow import parity, stage, step
from megatron.prefixflow.parity import Case, Runner
from megatron.prefixflow.positions import RotaryTable
from megatron.prefixflow.spec import SequenceParallelNorm
from megatron.prefixflow.stage import LanguageModelHead, StageRunner
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.slices import LocalSlice
from prefixflow.ranges import Range
from prefixflow.runtime.attention.function import Inject, Operation, Root
from prefixflow.runtime.attention.kernels import AtenCpuKernel
from prefixflow.runtime.cache import KVCache
from prefixflow.runtime.objective import Entries, ScoredEntries, logical_normalizer
from prefixflow.runtime.world import Worlds
from prefixflow.schedule.residency import Part
from tests.mcore.faults import Setup, on_restore, patch, restore
from tests.mcore.parity_files import write_files

TIMEOUT_S = 300.0
FULL_STEP = "--model tiny --num-layers 2 --dtype float64 --max-tokens 32 --prefix-reuse on"

# Positions, masks and labels.


def suffix_positions_off_by_one() -> None:
    rows = RotaryTable.rows
    patch(RotaryTable, "rows", lambda self, p, n: rows(self, p + int(p.min() > 0), n + 1))


def positions_restart_at_0() -> None:
    rows = RotaryTable.rows
    patch(RotaryTable, "rows", lambda self, p, n: rows(self, p - p.min(), n))


def suffixes_see_their_siblings() -> None:
    """One causal mask over the packed row."""
    context = StageRunner._context

    def mutant(self, microbatch, arrays):
        whole = Range(0, microbatch.num_physical_tokens)
        return context(self, replace(microbatch, local=(LocalSlice(whole, whole, causal=True),)), arrays)

    patch(StageRunner, "_context", mutant)


def ancestors_are_not_seen() -> None:
    context = StageRunner._context
    patch(StageRunner, "_context", lambda self, m, arrays: replace_cached(context(self, m, arrays), ()))


def prefix_is_attended_twice() -> None:
    context = StageRunner._context
    patch(StageRunner, "_context", lambda self, m, arrays: replace_cached(context(self, m, arrays), m.cached * 2))


def replace_cached(context: Any, cached: Any) -> Any:
    context.cached = cached
    context.full = (*(s for s in context.local if not s.causal), *cached)
    return context


def labels_rolled_over_the_packed_row() -> None:
    arrays = stage.microbatch_arrays

    def mutant(*args):
        made = arrays(*args)
        following = (made.row_index + 1) % len(made.tokens)
        return replace(made, row_label=made.tokens[following])

    patch(stage, "microbatch_arrays", mutant)


def temperature_is_dropped() -> None:
    arrays = stage.microbatch_arrays

    def mutant(*args):
        made = arrays(*args)
        return replace(made, row_temperature=made.row_temperature**0)

    patch(stage, "microbatch_arrays", mutant)


# K/V and their gradients.


def key_gradients_are_dropped() -> None:
    add = KVCache.add_gradient
    patch(KVCache, "add_gradient", lambda self, layer, blocks, dk, dv: add(self, layer, blocks, dk * 0, dv))


def value_gradients_are_dropped() -> None:
    add = KVCache.add_gradient
    patch(KVCache, "add_gradient", lambda self, layer, blocks, dk, dv: add(self, layer, blocks, dk, dv * 0))


def prefix_gradients_are_counted_twice() -> None:
    take = KVCache.take_gradient

    def mutant(self, layer, block):
        taken = take(self, layer, block)
        return None if taken is None else tuple(2 * gradient for gradient in taken)

    patch(KVCache, "take_gradient", mutant)


def last_reader_wins() -> None:
    add = KVCache._add

    def mutant(self, layer, block, dk, dv):
        self.take_gradient(layer, block)
        add(self, layer, block, dk, dv)

    patch(KVCache, "_add", mutant)


def last_layer_is_not_reached() -> None:
    apply: Any = Root.apply
    on_restore(functools.partial(delattr, Root, "apply"))
    mutant: Any = staticmethod(lambda q, k, v: apply(q, k.detach(), v.detach()))
    Root.apply = mutant  # type: ignore[method-assign]


def last_layer_is_lost_silently() -> None:
    """As above, with the guard that notices it gone."""
    last_layer_is_not_reached()

    def close(self, block):
        self._entries.pop((block, Part.GRADIENTS), None)

    patch(KVCache, "close", close)


def slices_keep_their_own_logsumexp() -> None:
    backward = AtenCpuKernel.backward

    def mutant(self, dout, q, k, v, out, lse, causal, scale):
        own = self.forward(q, k, v, causal, scale)[1]
        return backward(self, dout, q, k, v, out, own, causal, scale)

    patch(AtenCpuKernel, "backward", mutant)


def recomputation_stores_again() -> None:
    forward = Inject.forward

    def mutant(ctx, k, v, context, layer):
        operation, context.operation = context.operation, Operation.FORWARD
        made = forward(ctx, k, v, context, layer)
        context.operation = operation
        return made

    patch(Inject, "forward", staticmethod(mutant))


# Loss and reduction.


def loss_is_divided_by_the_number_of_microbatches() -> None:
    run = StepRunner._run

    def mutant(self, plan, trajectories, objective, *, training, **more):
        if training:
            number = len(plan.ranks[self.groups.data_rank])
            counts = objective._normalizer
            objective._normalizer = replace(counts, num_trajectories=counts.num_trajectories * number)
        run(self, plan, trajectories, objective, training=training, **more)

    patch(StepRunner, "_run", mutant)


def counts_are_of_this_rank_only() -> None:
    def mutant(trajectories, chosen, device, max_tokens=None):
        mine = [trajectories[i] for i in chosen]
        return logical_normalizer(mine, range(len(mine)), device, max_tokens)

    patch(step, "logical_normalizer", mutant)


def old_logprobs_of_another_trajectory() -> None:
    gather = Entries.gather

    def mutant(self, trajectories, name):
        if name == "old_logprobs":
            pairs = zip(trajectories, [*trajectories[1:], trajectories[0]], strict=True)
            trajectories = [replace(a, old_logprobs=np.resize(b.old_logprobs, len(a))) for a, b in pairs]
        return gather(self, trajectories, name)

    patch(Entries, "gather", mutant)


def only_one_branch_of_a_shared_row_counts() -> None:
    gradients = ScoredEntries.row_gradients

    def mutant(self, entry_index, entry_row, num_rows):
        made = gradients(self, entry_index, entry_row, num_rows)
        made.logprobs[entry_row] = self._grad_logprobs[entry_index]
        return made

    patch(ScoredEntries, "row_gradients", mutant)


def gradients_are_reduced_twice() -> None:
    reduce = parity.reduce_gradients
    patch(parity, "reduce_gradients", lambda model: (reduce(model), reduce(model)))


def replicated_norms_are_not_reduced() -> None:
    new = SequenceParallelNorm.__new__

    def mutant(cls, config, hidden_size, eps=1e-5, **more):
        norm: Any = new(cls, config, hidden_size, eps, **more)
        for parameter in norm.parameters():
            parameter.sequence_parallel = False
        return norm

    patch(SequenceParallelNorm, "__new__", staticmethod(mutant))


def weights_of_the_first_step_stay() -> None:
    """State left over from the first step: only the second can show it."""
    shard = LanguageModelHead._shard
    first: dict[torch.Size, torch.Tensor] = {}

    def mutant(self):
        made = shard(self)
        return replace(made, weight=first.setdefault(made.weight.shape, made.weight.clone()))

    patch(LanguageModelHead, "_shard", mutant)


MUTANTS: dict[Callable[[], None], str] = {
    suffix_positions_off_by_one: "",
    positions_restart_at_0: "",
    suffixes_see_their_siblings: "",
    ancestors_are_not_seen: "",
    prefix_is_attended_twice: "",
    labels_rolled_over_the_packed_row: "",
    temperature_is_dropped: "",
    key_gradients_are_dropped: "",
    value_gradients_are_dropped: "",
    prefix_gradients_are_counted_twice: "",
    last_reader_wins: "",
    last_layer_is_lost_silently: "",
    slices_keep_their_own_logsumexp: "",
    loss_is_divided_by_the_number_of_microbatches: "",
    old_logprobs_of_another_trajectory: "",
    only_one_branch_of_a_shared_row_counts: "",
    weights_of_the_first_step_stay: "",
    counts_are_of_this_rank_only: "--dp 2",
    gradients_are_reduced_twice: "--dp 2",
    replicated_norms_are_not_reduced: "--tp 2 --sequence-parallel",
}
"""Faults that change numbers, and the layout that each needs."""

GUARDED: dict[Callable[[], None], tuple[str, str]] = {
    last_layer_is_not_reached: ("", "a backward did not reach the K/V of every layer"),
    recomputation_stores_again: ("--recompute full", "a recomputation must run with operation BACKWARD"),
}
"""Faults that a guard stops before a number is wrong, their arguments, and what the guard says."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_files(tmp_path_factory.mktemp("trajectories"))["groups-and-trees"]


@pytest.fixture(scope="module")
def runner(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """One runner for all mutants, so that the reference is computed once; its processes are left unpatched."""
    with Runner(tmp_path_factory.mktemp("parity"), TIMEOUT_S, worlds=worlds) as kept:
        yield kept
        for size in (1, 2):
            worlds[size].run(restore)


def run(runner: Runner, file: str, mutant: Callable[[], None] | None, more: str) -> dict[str, Any]:
    runner.setup = Setup(mutant)
    return runner.run(Case(file, tuple(f"{FULL_STEP} {more}".split())))


@pytest.mark.parametrize("more", ["", "--recompute full", "--dp 2", "--tp 2 --sequence-parallel"])
def test_no_mutant(runner, file, more):
    result = run(runner, file, None, more)
    assert result["ok"], result["reasons"]
    assert result["max_rel_grad_err"] < 1e-9
    assert result["microbatches"] > result["world"]


@pytest.mark.parametrize(("mutant", "more"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_mutant_is_caught(runner, file, mutant, more):
    result = run(runner, file, mutant, more)
    assert not result["ok"]
    assert result["max_rel_grad_err"] > 1e-6, result["reasons"]
    assert result["first_parameter_differing"]
    assert (result["worst_step"] == 1) >= (mutant is weights_of_the_first_step_stay)


@pytest.mark.parametrize(("mutant", "case"), GUARDED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_guard_stops_mutant(runner, file, mutant, case):
    more, words = case
    result = run(runner, file, mutant, more)
    assert not result["ok"]
    assert "the run broke off" in result["reasons"][0]
    assert words in result["reasons"][0]


def test_mutants_are_put_back(runner, file):
    assert run(runner, file, None, "")["ok"]


@pytest.mark.parametrize("mutant", [key_gradients_are_dropped, last_layer_is_not_reached])
def test_command_exits_1(file, mutant, monkeypatch, capsys):
    monkeypatch.setattr(parity, "Runner", functools.partial(Runner, setup=Setup(mutant)))
    assert parity.main([file, *FULL_STEP.split()]) == 1
    assert "FAILED" in capsys.readouterr().out
