"""What it costs in memory that a loss is formed from several trajectories together (docs/schedule.md, "Loss calls").

    python benchmarks/loss_calls.py [--model llama3-8b] [--tp 8]

16 groups of 8 trajectories, prompts of 3,072 tokens and responses of 1,024, in loss calls of 8 trajectories. Predicted: lead in
microbatches; bytes on the pipeline rank that needs most, and time relative to losses of single trajectories, with all kept on the
device and with dormant activations computed again.
"""

from __future__ import annotations

import argparse

import numpy as np

from prefixflow import PlanConfig
from prefixflow.plan.cost import CostModel
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.fit import GIB, Judge, MemoryChoice
from prefixflow.schedule.memory import MemoryModel
from prefixflow.schedule.order import backward_order, forwards_needed, lead
from prefixflow.schedule.residency import ActivationPolicy
from prefixflow.schedule.search import max_makespan, plan_pipeline, rank_table
from prefixflow.testing.generate import Style, two_level_groups

NUM_GROUPS, GROUP_SIZE = 16, 8
PROMPT, RESPONSE = (3072, 3072), (1024, 1024)
TOKEN_BUDGET = 8192


def calls(kind: str) -> list[int] | None:
    """Loss call of each trajectory; as many calls as groups, of as many trajectories as a group has."""
    trajectory = np.arange(NUM_GROUPS * GROUP_SIZE)
    if kind == "each by itself":
        return None
    if kind == "the groups":
        return (trajectory // GROUP_SIZE).tolist()
    if kind == "over 2 groups":
        return (trajectory // (2 * GROUP_SIZE) * 2 + trajectory % 2).tolist()
    return np.random.default_rng(0).permutation(trajectory // GROUP_SIZE).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--tp", type=int, default=8)
    options = parser.parse_args()
    shape = ModelShape.from_name(options.model)
    trajectories = two_level_groups(NUM_GROUPS, GROUP_SIZE, PROMPT, RESPONSE, style=Style(vocab_size=32_000))
    print(f"{options.model}, tp {options.tp}; a loss call is of, or is spread:")
    for pipeline_size in (1, 4):
        config = PlanConfig(TOKEN_BUDGET, pipeline_size=pipeline_size, cost=CostModel.of_shape(shape))
        memory = MemoryModel(
            shape, tensor_parallel=options.tp, pipeline_parallel=pipeline_size, sequence_parallel=options.tp > 1
        )
        print(f"state {memory.state_bytes / GIB:.1f} GiB")
        fastest = max_makespan(plan_pipeline(trajectories, config), trajectories)
        for kind in ("each by itself", "the groups", "over 2 groups", "over all groups"):
            plan = plan_pipeline(trajectories, config, joint=calls(kind))
            table = rank_table(plan, 0)
            alive = lead(forwards_needed(backward_order(table.reads, table.after), table.after))
            judge = Judge(trajectories, memory)
            shown = []
            for policy in (ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE):
                fit = judge.fit(plan, MemoryChoice(policy))
                assert fit is not None
                shown.append(f"{policy.value} {fit.largest_bytes / GIB:6.1f} GiB in {fit.time / fastest:.2f}")
            print(f"pp {pipeline_size}, {kind:<15} lead {alive:>3} of {plan.num_microbatches}, {', '.join(shown)}")


if __name__ == "__main__":
    main()
