"""Write a trajectory file to try things with: prompts of random tokens with several answers each, and no model needed.

    python examples/make_trajectories.py OUT.jsonl --groups 8 --group-size 8 --prompt-tokens 192 --answer-tokens 48

The reward is the share of even tokens in the answer, so a trainer has something to learn: advantages are the group's
centred rewards over their standard deviation.

With --experts the trajectories bring random routes for --routing-replay rollout, in OUT.routes.safetensors; some are unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from prefixflow.testing.generate import with_routes
from prefixflow.trajectories import RouteShape, Trajectory, write_trajectories


def make_group(rng: np.random.Generator, name: str, options: argparse.Namespace) -> Iterator[Trajectory]:
    prompt = rng.integers(options.vocab_size, size=options.prompt_tokens)
    answers = [
        rng.integers(options.vocab_size, size=rng.integers(options.answer_tokens // 2, options.answer_tokens + 1))
        for _ in range(options.group_size)
    ]
    rewards = np.array([np.mean(answer % 2 == 0) for answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for member, answer in enumerate(answers):
        yield Trajectory(
            id=f"{name}-{member}",
            group=name,
            tokens=np.concatenate([prompt, answer]),
            loss_mask=np.repeat([False, True], [len(prompt), len(answer)]),
            advantages=float(advantages[member]),
            reward=float(rewards[member]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--answer-tokens", type=int, default=48, help="the longest answer; the shortest is half of it")
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--moe-layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="experts of a MoE layer; 0 writes no routes")
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    groups = (make_group(rng, f"prompt-{number}", options) for number in range(options.groups))
    trajectories = tuple(trajectory for group in groups for trajectory in group)
    if options.experts:
        shape = RouteShape(options.moe_layers, options.topk, options.experts)
        trajectories = with_routes(trajectories, shape, seed=options.seed, missing=0.02)
    write_trajectories(options.out, trajectories)


if __name__ == "__main__":
    main()
