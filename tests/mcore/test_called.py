"""A loss that is called once for each of a framework's microbatches, which mix groups: against the independent reference."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.prefixflow.groups import planning_group
from megatron.prefixflow.planning import agree
from megatron.prefixflow.routing import RouteStore
from megatron.prefixflow.session import start_session
from megatron.prefixflow.step import StepRunner
from prefixflow.plan.layout import ParallelLayout
from prefixflow.plan.plan import Plan, PlanConfig
from prefixflow.runtime.called import CalledObjective
from prefixflow.runtime.loss import LossConfig
from prefixflow.runtime.world import Worlds
from prefixflow.schedule import search
from prefixflow.trajectories import Trajectory
from tests.mcore.faults import patch
from tests.runtime.own_loss import own_loss

NUM_CALLS = 3
"""On each data-parallel rank."""
TINY = "--model tiny --max-tokens 32 --kl-coef 0.1"
CASES = [
    # Every microbatch waits for the last forward, those with rows too.
    ("mixed-near", f"{TINY} --entropy-coef 0.05 --policy-loss gspo --prefix-memory recompute", 1e-9),
    ("groups-near", f"{TINY} --pp 2 --memory-budget-gib 1", 1e-9),
    ("deep-near", f"{TINY} --pp 2 --vpp 2 --entropy-coef 0.05 --prefix-memory offload", 1e-9),
    # Megatron rounds router scores to float32.
    ("groups-near", "--model tiny-moe --num-layers 2 --max-tokens 32 --ep 2", 1e-6),
]


def plan_calls(self: StepRunner, trajectories: Sequence[Trajectory], config: PlanConfig, *_: Any, **__: Any) -> Plan:
    """Deals trajectories to ranks and calls like cards, so that every call has some of every group."""
    num_ranks = config.data_parallel_size
    placement = [i % num_ranks for i in range(len(trajectories))]
    joint = [placement[i] + num_ranks * (i // num_ranks % NUM_CALLS) for i in range(len(trajectories))]
    group = planning_group(self.groups, config.expert_block)
    return self.plan_calls(trajectories, config, placement=placement, joint=joint, group=group)


def run_called(
    self: StepRunner, plan: Plan, trajectories: Sequence[Trajectory], loss: LossConfig, *, routes: RouteStore
) -> CalledObjective:
    assert plan.placement is not None
    assert plan.joint is not None
    called: dict[int, float] = {}
    own = own_loss(trajectories, plan.joint, loss)

    def call(number: int, *scores: Any) -> Any:
        assert number not in called, "a call was made twice"
        value = own(number, *scores)
        called[number] = float(value.detach())
        return value

    chosen = [i for i, rank in enumerate(plan.placement) if rank == self.groups.data_rank]
    objective: Any = CalledObjective(
        trajectories,
        chosen,
        plan.joint,
        call,
        vocab_size=self.vocab_size,
        dtype=self.dtype,
        device=self.device,
        needs_entropy=loss.needs_entropy,
    )
    self.run(plan, trajectories, objective, training=True, routes=routes)
    assert len(called) == (NUM_CALLS if self.has_head else 0)
    objective.terms = SimpleNamespace(loss=sum(called.values()))
    return objective


def the_loss_is_called() -> None:
    patch(StepRunner, "plan", plan_calls)
    patch(StepRunner, "forward_backward", run_called)


def backwards_wait_for_no_call() -> None:
    the_loss_is_called()
    patch(search, "block_after", lambda plan, rank: ())


@pytest.mark.parametrize(("file", "text", "limit"), CASES)
def test_gradients_of_called_losses(compare: Any, file: str, text: str, limit: float) -> None:
    result = compare(file, text, mutant=the_loss_is_called)
    assert result["ok"], result["reasons"]
    assert result["max_rel_grad_err"] < limit
    assert result["loss_rel_err"] < limit
    assert result["logical_tokens"] > result["computed_tokens"]
    if "recompute" in text:
        assert result["recomputed_microbatches"] == result["microbatches"]
    if "offload" in text:
        assert result["host_bytes"] > 0


def agreements() -> tuple[bool, str]:
    """Whether each rank may have a plan of its own where it is by itself, and what it gets where two run one together."""
    groups = start_session(ParallelLayout(dp=2), seed=1)
    agree(f"plan {groups.data_rank}", planning_group(groups, 1))
    try:
        agree(f"plan {groups.data_rank}", planning_group(groups, 2))
    except RuntimeError as error:
        return dist.get_rank() == groups.data_rank, str(error)
    return False, ""


def test_ranks_agree_with_those_that_run_their_plan_only(worlds: Worlds) -> None:
    for is_its_rank, error in worlds[2].run(agreements, timeout_s=60):
        assert is_its_rank
        assert "different plans (digests by rank: ['plan 0', 'plan 1'])" in error


def test_a_backward_before_its_call_is_scored_is_our_own_error(compare: Any) -> None:
    result = compare(*CASES[0][:2], mutant=backwards_wait_for_no_call)
    assert not result["ok"]
    assert "a loss was called before all of its trajectories were scored" in str(result["reasons"])
