"""Draw the forest and the schedule of a trajectory file, or of a built-in example: the picture in the README.

python tools/draw_schedule.py OUT.png [FILE] [--model small] [--max-tokens N] [--pp N] [--vpp N]
"""

from __future__ import annotations

import argparse

from prefixflow.draw import draw_plan
from prefixflow.plan.cost import CostModel
from prefixflow.plan.plan import PlanConfig
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.search import plan_pipeline
from prefixflow.testing.generate import Style, two_level_groups
from prefixflow.trajectories import read_trajectories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--model", default="small")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--vpp", type=int, default=1)
    options = parser.parse_args()
    shape = ModelShape.load(options.model)
    if options.file:
        trajectories = read_trajectories(options.file, vocab_size=shape.vocab_size)
        title = options.file
    else:
        style = Style(vocab_size=shape.vocab_size)
        trajectories = two_level_groups(2, 6, prefix_tokens=480, suffix_tokens=(90, 160), seed=3, style=style)
        title = "Two prompts, six answers each: every prompt is computed once"
    config = PlanConfig(
        max_tokens_per_microbatch=options.max_tokens,
        pipeline_size=options.pp,
        num_chunks=options.vpp,
        cost=CostModel.of_shape(shape),
    )
    draw_plan(plan_pipeline(trajectories, config), trajectories, options.out, title=title)


if __name__ == "__main__":
    main()
