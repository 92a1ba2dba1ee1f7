"""Write a trajectory file to try things with: random tokens in the shape of a workload, and no model needed.

    python examples/make_trajectories.py OUT.jsonl --shape answers --groups 8 --group-size 8 --prompt-tokens 192 --turn-tokens 48

Shapes:
    answers  --group-size answers to each prompt
    steps    cumulative samples of an agent: sample k is the prompt and all turns up to action k, which it trains; between two
             actions the environment speaks
    tree     tree search of --depth branchings by --branching, one trajectory a leaf; inner branches are trained by all below

The reward is the share of even tokens among those that a trajectory trains, so a trainer has something to learn: advantages are
the group's centred rewards over their standard deviation.

With --experts the trajectories bring random routes for --routing-replay rollout, in OUT.routes.safetensors; some are unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from prefixflow.testing.generate import Style, stepwise_chains, trees, two_level_groups, with_routes
from prefixflow.trajectories import RouteShape, Trajectory, write_trajectories


def make_batch(options: argparse.Namespace) -> tuple[Trajectory, ...]:
    """`--groups` groups of the shape, each side by side."""
    style = Style(vocab_size=options.vocab_size)
    prompt, turn = options.prompt_tokens, (options.turn_tokens // 2, options.turn_tokens)
    if options.shape == "answers":
        batch = two_level_groups(options.groups, options.group_size, prompt, turn, seed=options.seed, style=style)
    elif options.shape == "steps":
        batch = stepwise_chains(options.groups, options.group_size, prompt, turn, seed=options.seed, style=style)
    else:
        sizes = (options.groups, options.depth, options.branching, turn)
        batch = trees(*sizes, prompt_tokens=prompt, seed=options.seed, style=style)
    return tuple(scored for _, group in groupby(batch, lambda t: t.group) for scored in with_rewards(list(group)))


def with_rewards(group: Sequence[Trajectory]) -> list[Trajectory]:
    rewards = np.array([np.mean(t.tokens[t.loss_mask] % 2 == 0) for t in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return [
        replace(t, reward=float(reward), advantages=np.full(len(t), advantage))
        for t, reward, advantage in zip(group, rewards, advantages, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--shape", choices=("answers", "steps", "tree"), default="answers")
    parser.add_argument("--groups", type=int, default=8, help="prompts, conversations or trees")
    parser.add_argument("--group-size", type=int, default=8, help="answers of a prompt, or actions of a conversation")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--branching", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument(
        "--turn-tokens", type=int, default=48, help="the longest answer, turn or branch; the shortest is half of it"
    )
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--moe-layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="experts of a MoE layer; 0 writes no routes")
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    trajectories = make_batch(options)
    if options.experts:
        shape = RouteShape(options.moe_layers, options.topk, options.experts)
        trajectories = with_routes(trajectories, shape, seed=options.seed, missing=0.02)
    write_trajectories(options.out, trajectories)


if __name__ == "__main__":
    main()
