"""Seconds of planning against the number of trajectories, and what a batch with nothing to share pays.

    python benchmarks/planning_curve.py [--write]

Step-wise samples of agent conversations, 4,000 tokens on average, 20 to a conversation. CPU seconds of this process,
the least of several runs. `--write` appends a dated line to benchmarks/planning.md.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from pathlib import Path

from prefixflow import PlanConfig, PrefixReuse, build_plan
from prefixflow.plan.cost import CostModel
from prefixflow.plan.shapes import ModelShape
from prefixflow.testing.generate import Style, stepwise_chains, two_level_groups
from prefixflow.trajectories import Trajectory

RESULTS = Path(__file__).with_name("planning.md")
SIZES = (1_000, 2_000, 5_000, 10_000)
SAMPLES_PER_CONVERSATION = 20


def samples(num_trajectories: int) -> tuple[Trajectory, ...]:
    return stepwise_chains(
        num_trajectories // SAMPLES_PER_CONVERSATION,
        SAMPLES_PER_CONVERSATION,
        prompt_tokens=(1800, 2600),
        turn_tokens=(45, 130),
        style=Style(vocab_size=32_000),
    )


def planning_s(trajectories: tuple[Trajectory, ...], reuse: PrefixReuse, num_repeats: int) -> float:
    """Least CPU seconds of `num_repeats` plans over 8 ranks."""
    cost = CostModel.of_shape(ModelShape.from_name("small"))
    config = PlanConfig(8192, data_parallel_size=8, prefix_reuse=reuse, cost=cost)
    seconds = []
    for _ in range(num_repeats):
        begin = time.process_time()
        build_plan(trajectories, config)
        seconds.append(time.process_time() - begin)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"append a line to {RESULTS.name}")
    options = parser.parse_args()
    everything = samples(max(SIZES))
    mean_tokens = sum(map(len, everything)) / len(everything)
    curve = [planning_s(everything[:size], PrefixReuse.AUTO, 3) for size in SIZES]
    for size, seconds in zip(SIZES, curve, strict=True):
        print(
            f"{size:>6,} trajectories of {mean_tokens:,.0f} tokens: {seconds:.2f} s, {1e6 * seconds / size:.0f} us each"
        )
    unrelated = two_level_groups(64, 1, 500, 500)
    auto, off = (1e3 * planning_s(unrelated, reuse, 50) for reuse in (PrefixReuse.AUTO, PrefixReuse.OFF))
    print(f"64 unrelated trajectories: {auto:.2f} ms with reuse auto, {off:.2f} ms without reuse")
    if options.write:
        cells = [
            datetime.date.today().isoformat(),
            platform.machine(),
            f"{mean_tokens:,.0f}",
            *(f"{seconds:.2f}" for seconds in curve),
            f"{auto:.2f}",
            f"{off:.2f}",
        ]
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
