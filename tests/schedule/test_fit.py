"""Fitting a step into memory: what is chosen fits, costs no more than it must, and is the same wherever it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixflow.plan.cost import CostModel
from prefixflow.plan.plan import Plan, PlanConfig
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.capacity import GroupShape, find_capacity
from prefixflow.schedule.fit import Fit, Judge, MemoryChoice, fit_plan, waiting_distances
from prefixflow.schedule.memory import MemoryModel, Recompute
from prefixflow.schedule.peak import memory_curve
from prefixflow.schedule.residency import ActivationPolicy, HostLink
from prefixflow.schedule.search import rank_table
from prefixflow.testing.generate import two_level_groups
from tests.plan.groups import batch_of

SHAPE = ModelShape.from_name("tiny")
GROUPS = two_level_groups(3, 4, 60, 20, seed=1)


def model(pp: int = 1, ep: int = 1, name: str = "tiny") -> MemoryModel:
    shape = ModelShape.from_name(name)
    return MemoryModel(shape, element_bytes=4, pipeline_parallel=pp, expert_parallel=ep, fused=False)


def config(pp: int = 1, ep: int = 1) -> PlanConfig:
    return PlanConfig(128, pipeline_size=pp, data_parallel_size=ep, expert_block=ep, cost=CostModel.of_shape(SHAPE))


def peak_of(fit: Fit, memory: MemoryModel) -> int:
    """Largest over ranks, walked as a rank walks its own row."""
    largest = 0
    for data_rank in range(len(fit.plan.ranks)):
        for rank, row in enumerate(rank_table(fit.plan, data_rank).rows):
            memory_plan = fit.choice.memory_plan(fit.plan, data_rank, rank, memory, None, training=True)
            state = sum(memory.state(rank).values())
            curve = memory_curve(fit.plan, data_rank, row, memory, memory_plan=memory_plan)
            largest = max(largest, *(state + point.total_bytes for point in curve))
    return largest


@pytest.mark.parametrize("pp", [1, 2])
def test_what_is_chosen_fits_and_gets_slower_as_memory_shrinks(pp: int) -> None:
    memory = model(pp)
    free = fit_plan(GROUPS, config(pp), memory, 1 << 40)
    assert free.choice == MemoryChoice()
    assert free.plan.config.max_tokens_per_microbatch == 128
    dynamic = free.largest_bytes - memory.state_bytes
    times = [free.time]
    for share in (0.9, 0.75):
        budget = memory.state_bytes + round(share * dynamic)
        fit = fit_plan(GROUPS, config(pp), memory, budget, host=HostLink())
        assert fit.largest_bytes <= budget
        # Head rows are at most one at every position.
        assert peak_of(fit, memory) >= fit.largest_bytes
        assert fit == fit_plan(GROUPS, config(pp), memory, budget, host=HostLink())
        times.append(fit.time)
    assert times == sorted(times)


def test_a_refusal_says_by_how_much_and_what_fits() -> None:
    memory = model()
    with pytest.raises(ValueError, match="more than the budget") as caught:
        fit_plan(GROUPS, config(), memory, memory.state_bytes + 1000)
    needed = float(str(caught.value).split("What would fit: --memory-budget-gib ")[1].split(". ")[0])
    assert fit_plan(GROUPS, config(), memory, round(needed * 2**30)).largest_bytes <= needed * 2**30
    with pytest.raises(ValueError, match="Weights, gradients and optimizer alone"):
        fit_plan(GROUPS, config(), memory, memory.state_bytes - 1)


@pytest.mark.parametrize("policy", [ActivationPolicy.OFFLOAD, ActivationPolicy.RECOMPUTE])
def test_ranks_that_exchange_tokens_have_one_policy(policy: ActivationPolicy) -> None:
    """One rank's long prefix presses on memory; what its microbatch is given, the others' at its place are given too."""
    heavy = two_level_groups(1, 8, 100, 20, seed=3)
    light = [replace(t, id=f"l{t.id}", group=f"l{t.group}") for t in two_level_groups(1, 8, 40, 10, seed=4)]
    memory = model(ep=2, name="tiny-moe")
    free = fit_plan([*heavy, *light], config(ep=2), memory, 1 << 40)
    budget = memory.state_bytes + round(0.8 * (free.largest_bytes - memory.state_bytes))
    fit = fit_plan([*heavy, *light], config(ep=2), memory, budget, policies=(policy,))
    fit = fit if fit.choice.policy is policy else _forced(fit.plan, policy, [*heavy, *light], memory)
    plans = [fit.choice.memory_plan(fit.plan, rank, 0, memory, None, training=True) for rank in range(2)]
    assert plans[0].activations == plans[1].activations
    assert policy in plans[0].activations.values()


def _forced(plan: Plan, policy: ActivationPolicy, batch: list, memory: MemoryModel) -> Fit:
    fit = Judge(batch, memory).fit(plan, MemoryChoice(policy))
    assert fit is not None
    return fit


def test_fewer_dormant_microbatches_give_up_less() -> None:
    memory = model(2)
    judge = Judge(GROUPS, memory)
    plan = fit_plan(GROUPS, config(2), memory, 1 << 40).plan
    distances = judge.distances(plan)
    assert distances == sorted(set(distances), reverse=True)
    fits = [judge.fit(plan, MemoryChoice(ActivationPolicy.RECOMPUTE, distance)) for distance in distances]
    row = rank_table(plan, 0).rows[0]
    waiting = waiting_distances(plan, row, 0)
    least = MemoryChoice(ActivationPolicy.RECOMPUTE, min(waiting.values()))
    most = MemoryChoice(ActivationPolicy.RECOMPUTE, max(waiting.values()))
    assert least.activations(plan, row, 0).keys() == waiting.keys()
    assert most.activations(plan, row, 0).keys() == {k for k, v in waiting.items() if v == max(waiting.values())}
    times = [fit.time for fit in fits if fit is not None]
    assert times == sorted(times)


def test_capacity_is_at_the_frontier() -> None:
    """The longest prefix fits and one step more does not; a member cannot begin as another's copy."""
    memory = model()
    group = GroupShape.typical(batch_of([1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 7, 7]))
    assert group == GroupShape(size=3, prefix_tokens=3, suffix_tokens=2)
    shape = GroupShape(4, 100, 30)
    budget = memory.state_bytes + (8 << 20)
    for found in find_capacity(shape, config(), memory, budget):
        assert found.prefix_tokens is not None
        smaller = find_capacity(shape, config(), memory, budget // 2) if found.way.recompute is Recompute.NONE else ()
        for other in smaller:
            assert other.way != found.way or (other.prefix_tokens or 0) <= found.prefix_tokens
